"""What job.sh decides when the ranks have ended, with fakes for Slurm. `make slurm-demo` has the real one."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import megatron_magi

ROOT = Path(megatron_magi.__file__).parents[1]
COMMANDS = {
    # The ranks, or the question whether all nodes answer.
    "srun": 'case "$*" in *" true") exit "$NODES_ANSWER" ;; *) echo "$@" >"$WORK/srun"; eval "$RANKS" ;; esac',
    "scontrol": 'case "$1 $2" in "show hostnames") printf "n1\\nn2\\n" ;; "requeue "*) echo "$@" >>"$WORK/requeued" ;; '
    '*) echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1" ;; esac',
    "squeue": '[ -n "$STATE" ] && echo "$STATE"',
    "scancel": 'echo "$@" >>"$WORK/scancel"; touch "$WORK/told"',
}


@dataclass
class Lab:
    """A folder with the commands, and the environment of a job on two nodes."""

    work: Path
    python: str = sys.executable
    container: str = ""

    def start(self, ranks: str, *arguments: str, nodes_answer: int = 0, state: str = "RUNNING") -> subprocess.Popen:
        """Runs job.sh with ``ranks``, a line of shell, as what the ranks do."""
        path = f"{self.work / 'bin'}:{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "run", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        job |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_GPUS_ON_NODE": "8", "RUN_DIR": str(self.work / "run")}
        stubs = {"WORK": str(self.work), "RANKS": ranks, "NODES_ANSWER": str(nodes_answer), "STATE": state}
        return subprocess.Popen(
            ["bash", "-c", 'source "$0" "$@"', str(ROOT / "pretrain_scripts/slurm/job.sh"), *arguments],
            env={
                **os.environ,
                **job,
                **stubs,
                "PATH": path,
                "CP": "16",
                "PYTHON": self.python,
                "CONTAINER": self.container,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, ranks: str, *arguments: str, nodes_answer: int = 0, state: str = "RUNNING") -> tuple[int, str]:
        """Status and output of job.sh."""
        process = self.start(ranks, *arguments, nodes_answer=nodes_answer, state=state)
        output, _ = process.communicate(timeout=900)
        return process.returncode, output

    @property
    def is_requeued(self) -> bool:
        return (self.work / "requeued").exists()


SAVE = 'echo 20 >"$WORK/run/checkpoints/latest_checkpointed_iteration.txt"; '


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    (tmp_path / "bin").mkdir()
    for name, body in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    return Lab(tmp_path)


def test_complete_training_ends_the_job(lab: Lab) -> None:
    status, output = lab.run(SAVE + 'touch "$COMPLETE_FILE"')
    assert (status, lab.is_requeued) == (0, False), output
    assert "complete at iteration 20" in output


def test_ranks_get_the_arguments_and_those_of_the_job(lab: Lab) -> None:
    lab.run('echo "$NPROC_PER_NODE $RENDEZVOUS" >"$WORK/said"; touch "$COMPLETE_FILE"', "--config", "a b.yaml")
    command = (lab.work / "srun").read_text()
    checkpoints = lab.work / "run" / "checkpoints"
    assert f"--config a b.yaml --context-parallel-size 16 --save {checkpoints} --load {checkpoints}" in command
    assert (lab.work / "said").read_text() == "8 10.0.0.1:10007\n"


def test_training_that_stopped_early_is_requeued(lab: Lab) -> None:
    status, output = lab.run(SAVE)
    assert (status, lab.is_requeued) == (0, True), output


def test_failure_without_progress_ends_the_job_with_its_status(lab: Lab) -> None:
    status, output = lab.run("exit 3")
    assert (status, lab.is_requeued) == (3, False), output


def test_failure_after_a_new_checkpoint_is_requeued_once(lab: Lab) -> None:
    assert lab.run(SAVE + "exit 3")[0] == 0
    assert lab.is_requeued
    (lab.work / "requeued").unlink()
    # It comes to the same checkpoint, which is no progress.
    assert lab.run(SAVE + "exit 3")[0] == 3
    assert not lab.is_requeued


@pytest.mark.parametrize("tracker", ["", "release", "2"])
def test_training_that_stopped_without_an_error_and_without_progress_fails(lab: Lab, tracker: str) -> None:
    """Megatron ends with 0 where the file that names its last checkpoint is empty: it would come back for ever."""
    checkpoints = lab.work / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(tracker)
    status, output = lab.run("exit 0")
    assert (status, lab.is_requeued) == (1, False), output
    assert "stopped with status 0 and no new checkpoint" in output


def test_steps_have_one_task_a_node_and_all_variables_whatever_the_job_was_given(lab: Lab) -> None:
    """srun follows the variables that sbatch sets for `--ntasks-per-node=8` and `--export=NAME`."""
    lab.run('echo "$SLURM_EXPORT_ENV" >"$WORK/said"; touch "$COMPLETE_FILE"')
    assert (lab.work / "srun").read_text().startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 ")
    assert (lab.work / "said").read_text() == "ALL\n"


def test_the_task_of_a_node_has_the_processors_of_all_its_ranks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job with one task a GPU."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    lab.run('touch "$COMPLETE_FILE"')
    assert " --cpus-per-task=96 " in (lab.work / "srun").read_text()


def test_dead_node_is_requeued_without_progress(lab: Lab) -> None:
    status, output = lab.run("exit 3", nodes_answer=1)
    assert (status, lab.is_requeued) == (0, True), output
    assert "a node does not answer" in output


def test_job_that_slurm_ends_is_not_requeued_against_it(lab: Lab) -> None:
    status, output = lab.run(SAVE, state="COMPLETING")
    assert (status, lab.is_requeued) == (0, False), output


def test_time_limit_tells_the_steps_and_waits_until_they_have_saved(lab: Lab) -> None:
    # Ranks save a while after they were told, and fail if they are never told.
    ranks = (
        'touch "$WORK/on"; for _ in $(seq 200); do [ -e "$WORK/told" ] && break; sleep 0.1; done; sleep 0.5; ' + SAVE
    )
    process = lab.start(ranks)
    try:
        deadline = time.monotonic() + 300
        while not (lab.work / "on").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert (lab.work / "scancel").read_text() == "--signal=URG 7\n"
    assert "time limit, last checkpoint at iteration 20; requeued" in output
    assert lab.is_requeued


def test_a_job_of_an_array_requeues_itself_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert lab.run(SAVE + "exit 3")[0] == 0
    assert (lab.work / "requeued").read_text() == "requeue 7_3\n"


@pytest.mark.parametrize("argument", ["--load", "--load=x", "--save", "--save=x"])
def test_folders_of_checkpoints_are_the_jobs_own(lab: Lab, argument: str) -> None:
    status, output = lab.run("exit 0", argument)
    assert status == 2
    assert output.startswith(argument.partition("=")[0] + ": ")


@pytest.mark.parametrize(
    "text",
    [
        "bf16: true\nload: x\n",
        "bf16: true\nsave: x\n",
        'bf16: true\n"load" : x\n',
        "  bf16: true\n  load: x\n",
        "{bf16: true, load: x}\n",
        '{\n"load":x}\n',
        "\ufeffload: x\n",
    ],
)
def test_checkpoints_of_the_configuration_file_are_refused_too(lab: Lab, text: str) -> None:
    """The job's own would win over them, and training would begin anew without a word."""
    file, name = lab.work / "a b.yaml", "save" if "save" in text else "load"
    file.write_text(text)
    assert name in yaml.safe_load(text)
    for arguments in (["--config", str(file)], [f"--config={file}"]):
        status, output = lab.run("exit 0", *arguments)
        assert status == 2 and output.startswith(f"{file}: {name}: "), output
        assert not (lab.work / "srun").exists()


