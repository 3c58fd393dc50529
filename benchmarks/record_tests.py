"""Runs tests and writes down how many passed, with commit, device and date.

Usage: python -m benchmarks.record_tests --csv gpu_tests.csv -- -m gpu tests/ops -n 8

What stands behind ``--`` goes to pytest. A row of the table is a test file. Exits with pytest's status.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from benchmarks._lib.provenance import write_csv

HEADER = ("file", "passed", "failed", "skipped", "seconds")


def count(report: str) -> list[tuple[str, int, int, int, float]]:
    """Rows of the table from the text of a JUnit report."""
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = 1 if kinds & {"failure", "error"} else 2 if "skipped" in kinds else 0
        row = files[case.get("classname", "").removeprefix("tests.")]
        row[outcome] += 1
        row[3] += float(case.get("time", 0))
    return [(name, int(p), int(f), int(s), round(t, 1)) for name, (p, f, s, t) in sorted(files.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True)
    parser.add_argument("pytest", nargs="+", help="its arguments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *args.pytest]
        status = subprocess.run(command, check=False).returncode
        if not report.exists():
            return status or 1
        rows = count(report.read_text())
    write_csv(args.csv, HEADER, rows)
    print(", ".join(f"{sum(row[i] for row in rows)} {HEADER[i]}" for i in (1, 2, 3)))
    return status


if __name__ == "__main__":
    sys.exit(main())
