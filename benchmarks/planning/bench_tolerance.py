"""What a wider tolerance of balance saves in communication; needs no GPU.

    python -m benchmarks.planning.bench_tolerance [--csv FILE] [--seeds 50] [--tokens 1048576] [--documents 500]
        [--ranks 64]

Documents with lengths log-uniform over a factor of 64: full, causal and with a window of 1,024 keys. For each
tolerance the mean over the seeds of the rows that all ranks fetch, as a share of the sequence, the worst balance, and
the mean time to assign chunks. ``worst_rise`` is the largest ratio, over the seeds, of the rows to the fewest that a
smaller tolerance fetched: above 1.05 the run fails.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from benchmarks._lib.batches import PackedCase
from benchmarks._lib.provenance import table_parser, write_csv
from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import make_dispatch
from megatron_magi.plan.partition import areas_by_place, partition

TOLERANCES = (1.0, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5)
KINDS = ("full", "causal", "window")
MOST_RISE = 1.05


def make_mask(kind: str, lengths: np.ndarray) -> AttnMask:
    """Packed documents of one kind."""
    if kind == "window":
        return builders.sliding_window(left=1024, right=0, doc_lengths=lengths)
    return builders.varlen(doc_lengths=lengths, causal=kind == "causal")


def measure(mask: AttnMask, cp_size: int) -> np.ndarray:
    """For each tolerance the share fetched, the balance and the seconds, ``[len(TOLERANCES), 3]``."""
    rows = []
    for tolerance in TOLERANCES:
        config = DispatchConfig(algorithm="affinity", balance_tolerance=tolerance)
        start = time.perf_counter()
        dispatch = make_dispatch(mask, config, cp_size)
        seconds = time.perf_counter() - start
        part = partition(mask, dispatch)
        areas = sum(areas_by_place(part))
        rows.append([part.remote_rows.sum() / mask.total_seqlen_q, areas.max() / areas.mean(), seconds])
    return np.array(rows)


def rises(fetched: np.ndarray) -> np.ndarray:
    """Each figure over the smallest before it and itself, along the last axis."""
    return fetched / np.maximum(np.minimum.accumulate(fetched, axis=-1), 1e-12)


def main() -> None:
    """Prints the table, and fails where a wider tolerance fetches more."""
    parser = table_parser(__doc__)
    for name, default in (("seeds", 50), ("tokens", 1 << 20), ("documents", 500), ("ranks", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    case = PackedCase(args.tokens, args.documents, args.ranks)
    header = ["tokens", "documents", "ranks", "mask", "tolerance", "fetch", "worst_rise", "worst_balance", "dispatch_s"]
    print("".join(f"{h:>15}" for h in header))
    table, worst = [], 0.0
    for kind in KINDS:
        found = np.array([measure(make_mask(kind, case.lengths(s)), args.ranks) for s in range(args.seeds)])
        rise = rises(found[:, :, 0]).max(axis=0)
        worst = max(worst, float(rise.max()))
        for i, tolerance in enumerate(TOLERANCES):
            share, balance, seconds = found[:, i, 0].mean(), found[:, i, 1].max(), found[:, i, 2].mean()
            figures = (f"{share:.4f}", f"{rise[i]:.4f}", f"{balance:.4f}", f"{seconds:.4f}")
            table.append([args.tokens, args.documents, args.ranks, kind, tolerance, *figures])
            print("".join(f"{c!s:>15}" for c in table[-1]), flush=True)
    print(f"worst rise of the rows fetched: {worst:.4f}")
    write_csv(args.csv, header, table)
    sys.exit(f"a wider tolerance fetches {worst:.3f} times the rows" if worst > MOST_RISE else 0)


if __name__ == "__main__":
    main()
