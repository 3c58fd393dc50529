"""A benchmark with the package of several commits, by turns.

    python -m benchmarks.compare_versions --versions COMMIT now --csv FILE [--turns N] [--ranks N]
        -- kernels.bench_sparse --only blocks

A version is a commit, or ``now`` for the files of this checkout. Of a commit the package and its kernels are taken from
git, and its libraries in C++ are built; the benchmark is that of this checkout, so that only commits whose package it
can call can be compared. In a turn each version runs once, in processes of its own (under torchrun with ``--ranks``),
every other turn in reverse order. Columns are those of the benchmark after the version and the turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._lib.provenance import write_csv
from benchmarks._lib.results import read_results

ROOT = Path(__file__).parents[1]
NOW = "now"
TAKEN = ("megatron_magi", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE")
"""What is taken of a commit; the benchmarks are this checkout's."""


def check_out(version: str, folder: Path) -> Path:
    """A tree with the package of a version and the benchmarks of this checkout."""
    if version == NOW:
        return ROOT
    tree = folder / version
    tree.mkdir()
    archive = subprocess.run(["git", "archive", version, *TAKEN], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=tree, input=archive, check=True)
    shutil.copytree(ROOT / "benchmarks", tree / "benchmarks", ignore=shutil.ignore_patterns("results", "__pycache__"))
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=tree, check=True)
    return tree


def run(tree: Path, version: str, benchmark: list[str], ranks: int, csv: Path) -> list[dict[str, str]]:
    """Rows of one run."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", f"benchmarks.{benchmark[0]}", *benchmark[1:], "--csv", str(csv)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    if version != NOW:
        environment["MAGI_COMMIT"] = version
    subprocess.run(command, cwd=tree, env=environment, check=True)
    return read_results(csv)[1]


def main() -> None:
    """Runs all versions in turns; what there is is written after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", required=True, help=f"commits, or {NOW!r}")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=0, help="under torchrun, on so many GPUs")
    parser.add_argument("--csv", required=True)
    parser.add_argument("benchmark", nargs="+", help="module below benchmarks, and its options without --csv")
    args = parser.parse_args()
    table: list[list] = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {version: check_out(version, Path(folder)) for version in args.versions}
        for turn in range(args.turns):
            for version in list(trees)[:: -1 if turn % 2 else 1]:
                rows = run(trees[version], version, args.benchmark, args.ranks, Path(folder) / "run.csv")
                table += [[version, turn + 1, *row.values()] for row in rows]
                write_csv(args.csv, ["version", "turn", *rows[0]], table)


if __name__ == "__main__":
    main()
