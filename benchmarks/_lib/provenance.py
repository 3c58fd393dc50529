"""Where a figure comes from: every results file starts with its command, commit, device and date."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron_magi import envs
from megatron_magi.testing import shared_gpus


def provenance() -> dict[str, str]:
    """Command, commit, device, software and date of this run.

    The commit is that of the checkout, or of the variable ``MAGI_COMMIT`` where the sources run
    outside a checkout; ``+changes`` marks files that differ from it.
    """
    return {
        "command": _command(),
        "commit": os.environ.get("MAGI_COMMIT") or _commit(),
        "device": _device(),
        "software": f"python {platform.python_version()}, torch {torch.__version__}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def table_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the command line of a benchmark that prints a table, with ``--csv``.

    Args:
        description: the module's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="also write the rows to this file")
    return parser


def print_row(header: Sequence[str], row: Sequence[Any]) -> None:
    """A line of ``name=value`` for a row, without its empty cells."""
    print("  ".join(f"{name}={cell}" for name, cell in zip(header, row, strict=True) if cell != ""), flush=True)


def write_csv(
    path: str | Path | None, header: Sequence[str], rows: Iterable[Sequence[Any]], notes: Sequence[str] = ()
) -> None:
    """Writes a table with its provenance, and notes, in leading ``#`` lines; without a path nothing."""
    if path is None:
        return
    with open(path, "w", newline="") as file:
        for name, value in [*provenance().items(), *(("note", note) for note in notes)]:
            file.write(f"# {name}: {value}\n")
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def _command() -> str:
    """As it is written in the root of the repository."""
    spec, arguments = getattr(sys.modules["__main__"], "__spec__", None), sys.argv[1:]
    if spec is None:
        return shlex.join(["python", *sys.argv])
    ranks = os.environ["LOCAL_WORLD_SIZE"] if "TORCHELASTIC_RUN_ID" in os.environ else ""
    launcher = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    return shlex.join([*launcher, "-m", spec.name.removesuffix(".__main__"), *arguments])


def _commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def _device() -> str:
    if torch.cuda.is_available():
        each = envs.ranks_per_gpu()
        shared = f", shared by up to {each} ranks each, NCCL {'.'.join(map(str, shared_gpus.nccl_version()))}"
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}{shared if each > 1 else ''}"
    return f"CPU, {os.cpu_count()} cores"
