"""Ranks that share GPUs: who asks for it gets it, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_magi import envs
from megatron_magi.comm import peers
from megatron_magi.testing import shared_gpus
from megatron_magi.testing.megatron_rank import Request, rank_environment
from megatron_magi.testing.spawn import run_ranks
from tests import conftest


@pytest.fixture
def machine(monkeypatch):
    """``machine(gpus, each, nccl)``: a machine with so many GPUs, and ranks for each."""

    def pretend(gpus, each="", nccl=(2, 30, 7)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(shared_gpus, "nccl_version", lambda: nccl)
        monkeypatch.setenv(envs.TEST_RANKS_PER_GPU, each)

    return pretend


def test_without_the_variable_each_rank_has_a_gpu_of_its_own(machine, monkeypatch):
    machine(1)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    shared_gpus.begin()
    assert peers.RANKS_PER_GPU == 1 and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
    assert (shared_gpus.most_ranks(), shared_gpus.local_rank(3)) == (1, 3)
    assert shared_gpus.why_not(2) == "needs 2 GPUs, there are 1"
    assert shared_gpus.why_not(1) is None


def test_ranks_share_as_many_gpus_as_there_are(machine):
    machine(2, "3")
    assert [shared_gpus.local_rank(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert shared_gpus.most_ranks() == 6 and shared_gpus.why_not(6) is None
    assert shared_gpus.why_not(8) == "needs 8 GPUs, there are 2 for 3 ranks each"
    machine(0, "3")
    assert shared_gpus.local_rank(2) == 2 and shared_gpus.why_not(1) == "needs 1 GPUs, there are 0 for 3 ranks each"


@pytest.mark.parametrize(("nccl", "known"), [((2, 28, 9), "2.28.9"), ((), "none")])
def test_an_older_nccl_is_named_where_it_would_refuse(machine, nccl, known):
    machine(2, "2", nccl)
    assert shared_gpus.why_not(2) is None
    assert shared_gpus.why_not(3) == f"ranks that share a GPU need NCCL 2.30 or later, this is {known}"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_what_is_no_number_of_ranks_is_refused(machine, text):
    machine(1, text)
    with pytest.raises(ValueError, match="MAGI_TEST_RANKS_PER_GPU: expected a positive number, got"):
        envs.ranks_per_gpu()


def test_tests_of_several_gpus_are_skipped_with_the_reason_or_run(machine):
    marks = {"gpu": pytest.mark.gpu, "ranks": pytest.mark.ranks(2)}
    item = SimpleNamespace(path=Path(conftest.__file__), get_closest_marker=marks.get)
    machine(1)
    assert conftest._why_not(item) == "needs 2 GPUs, there are 1"
    machine(1, "2")
    assert conftest._why_not(item) is None
    del marks["gpu"]  # over CPUs
    machine(0)
    assert conftest._why_not(item) is None


def test_ranks_of_one_gpu_share_memory_only_where_they_may(machine, monkeypatch):
    def refusal(devices):
        said = {"host": ["a", ""], "capability": [9, 0], "sms": 132, "groups": 0, "captured": False}
        return peers.refusal_of([{**said, "device": device} for device in devices])

    monkeypatch.setattr(peers, "RANKS_PER_GPU", 1)
    assert refusal("ab") is None and refusal("aa") == refusal("aab") == "needs a GPU for each rank"
    machine(1, "2")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    shared_gpus.begin()
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert refusal("aa") is None and refusal("aab") is None and refusal("aaba") == "needs a GPU for each rank"


def test_ranks_of_megatron_get_the_gpu_that_they_share(machine):
    request = Request("script.py", [], 4, 1, "/tmp", 1.0)
    machine(2)
    assert [rank_environment(request, rank)["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "2", "3"]
    machine(2, "2")
    assert [rank_environment(request, rank)["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]


def environment_of_a_rank(rank, num_ranks):
    return os.environ["RANK"], os.environ["LOCAL_RANK"], peers.RANKS_PER_GPU


def test_ranks_over_cpus_are_as_they_were(machine):
    machine(0, "2")
    assert run_ranks(environment_of_a_rank, 2) == [("0", "0", 1), ("1", "1", 1)]


def test_a_module_that_torchrun_starts_runs_with_its_arguments(tmp_path):
    (tmp_path / "told.py").write_text(
        "import os, sys\nfrom megatron_magi.comm import peers\n"
        "if __name__ == '__main__':\n    print(sys.argv[1:], os.environ['LOCAL_RANK'], peers.RANKS_PER_GPU)\n"
    )
    command = [sys.executable, "-m", "megatron_magi.testing.shared_gpus", "told", "--steps", "3"]
    environment = {**os.environ, "LOCAL_RANK": "0", envs.TEST_RANKS_PER_GPU: "2", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['--steps', '3'] 0 2"


def test_the_version_of_nccl_is_that_of_the_loaded_library():
    version = shared_gpus.nccl_version()
    assert version == () or version >= (2, 0, 0)
