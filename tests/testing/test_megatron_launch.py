"""Launches of Megatron for tests: results, failures, time-outs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import LaunchError, launch


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
    text = "if rank == 1: raise ValueError('bad luck')\ntime.sleep(60)\n"
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)ranks \[1\] of 2 failed.*rank 1:.*ValueError: bad luck") as info:
        launch([], 2, script=_script(tmp_path, text), workdir=tmp_path)
    assert info.value.failed == [1]
    assert time.monotonic() - begin < 20


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
    for pid in map(int, line.split()[1:]):
        assert _is_gone(pid)


def _is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # dead; its parent, outside of this test, has not asked yet
        time.sleep(0.05)
    return False


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        launch([], 0)
