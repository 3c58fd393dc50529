"""Launches of Megatron for tests: results, failures, time-outs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import LaunchError, launch
from tests.testing.leftovers import ENDINGS, is_running, running, wait_until_gone

ROOT = Path(__file__).parents[2]


def _script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text("import json, os, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return str(path)


def test_results_are_exact_and_of_every_rank(tmp_path: Path) -> None:
    text = """
print("rank", rank, sys.argv[1], os.environ["COLOUR"], os.environ["WORLD_SIZE"])
if rank == 1:
    with open(sys.argv[sys.argv.index("--magi-loss-log") + 1], "w") as file:
        for i in (1, 2):
            print(json.dumps({"iteration": i, "lm loss": 1 / (3 * i), "grad_norm": None}), file=file)
"""
    run = launch(["--x"], 2, script=_script(tmp_path, text), env={"COLOUR": "blue"}, workdir=tmp_path / "run")
    assert run.losses == {1: 1 / 3, 2: 1 / 6}
    assert run.grad_norms == {}
    assert run.outputs == ["rank 0 --x blue 2\n", "rank 1 --x blue 2\n"]
    assert run.stdout == run.outputs[1]
    assert run.workdir == tmp_path / "run"


def test_launches_are_isolated(tmp_path: Path) -> None:
    text = "assert 'mark' not in vars(json) and 'MARK' not in os.environ\njson.mark = 1\nos.environ['MARK'] = '1'\n"
    for _ in range(2):
        launch([], 1, script=_script(tmp_path, text), workdir=tmp_path)


def test_hook_runs_before_the_script(tmp_path: Path) -> None:
    (tmp_path / "launch_hook.py").write_text("def hook(workdir):\n    (workdir / 'hooked').touch()\n")
    text = "assert os.path.exists('hooked')\n"
    script = _script(tmp_path, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        launch([], 2, script=script, before="launch_hook:hook", workdir=tmp_path / "run")


def test_a_failing_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    text = "if rank == 1: raise ValueError('bad luck')\ntime.sleep(900)\n"
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)ranks \[1\] of 2 failed.*rank 1:.*ValueError: bad luck") as info:
        launch([], 2, script=_script(tmp_path, text), workdir=tmp_path)
    assert info.value.failed == [1]
    assert time.monotonic() - begin < 300


@pytest.mark.parametrize("status", [0, 3])
def test_exit_status_decides(status: int, tmp_path: Path) -> None:
    script = _script(tmp_path, f"sys.exit({status})\n")
    if status == 0:
        launch([], 1, script=script, workdir=tmp_path)
        return
    with pytest.raises(LaunchError, match=r"statuses \[3\]"):
        launch([], 1, script=script, workdir=tmp_path)


def test_a_hanging_launch_ends_with_its_stacks_and_leaves_no_process(tmp_path: Path) -> None:
    text = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
print("pids", os.getpid(), child.pid, flush=True)
def lost(): time.sleep(60)
lost()
"""
    with pytest.raises(LaunchError, match=r"(?s)ranks \[0\] of 1 still running after 1.0 s.*in lost") as info:
        launch([], 1, script=_script(tmp_path, text), timeout_s=1.0, workdir=tmp_path)
    assert info.value.failed == []
    line = next(line for line in info.value.outputs[0].splitlines() if line.startswith("pids"))
    assert not any(is_running(int(pid)) for pid in line.split()[1:])


def _ends(how: str, folder: Path, num_ranks: int = 2) -> LaunchError | None:
    """Launches ranks, of which the first leaves processes and ends; the launch's failure, if it is one."""
    text = f"""
from pathlib import Path
from tests.testing.leftovers import end, leave_processes
if rank == 0:
    leave_processes(Path({str(folder)!r}))
    end({how!r})
"""
    timeout_s = 5.0 if how == "hangs" else 900.0
    try:
        launch([], num_ranks, script=_script(folder, text), timeout_s=timeout_s, workdir=folder / "run")
    except LaunchError as error:
        return error
    return None


STATUSES = {"exits": "statuses [3, ", "fails at once": "statuses [5, ", "is killed": "statuses [-9, "}
MESSAGES = STATUSES | {"raises": "ValueError: bad luck", "hangs": "ranks [0] of 2 still running after 5.0 s"}


@pytest.mark.parametrize("how", ENDINGS)
def test_nothing_that_a_rank_started_outlives_the_launch_however_the_rank_ends(how: str, tmp_path: Path) -> None:
    error = _ends(how, tmp_path)
    assert running(tmp_path) == []
    assert (error is not None) == (how in MESSAGES) and MESSAGES.get(how, "") in str(error)


def test_nothing_outlives_the_launch_where_every_rank_is_a_fresh_process(tmp_path, monkeypatch) -> None:
    """As on a machine with GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    error = _ends("is killed", tmp_path, num_ranks=1)
    assert running(tmp_path) == []
    assert "statuses [-9]" in str(error)


@pytest.mark.parametrize("victim", ["caller", "zygote"])
def test_nothing_outlives_a_caller_or_a_zygote_that_is_killed(victim: str, tmp_path: Path) -> None:
    text = f"""
from pathlib import Path
from tests.testing.leftovers import leave_processes
leave_processes(Path({str(tmp_path)!r}))
Path({str(tmp_path)!r}, "ready").write_text(f"{{os.getpid()}} {{os.getppid()}}")
time.sleep(1000)
"""
    program = f"""if True:
        import torch
        from megatron_magi.testing.megatron_launch import launch
        torch.cuda.is_available = lambda: True  # ranks are spawned: Megatron need not be imported
        launch([], 1, script={_script(tmp_path, text)!r}, workdir={str(tmp_path / "run")!r})
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # ranks are started elsewhere
    caller = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "ready").exists() or not (tmp_path / "ready").read_text():
            assert caller.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        rank, zygote = map(int, (tmp_path / "ready").read_text().split())
        os.kill(caller.pid if victim == "caller" else zygote, signal.SIGKILL)
        _, said = caller.communicate(timeout=900)
    finally:
        caller.kill()
    assert victim == "caller" or "the process that ranks are started from has died" in said
    assert wait_until_gone([rank, zygote])
    deadline = time.monotonic() + 300
    while running(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(tmp_path) == []


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        launch([], 0)
