"""Runs tests and writes down how many passed, with commit, device and date.

Usage: python -m benchmarks.record_tests --csv gpu_tests.csv -- -m gpu tests/ops -n 8

What stands behind ``--`` goes to pytest. A row of the table is a test file. Exits with pytest's status. Tests that had
no turn before ``--limit`` are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from benchmarks._lib.provenance import write_csv

HEADER = ("file", "passed", "failed", "skipped", "seconds")
INTERRUPTED = 2
"""Pytest's status of a run that was interrupted; it writes its report nevertheless."""
GRACE_S = 30


def count(report: str) -> list[tuple[str, int, int, int, float]]:
    """Rows of the table from the text of a JUnit report."""
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for case in ElementTree.fromstring(report).iter("testcase"):
        if not case.get("classname"):  # it was under way when the run was interrupted
            continue
        kinds = {child.tag for child in case}
        outcome = 1 if kinds & {"failure", "error"} else 2 if "skipped" in kinds else 0
        row = files[case.get("classname").removeprefix("tests.")]
        row[outcome] += 1
        row[3] += float(case.get("time", 0))
    return [(name, int(p), int(f), int(s), round(t, 1)) for name, (p, f, s, t) in sorted(files.items())]


def run(command: list[str], limit_s: float | None) -> tuple[int, bool]:
    """Status of a command of pytest, and whether it was interrupted at its limit."""
    # Jobs in a shell's background, and what they start, ignore interrupts.
    process = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        return process.wait(limit_s), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(GRACE_S), True
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait() and INTERRUPTED, True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end the run after so long")
    parser.add_argument("pytest", nargs="+", help="its arguments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *args.pytest]
        status, ended = run(command, args.limit)
        if not report.exists():
            return status or 1
        rows = count(report.read_text())
    notes = [f"ended after {args.limit:g} s: tests that are not counted had no turn"] if ended else []
    write_csv(args.csv, HEADER, rows, notes)
    print(", ".join(f"{sum(row[i] for row in rows)} {HEADER[i]}" for i in (1, 2, 3)))
    return status


if __name__ == "__main__":
    sys.exit(main())
