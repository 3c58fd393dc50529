"""Host times of calls, on a CPU."""

from __future__ import annotations

import sys

from benchmarks._lib.results import read_results
from benchmarks.kernels import bench_host_calls as bench


def test_each_call_is_timed(tmp_path, monkeypatch):
    path = tmp_path / "calls.csv"
    monkeypatch.setattr(bench, "LAYERS", 1)
    monkeypatch.setattr(bench, "WARM_UP", 0)
    names = ["autograd alone", "one rank", "slice_attention", "flex_flash_attn_func"]
    monkeypatch.setattr(sys, "argv", ["", "--calls", *names, "--steps", "1", "--csv", str(path)])
    bench.main()
    rows = read_results(path)[1]
    assert [row["call"] for row in rows] == names
    assert all(float(row["shortest_backward_us"]) > 0 for row in rows)
