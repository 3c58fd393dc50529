"""Versions by turns, without running them."""

from __future__ import annotations

import sys

from benchmarks import compare_versions
from benchmarks._lib.results import read_results

SCRIPT = """
import os, pathlib, sys
import megatron_magi
pathlib.Path(sys.argv[-1]).write_text(f"name,commit\\n{megatron_magi.NAME},{os.environ['MAGI_COMMIT']}\\n")
"""


def test_versions_take_turns_in_both_orders(tmp_path, monkeypatch):
    ran = []

    def run(tree, version, benchmark, ranks, csv):
        ran.append((tree, version, benchmark, ranks))
        return [{"mask": "causal", "ms": str(len(ran))}]

    path = tmp_path / "compared.csv"
    monkeypatch.setattr(compare_versions, "run", run)
    monkeypatch.setattr(compare_versions, "check_out", lambda version, folder: f"tree of {version}")
    arguments = [
        "--versions",
        "a",
        "now",
        "--turns",
        "2",
        "--csv",
        str(path),
        "--",
        "kernels.bench_sparse",
        "--only",
        "x",
    ]
    monkeypatch.setattr(sys, "argv", ["compare_versions.py", *arguments])
    compare_versions.main()
    assert [version for _, version, _, _ in ran] == ["a", "now", "now", "a"]
    assert ran[0] == ("tree of a", "a", ["kernels.bench_sparse", "--only", "x"], 0)
    rows = read_results(path)[1]
    assert [tuple(row.values()) for row in rows] == [
        ("a", "1", "causal", "1"), ("now", "1", "causal", "2"), ("now", "2", "causal", "3"), ("a", "2", "causal", "4"),
    ]  # fmt: skip


def test_a_version_runs_with_its_own_package(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__init__.py").touch()
    (tmp_path / "megatron_magi.py").write_text("NAME = 'of this tree'\n")
    (tmp_path / "benchmarks" / "script.py").write_text(SCRIPT)
    rows = compare_versions.run(tmp_path, "abc", ["script", "--tokens", "1"], 0, tmp_path / "run.csv")
    assert rows == [{"name": "of this tree", "commit": "abc"}]
