"""Ranks bring back results in order, failures with their traceback, and never outlive the call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_magi.testing.spawn import PRELOAD_IF_IMPORTED, START_METHODS, RankError, _modules_of_server, run_ranks
from tests.testing.leftovers import ENDINGS, end, leave_processes, running, wait_until_gone

ROOT = Path(__file__).parents[2]


def sum_over_ranks(rank, num_ranks, x):
    total = x + rank
    dist.all_reduce(total)
    return rank, total, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_results_come_back_in_rank_order_and_each_rank_has_one_thread():
    before = dict(os.environ)
    results = run_ranks(sum_over_ranks, 3, torch.zeros(2))
    assert dict(os.environ) == before
    for rank, (got_rank, total, num_threads, omp) in enumerate(results):
        assert (got_rank, total.tolist(), num_threads, omp) == (rank, [3.0, 3.0], 1, "1")


def rank_one_raises(rank, num_ranks):
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def test_a_failing_rank_raises_with_its_traceback_while_others_wait_for_it():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank one has had enough") as caught:
        run_ranks(rank_one_raises, 3)
    assert caught.value.ranks == [1]
    assert "in rank_one_raises" in str(caught.value)
    assert time.monotonic() - start < 300


def rank_one_dies(rank, num_ranks):
    if rank == 1:
        os._exit(7)
    time.sleep(1000)


def test_a_rank_that_dies_raises_with_its_exit_code():
    with pytest.raises(RankError, match="rank 1 of 2: died with exit code 7"):
        run_ranks(rank_one_dies, 2)


def write_pid_then_hang(rank, num_ranks, folder):
    Path(folder, f"{rank}.tmp").write_text(str(os.getpid()))
    Path(folder, f"{rank}.tmp").rename(Path(folder, str(rank)))
    if rank == 1:
        time.sleep(1000)


def test_a_time_out_names_the_ranks_still_running_and_where_and_kills_all(tmp_path):
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 still running after 2") as caught:
        run_ranks(write_pid_then_hang, 2, str(tmp_path), timeout_s=2)
    assert caught.value.ranks == [1]
    assert "in write_pid_then_hang" in str(caught.value)
    assert wait_until_gone([int((tmp_path / str(rank)).read_text()) for rank in (0, 1)])


def test_no_rank_outlives_a_parent_that_is_killed(tmp_path):
    program = (
        "from tests.testing.test_spawn import *\n"
        f"if __name__ == '__main__': run_ranks(write_pid_then_hang, 2, {str(tmp_path)!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        deadline = time.monotonic() + 300
        while not all((tmp_path / str(rank)).exists() for rank in (0, 1)):
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_until_gone([int((tmp_path / str(rank)).read_text()) for rank in (0, 1)])


def leave_processes_and_end(rank, num_ranks, folder, how):
    if rank == 0:
        leave_processes(Path(folder))
        end(how)
    return rank


MESSAGES = {
    "exits": "SystemExit: 3",
    "exits at once": "died with exit code 0",
    "fails at once": "died with exit code 5",
    "raises": "ValueError: bad luck",
    "is killed": "died with exit code -9",
    "hangs": r"ranks \[0\] of 2 still running after 5.0 s\n(?s:.*)in leave_processes_and_end",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_nothing_that_a_rank_started_outlives_the_call_however_the_rank_ends(how, tmp_path):
    args = (leave_processes_and_end, 2, str(tmp_path), how)
    begin = time.monotonic()
    if how in MESSAGES:
        with pytest.raises(RankError, match=MESSAGES[how]) as caught:
            run_ranks(*args, timeout_s=5.0 if how == "hangs" else 900.0)
        assert caught.value.ranks == [0]
    else:
        assert run_ranks(*args) == [0, 1]
    assert running(tmp_path) == []
    assert time.monotonic() - begin < 30, "a rank's end is not seen while what it has started runs"


def test_nothing_outlives_the_call_where_ranks_are_spawned(tmp_path, monkeypatch):
    """As on GPUs; the environment is the caller's of the moment."""
    monkeypatch.setitem(START_METHODS, "gloo", "spawn")
    monkeypatch.setenv("COLOUR", "blue")
    assert run_ranks(colour_and_leave_processes, 2, str(tmp_path)) == ["blue"] * 2
    assert running(tmp_path) == []


def colour_and_leave_processes(rank, num_ranks, folder):
    if rank == 0:
        leave_processes(Path(folder))
    return os.environ["COLOUR"]


def test_a_supervisor_that_dies_is_named():
    with pytest.raises(RuntimeError, match="supervisor of the ranks ended with -9") as caught:
        run_ranks(kill_the_supervisor, 2)
    assert isinstance(caught.value.__context__, RankError)


def kill_the_supervisor(rank, num_ranks):
    if rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def run_inside(rank, num_ranks):
    with pytest.raises(ValueError, match="num_ranks: 3 asked for inside a group of 2 ranks"):
        run_ranks(sum_over_ranks, 3, torch.zeros(1))
    return [result[:2] for result in run_ranks(sum_over_ranks, num_ranks, torch.zeros(1))]


@pytest.mark.parametrize("name", PRELOAD_IF_IMPORTED)
def test_the_server_imports_for_all_ranks_what_the_caller_has_imported(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert name in _modules_of_server()
    monkeypatch.delitem(sys.modules, name)
    assert name not in _modules_of_server()


ASKS_FOR_GPUS = """
import importlib
import torch
calls = []
torch._C._cuda_getDeviceCount = lambda: calls.append(1) or 0
from megatron_magi.testing.spawn import PRELOAD, PRELOAD_IF_IMPORTED
for name in (*PRELOAD, *PRELOAD_IF_IMPORTED):
    importlib.import_module(name)
assert not calls
torch.cuda.is_available()
assert calls
"""


def test_the_server_does_not_ask_for_gpus_as_ranks_could_not_be_forked_from_it_then():
    subprocess.run([sys.executable, "-c", ASKS_FOR_GPUS], check=True)


def test_inside_an_existing_group_the_function_runs_in_place():
    expected = [(0, torch.ones(1)), (1, torch.ones(1))]
    assert run_ranks(run_inside, 2) == [expected, expected]


def test_a_number_of_ranks_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="num_ranks: expected at least 1"):
        run_ranks(sum_over_ranks, 0)