def test_other_entries_of_the_configuration_file_are_not_refused(lab: Lab) -> None:
    file = lab.work / "a.yaml"
    file.write_text("save-interval: 5\n# load: x\nload-x: 1  # {load: x}\ndata-path: save\n")
    assert "complete at" in lab.run('touch "$COMPLETE_FILE"', "--config", str(file))[1]


def test_an_interpreter_that_is_not_there_is_said_before_nodes_start(lab: Lab) -> None:
    lab.python = str(lab.work / "python")
    status, output = lab.run("exit 0")
    assert (status, (lab.work / "srun").exists()) == (2, False)
    assert output.startswith(f"PYTHON: there is no interpreter {lab.python}; ")


def test_a_container_is_named_before_the_command_and_brings_the_interpreter(lab: Lab) -> None:
    lab.python, lab.container = "", "--container-image=a.sqsh\n  --container-mounts=/a:/a"
    status, output = lab.run('echo "$PYTHON" >"$WORK/said"; touch "$COMPLETE_FILE"', "--config", "a.yaml")
    assert status == 0, output
    assert (
        " --container-image=a.sqsh --container-mounts=/a:/a bash pretrain_scripts/slurm/node.sh --config a.yaml "
        in (lab.work / "srun").read_text()
    )
    assert (lab.work / "said").read_text() == "python\n"


