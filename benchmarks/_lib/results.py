"""Results files: where they are, and how they are read."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = (RESULTS / "current", RESULTS / "archive")
Row = Mapping[str, str]


def read_results(path: str | Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """``(provenance, rows)`` of a results file: its leading ``# name: value`` lines, joined by name, and its table."""
    lines = Path(path).read_text().splitlines()
    notes: dict[str, str] = {}
    for name, value in (line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line):
        notes[name] = f"{notes[name]}; {value}" if name in notes else value
    return notes, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def find_results(pattern: str, folders: Sequence[Path] = FOLDERS) -> list[Path]:
    """The results files whose names match, by name."""
    return sorted((file for folder in folders for file in folder.glob(pattern)), key=lambda file: file.name)
