"""Sparse attention on one Hopper GPU: rates of the visible pairs, forward and backward, compared with peers and dense.

    python -m benchmarks.kernels.bench_sparse [--csv FILE] [--only PREFIX ...] [--min-tokens N] [--max-tokens N]
        [--seconds S] [--forward-only] [--peers flex flashinfer triton flash_mla]
    python -m benchmarks.kernels.bench_sparse --draw CSV ...

bf16, head_dim 128 (``mla``: 576, values 512). A backward counts five products, 2.5 times those of its forward (``mla``:
2.53 times). Times are of whole calls, on a device whose L2 cache was flushed, making lists of a mask included.
``uniform``: random masks of 128 x 128 (or 64) blocks, one a key head, 64:8 heads. ``variable``: blocks of 32 to 512
tokens, one mask for all heads, 64:8, as ranges for `flex_flash_attn_func`. ``video``: windows in three dimensions, as
tiles of 128 tokens or as ranges, 24:24 heads. ``blocks`` and ``index``: one query of 128 heads and one key head for
each 64 keys, which sees an eighth of all keys (or ``top`` so many) at random, listed in rising order. ``top 64``:
blocks of 64 (or 128) queries of 7:7 heads see 64 blocks of 64 keys each. ``mla top``: 4,096 queries of 64 or 128 latent
heads see so many single keys at random, listed in rising order (``mla heads``: 8 to 96 heads and 2,048 keys).
``mla causal``: all keys up to the query, as lists. ``dense``: `slice_attention` of everything, 64:8 heads. ``plan_us``:
what a new mask costs on the device; masks as ranges are planned on the host, once, which is not in the times. A peer's
results are compared with ours before it is timed; one that is not installed, or does not take a case, is said so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._lib.latent_providers import LATENT_PEERS, MOST_ERROR
from benchmarks._lib.provenance import write_csv
from benchmarks._lib.providers import Unavailable
from benchmarks._lib.sparse_cases import Case, cases
from benchmarks._lib.sparse_providers import PEERS
from benchmarks._lib.timing import attempt, time_together

HEADER = (
    "case", "queries", "keys", "heads", "q_block", "k_block", "keys_seen", "provider", "forward_ms", "forward_tflops",
    "backward_ms", "backward_tflops", "deterministic_ms", "deterministic_tflops", "plan_us",
)  # fmt: skip


def measure(case: Case, seconds: float, peers: list[str], forward_only: bool = False) -> list[list]:
    """Rows of the table, one a provider; what failed is its error."""

    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in case.shapes]
    frozen = [t.detach() for t in leaves]
    out, _ = case.attend(*leaves)
    dout = torch.randn_like(out)

    def backward_of(out: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    calls: dict[str, Callable[[], object]] = {
        f"{case.ours} forward": lambda: case.attend(*frozen), f"{case.ours} backward": backward_of(out)
    }  # fmt: skip
    if not case.name.startswith("index") and case.blocks[1] != 64:  # of 64 keys gradients always repeat
        calls[f"{case.ours} deterministic"] = backward_of(case.attend(*leaves, deterministic=True)[0])
    if case.plan is not None:
        calls[f"{case.ours} plan"] = case.plan
    failed: dict[str, str] = {}
    for name in peers:
        try:
            passes, error = attempt(peer_of(case, name), case, *frozen)
        except Unavailable as why:
            print(f"{case.name}, {name}: left out, {why}", file=sys.stderr)
            continue
        if passes is not None and passes[0] is not None:
            found = passes[0]()
            difference = float((found.float() - out.detach().float()).norm() / out.detach().float().norm())
            error = "" if difference < MOST_ERROR else f"its output is {difference:.3f} off"
        if error or passes is None:
            failed[name] = error
            continue
        calls |= {f"{name} {which}": call for which, call in zip(("forward", "backward"), passes, strict=True) if call}
    if forward_only:
        calls = {name: call for name, call in calls.items() if name.endswith(" forward")}
    times, _ = time_together(calls, seconds)
    return [
        _row(case, name, times, failed.get(name, "")) for name in (case.ours, *peers) if _is_known(name, times, failed)
    ]


def peer_of(case: Case, name: str) -> Callable:
    """What makes the passes of a peer.

    Raises:
        Unavailable: it is no peer of such a case.
    """
    of_latent_keys = case.indices is not None
    found = (LATENT_PEERS if of_latent_keys else PEERS).get(name)
    if found is None:
        raise Unavailable(
            "it has no attention over lists of latent keys"
            if of_latent_keys
            else "it is measured over latent keys alone"
        )
    return found


def _is_known(name: str, times: dict, failed: dict) -> bool:
    return name in failed or any(f"{name} {which}" in times for which in ("forward", "backward"))


def _row(case: Case, name: str, times: dict[str, float | str], error: str) -> list:
    row: list = [case.name, *case.shape, "{}:{}".format(*case.heads), *case.blocks, round(case.keys_seen, 1), name]
    forward, backward = case.forward_flops, case.backward_flops
    for which, flops in (("forward", forward), ("backward", backward), ("deterministic", backward)):
        ms = times.get(f"{name} {which}", error if which == "forward" else "")
        row += [f"{ms:.4f}", round(flops / ms / 1e9)] if isinstance(ms, float) else [ms, ""]
    plan = times.get(f"{name} plan", "")
    return [*row, f"{1e3 * plan:.1f}" if isinstance(plan, float) else plan]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="file to write; it is written anew after each case")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names, as 'uniform 25%% 128', 'blocks 64'")
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=524288)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a case")
    parser.add_argument("--forward-only", action="store_true", help="no backwards, no planning")
    parser.add_argument("--peers", nargs="*", default=[], choices=[*PEERS, *LATENT_PEERS])
    parser.add_argument("--draw", nargs="+", metavar="CSV", help="only draw charts, in the folder of the first")
    args = parser.parse_args()
    if args.draw:
        from benchmarks._lib.charts.sparse import draw

        draw(args.draw)
        return
    torch.manual_seed(0)
    rows: list[list] = []
    print(*HEADER, sep=",")
    for case in cases(args.only, args.min_tokens, args.max_tokens):
        for row in measure(case, args.seconds, args.peers, args.forward_only):
            rows.append(row)
            print(*row, sep=",", flush=True)
        write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