def test_a_job_whose_state_slurm_does_not_tell_is_requeued(lab: Lab) -> None:
    status, output = lab.run(SAVE + "exit 0", state="")
    assert (status, lab.is_requeued) == (0, True), output


@contextlib.contextmanager
def start_node(folder: Path, rank: str, *files: str) -> Iterator[subprocess.Popen]:
    """node.sh in a session of its own once the rank has made the first file.

    A shell with a child stands for torchrun and its rank. There is no pkill.

    Args:
        rank: Python code that has the paths of ``files`` as arguments.
    """
    launcher, pkill = folder / "odd ) name (x", folder / "pkill"
    paths = [folder / name for name in files]
    command = shlex.join([sys.executable, "-c", rank, *map(str, paths)])
    launcher.write_text(f'#!/usr/bin/env bash\n{command} & wait "$!"\n')
    pkill.write_text("#!/bin/sh\nexit 127\n")
    for file in (launcher, pkill):
        file.chmod(0o755)
    node = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "NPROC_PER_NODE": "1", "CUDNN_HOME": "/"}
    node |= {"COMPLETE_FILE": "c", "PYTHON": str(launcher), "RENDEZVOUS": "localhost:1", "RENDEZVOUS_ID": "1"}
    environment = {**os.environ, **node, "PATH": f"{folder}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["bash", "pretrain_scripts/slurm/node.sh"], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 300
        while not paths[0].exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_node_tells_its_ranks_to_save_without_tools_of_procps(tmp_path: Path) -> None:
    """TERM and URG become URG for the children of torchrun."""
    rank = "import signal, sys; signal.signal(signal.SIGURG, lambda *_: sys.exit(0)); open(sys.argv[1], 'w'); "
    with start_node(tmp_path, rank + "signal.pause()", "on") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=900) == 0


def test_a_node_waits_for_ranks_that_save_while_slurm_sends_more_signals(tmp_path: Path) -> None:
    """TERM comes to every process of a step, also when URG has come before or TERM itself."""
    save = (
        "lambda *_: (signal.signal(signal.SIGURG, signal.SIG_IGN), time.sleep(3), open(sys.argv[2], 'w'), sys.exit())"
    )
    rank = f"import signal, sys, time; signal.signal(signal.SIGURG, {save}); open(sys.argv[1], 'w'); time.sleep(60)"
    with start_node(tmp_path, rank, "on", "saved") as process:
        process.send_signal(signal.SIGURG)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=900) == 0
        assert (tmp_path / "saved").exists()
