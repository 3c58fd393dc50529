"""A small case of each Hopper kernel, to be run under compute-sanitizer.

Usage: compute-sanitizer --tool memcheck python -m benchmarks.sanitize.attention [sparse | small | keys | blocks]
       compute-sanitizer --tool racecheck --racecheck-report analysis python -m benchmarks.sanitize.attention small each

With ``sparse`` those of sparse attention alone, with ``small`` these with fewer tokens, with ``keys`` or ``blocks`` a
few of single keys or of blocks. racecheck follows barriers thread by thread: where one lane of a warp arrives for all,
after they have synchronized, it takes what the others did before for a race, as it does in a ring of two buffers
(`sanitize/ring.py`, modes 0 and 3). With ``each`` the sparse kernels are compiled so that each lane arrives for itself,
and so that who hands over a sum waits at the named barrier too; nothing else differs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_magi.backends.sm90 import tuning
from megatron_magi.cuda import build
from megatron_magi.mask import builders
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import row_delta, slice_attention_backward, slice_attention_forward
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
LENGTHS = (100, 13, 77)
# Query heads, key heads (documents are short: heads of a group are packed), dtype, options.
CASES = (
    (16, 2, torch.bfloat16, {}),
    (8, 1, torch.bfloat16, {"deterministic": True}),
    (4, 2, torch.bfloat16, {}),
    (4, 2, torch.bfloat16, {"softcap": 20.0}),
    (4, 2, torch.bfloat16, {"deterministic": True}),
    (3, 3, torch.float16, {}),
    (3, 3, torch.float16, {"deterministic": True}),
)
ARRIVE = "barrier_arrive(smem_address(&barrier));"
EACH_LANE = {
    f"  __syncwarp();\n  if (lane == 0) {ARRIVE}": f"  {ARRIVE}",
    "    if (leads) barrier_arrive(barrier);": "    barrier_arrive(barrier);",
    "(&empty), arrivals);": "(&empty), 32 * arrivals);",
    "(&empty[i]), 4 * kGroups);": "(&empty[i]), 128 * kGroups);",
    "(&s.k_empty[i]), 4 * kGroups);": "(&s.k_empty[i]), 128 * kGroups);",
    "(&s.v_empty[i]), 4 * kGroups);": "(&s.v_empty[i]), 128 * kGroups);",
    "named_arrive(kPlaceFree + warpgroup": "named_sync(kPlaceFree + warpgroup",
    "named_arrive(kPlaceFull + warpgroup": "named_sync(kPlaceFull + warpgroup",
}
"""In the sources: an arrival of one lane for its warp, what counts such arrivals, and what is done without waiting."""


def main() -> None:
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=("all", "sparse", "small", "keys", "blocks"), default="all")
    parser.add_argument("each", nargs="?", choices=("each",))
    options = parser.parse_args()
    which, each = options.which, options.each
    unused = set(EACH_LANE)
    if each:
        build.flatten_source = with_arrivals_of_each_lane(build.flatten_source, unused)
    if which == "all":
        dense()
    if which == "keys":
        single_keys()
    elif which == "small":
        sparse(36, 200)
    elif which != "blocks":
        sparse()
    if which != "keys":
        blocks()
    torch.cuda.synchronize()
    assert not (each and which == "small" and unused), unused
    print("computed")


def with_arrivals_of_each_lane(flatten: Callable[[Path], str], unused: set) -> Callable[[Path], str]:
    """Sources of the sparse kernels with `EACH_LANE`; replacements that were made are taken out of ``unused``."""

    def flattened(path: Path) -> str:
        text = flatten(path)
        if not path.name.startswith("sparse_"):
            return text
        for before, after in EACH_LANE.items():
            if before in text:
                unused.discard(before)
                text = text.replace(before, after)
        return text

    return flattened


def dense() -> None:
    """Documents, all head dims and options."""
    mask = builders.varlen(doc_lengths=list(LENGTHS), causal=True)
    for (dim, dim_v), (heads_q, heads_kv, dtype, options) in itertools.product(DIMS, CASES):
        shapes = ((heads_q, dim), (heads_kv, dim), (heads_kv, dim_v))
        q, k, v = (torch.randn(sum(LENGTHS), *s, device="cuda").to(dtype).requires_grad_() for s in shapes)
        sink = torch.randn(2, heads_q, device="cuda").requires_grad_()
        out, meta = slice_attention(q, k, v, mask, sink=sink, impl="ffa", return_max_logits=True, **options)
        dout = torch.randn_like(out)
        out.backward(dout)
        assert all(bool(t.grad.isfinite().all()) for t in (q, k, v, sink))
        add_to_results(q, k, v, mask, out, meta.lse, dout, options)


def sparse(num_rows: int = 150, num_keys: int = 333) -> None:
    """Lists of blocks and of single keys, by tiles of 64 and 128 places, uneven at all ends."""
    for dim, (heads_q, heads_kv), q_block in itertools.product((64, 128), ((128, 1), (12, 2)), (1, 20)):
        shapes = ((num_rows, heads_q), (num_keys, heads_kv), (num_keys, heads_kv))
        leaves = [torch.randn(*s, dim, device="cuda").bfloat16().requires_grad_() for s in shapes]
        for k_block, deterministic in itertools.product((1, 64, 128), (False, True)):
            options = {"impl": "ffa", "deterministic": deterministic}
            if k_block == 1:
                indices = torch.randint(-1, num_keys, (num_rows, heads_kv, 140), device="cuda")
                out, _ = index_sparse_attention(*leaves, indices, return_max_logits=True, **options)
            else:
                blocks = torch.rand(heads_kv, -(-num_rows // q_block), -(-num_keys // k_block), device="cuda") < 0.5
                if q_block == 1:  # as lists
                    blocks = torch.arange(blocks.shape[2], device="cuda").where(blocks, -1)
                out, _ = block_sparse_attention(
                    *leaves, blocks, q_block_size=q_block, k_block_size=k_block, causal=True, **options
                )
            grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
            assert all(bool(t.isfinite().all()) for t in grads)


def single_keys() -> None:
    """Lists of single keys, with and without sums that repeat."""
    leaves = [
        torch.randn(n, h, 128, device="cuda").bfloat16().requires_grad_() for n, h in ((6, 128), (900, 1), (900, 1))
    ]
    indices = torch.rand(6, 1, 900, device="cuda").argsort(-1)[..., :700]
    for deterministic in (False, True):
        out, _ = index_sparse_attention(*leaves, indices, impl="ffa", deterministic=deterministic)
        torch.autograd.grad(out, leaves, torch.randn_like(out))


def blocks() -> None:
    """Lists of blocks, in one kernel and two, with lists of queries that are cut into parts, of three key heads."""
    tuning.SPARSE_PART_BYTES = 1 << 17
    leaves = [
        torch.randn(n, h, 128, device="cuda").bfloat16().requires_grad_() for n, h in ((630, 48), (150, 3), (150, 3))
    ]
    for k_block, deterministic in ((64, False), (128, False), (128, True)):
        mask = torch.rand(1, 32, -(-150 // k_block), device="cuda") < 0.95
        out, _ = block_sparse_attention(
            *leaves, mask, q_block_size=20, k_block_size=k_block, impl="ffa", deterministic=deterministic
        )
        torch.autograd.grad(out, leaves, torch.randn_like(out))


def add_to_results(q, k, v, mask, out, lse, dout, options) -> None:
    """The passes as stages of distributed attention use them: results and fp32 gradients are added to."""
    wide, lse = out.detach().float(), lse.clone()
    slice_attention_forward(q, k, v, mask.bands, out=wide, lse=lse, impl="ffa", **options)
    grads = {f"d{name}": torch.zeros_like(t, dtype=torch.float32) for name, t in (("q", q), ("k", k), ("v", v))}
    delta = row_delta(dout, out.detach(), "ffa")
    slice_attention_backward(dout, q, k, v, lse, delta, mask.bands, impl="ffa", **grads, **options)
    assert all(bool(t.isfinite().all()) for t in (wide, lse, *grads.values()))


if __name__ == "__main__":
    main()
