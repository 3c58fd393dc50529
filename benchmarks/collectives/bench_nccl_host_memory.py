"""Host memory of a process before and after its first collective of NCCL, on the GPUs of one machine.

python -m benchmarks.collectives.bench_nccl_host_memory [--csv FILE]
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks._lib.memory import resident_mib
from benchmarks._lib.provenance import table_parser, write_csv
from megatron_magi.testing.spawn import run_ranks

HEADER = ["rank", "before_mib", "after_mib"]


def measure(rank: int, num_ranks: int) -> list:
    """The row of a rank."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context of the device is there before
    before = resident_mib()
    dist.all_gather_object([None] * num_ranks, os.getpid())
    return [rank, f"{before:.1f}", f"{resident_mib():.1f}"]


def main() -> None:
    """Prints the table."""
    parser = table_parser(__doc__)
    args = parser.parse_args()
    rows = run_ranks(measure, torch.cuda.device_count(), timeout_s=120.0, backend="nccl")
    print(*(",".join(map(str, row)) for row in (HEADER, *rows)), sep="\n")
    write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
