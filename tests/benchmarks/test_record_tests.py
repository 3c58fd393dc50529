"""The record of a test run."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
import torch

from benchmarks import record_tests
from benchmarks._lib.provenance import provenance
from megatron_magi import envs
from megatron_magi.testing import shared_gpus

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ops.test_b" name="x[1]" time="1.26"/>
<testcase classname="tests.ops.test_b" name="x[2]" time="0.5"><failure>assert</failure></testcase>
<testcase classname="tests.ops.test_b" name="y" time="0.1"><skipped/></testcase>
<testcase classname="tests.ops.test_a" name="z" time="2"><error>fixture</error></testcase>
<testcase time="0.000" />
</testsuite></testsuites>"""


def test_outcomes_are_counted_by_file():
    assert record_tests.count(REPORT) == [("ops.test_a", 0, 1, 0, 2.0), ("ops.test_b", 1, 1, 1, 1.9)]


def test_a_run_is_written_down_with_where_it_comes_from(tmp_path, monkeypatch):
    path = tmp_path / "tests.csv"
    monkeypatch.setattr("sys.argv", ["record_tests.py", "--csv", str(path), "--", "tests/runtime/test_lru.py", "-q"])
    assert record_tests.main() == 0
    *notes, header, row = path.read_text().splitlines()
    assert [note.split(":")[0] for note in notes] == ["# command", "# commit", "# device", "# software", "# date"]
    assert header == "file,passed,failed,skipped,seconds"
    assert row.startswith("runtime.test_lru,") and ",0,0," in row


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_that_meets_its_limit_is_written_down_as_far_as_it_came(tmp_path, monkeypatch, workers):
    path, slow, under_way = tmp_path / "tests.csv", tmp_path / "test_slow.py", tmp_path / "under_way"
    later = f"open({str(under_way)!r}, 'w').close(); time.sleep(600)"
    slow.write_text(f"import time\ndef test_a(): pass\ndef test_b(): {later}\ndef test_c(): pass\n")

    class Process(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout != 6:
                return super().wait(timeout)
            while not under_way.exists() and self.poll() is None:
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    pytest_args = [str(slow), "-q", "-n", workers, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    monkeypatch.setattr("sys.argv", ["record_tests.py", "--csv", str(path), "--limit", "6", "--", *pytest_args])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job in a shell's background
    try:
        assert record_tests.main() == record_tests.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, handler)
    lines = path.read_text().splitlines()
    assert "# note: ended after 6 s: tests that are not counted had no turn" in lines
    table = [row.split(",")[:4] for row in lines if not row.startswith("#")]
    assert table[1:] == [["test_slow", "1", "0", "0"]]


@pytest.mark.parametrize(("each", "shared"), [("1", ""), ("2", ", shared by up to 2 ranks each, NCCL 2.30.7")])
def test_it_says_where_ranks_shared_gpus(monkeypatch, each, shared):
    monkeypatch.setenv(envs.TEST_RANKS_PER_GPU, each)
    monkeypatch.setattr(shared_gpus, "nccl_version", lambda: (2, 30, 7))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert provenance()["device"] == f"1 x NVIDIA H200{shared}"
