"""Jobs that are interrupted in every way, against one that is not: `make slurm-demo`.

Starts a Slurm cluster of two nodes on this machine (cluster.sh), trains the tiny configuration on it over both nodes,
on gloo, and compares the losses of two jobs. The first runs undisturbed. The second is told that its time limit comes,
requeued by `scontrol requeue`, preempted by a job of another partition, and loses a node in the middle of its work.
The demo fails if a loss differs, if an interruption that leaves time to save costs an iteration, if the node that dies
costs more than the iterations since the last whole checkpoint, or if the job does not come back. A third job, with a
mistake in its arguments, must fail and stay away.

Needs slurm-wlm (Debian, Ubuntu: `apt-get install slurm-wlm`). As root the nodes have network namespaces of their own
and a node that dies falls silent; without root its processes are killed, which its peers notice at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CONFIG = "configs/tiny_gpt_256_2cpu.yaml"
NUM_ITERATIONS = 48
SAVE_INTERVAL = 8
TOLERANCE = 1e-5
"""Largest relative difference of a loss. The same sums in the same order: rounding alone."""


class DemoFailed(RuntimeError):
    """Something did not happen, or not as it should."""


@dataclass(frozen=True)
class Job:
    """A job of the demo: its number, its folder and the file that it writes to."""

    number: int
    folder: Path
    output: Path

    def state(self) -> str:
        """Slurm's word for what it does, such as RUNNING."""
        return slurm("squeue", "--noheader", "--states", "all", "--jobs", str(self.number), "--format", "%T")

    def losses(self) -> list[dict]:
        """One record an iteration that was trained, in order; iterations after a loss of work are there twice."""
        path = self.folder / "losses.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def iteration(self) -> int:
        """The last that was trained."""
        records = self.losses()
        return records[-1]["iteration"] if records else 0

    def starts(self) -> list[int]:
        """For each start the iteration of the checkpoint that it found, by what job.sh says first; 0 without one."""
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        lines = re.findall(r"^job \d+ start \d+: .* from iteration (\d+)$", text, flags=re.MULTILINE)
        return [int(iteration) for iteration in lines]


def slurm(*command: str) -> str:
    """Output of a client of Slurm."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise DemoFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def wait_until(what: str, condition: Callable[[], bool], job: Job, timeout_s: float) -> None:
    """Raises DemoFailed if the time passes or the job ends before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        state = job.state()
        if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED") and not condition():
            raise DemoFailed(f"{what}: job {job.number} is {state}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what}: not within {timeout_s:.0f} s; job {job.number} is {state}")
        time.sleep(0.1)


def submit(name: str, out: Path, *arguments: str) -> Job:
    """Submits the script of this project as a user would."""
    folder, output = out / name, out / f"{name}.out"
    options = ["--parsable", f"--job-name={name}", "--nodes=2", "--gpus-per-node=1", "--time=30", f"--output={output}"]
    script = str(HERE.parent / "multi_node.sbatch")
    training = ["--config", CONFIG, "--train-iters", str(NUM_ITERATIONS), "--save-interval", str(SAVE_INTERVAL)]
    # A process that reads data, as in real runs: it must not die before its rank has saved.
    training += ["--hierarchical-context-parallel-sizes", "1", "2", "--num-workers", "1"]
    # A command that runs another stands for one that runs it in a container.
    environment = {"RUN_DIR": str(folder), "CP": "2", "PYTHON": sys.executable, "CONTAINER": "env LAB=1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = ["sbatch", *options, script, *training, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DemoFailed(f"sbatch: {done.stderr.strip()}")
    return Job(int(done.stdout), folder, output)


def time_limit(job: Job, cluster: Callable[..., None]) -> None:
    """The signal that Slurm sends before the end of the time limit."""
    slurm("scancel", "--batch", "--signal=USR1", str(job.number))


def requeue(job: Job, cluster: Callable[..., None]) -> None:
    """What an administrator does."""
    slurm("scontrol", "requeue", str(job.number))


def preempt(job: Job, cluster: Callable[..., None]) -> None:
    """A job of the partition that goes first takes both nodes."""
    first = ["--partition=high", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null", "--wrap=sleep 1"]
    slurm("sbatch", *first)


def cut_power(job: Job, cluster: Callable[..., None]) -> None:
    """The node that does not run the batch script dies, and is repaired when Slurm has given it up."""
    cluster("cut", "lab1")
    wait_until("noticing that a node is gone", lambda: job.state() != "RUNNING", job, 180)
    say("the job is no longer running; the node starts again")
    cluster("boot", "lab1")


# The last is the only one that leaves no time to save.
INTERRUPTIONS = {
    "time limit": time_limit,
    "scontrol requeue": requeue,
    "preemption": preempt,
    "a node loses power": cut_power,
}


def interrupt(job: Job, cluster: Callable[..., None]) -> None:
    """Interrupts the job in each way, some iterations after it has come back from the one before."""
    for number, (name, act) in enumerate(INTERRUPTIONS.items()):
        # Between two saves, so that what was not saved would be missed.
        at = SAVE_INTERVAL // 2 + (number + 1) * SAVE_INTERVAL
        wait_until(f"iteration {at}", lambda at=at: job.iteration() >= at, job, 600)
        starts = len(job.starts())
        say(f"iteration {job.iteration()}: {name}")
        act(job, cluster)
        wait_until("starting again", lambda starts=starts: len(job.starts()) > starts, job, 600)
        num_records = len(job.losses())
        wait_until("training on", lambda number=num_records: len(job.losses()) > number, job, 600)
        say(f"trains on from the checkpoint of iteration {job.starts()[-1]}")


def check_order(trained: list[int], starts: list[int]) -> None:
    """Raises DemoFailed unless only the node that died costs iterations, and those since the last whole checkpoint.

    Args:
        trained: iterations in the order in which they were trained.
        starts: as `Job.starts` gives them; the last is that after the node died.
    """
    steps = [(last, resumed) for last, resumed in pairwise(trained) if resumed != last + 1]
    for last, resumed in steps[:-1]:
        raise DemoFailed(f"iteration {resumed} came after {last}: more than the node that died cost iterations")
    for last, resumed in steps:
        if resumed != starts[-1] + 1:
            found = f"the last start found the checkpoint of {starts[-1]}"
            raise DemoFailed(f"iteration {resumed} came after {last}; {found}")
        # The checkpoint of an iteration is whole before the next one begins; that of the last may be under way.
        least = (last - 1) // SAVE_INTERVAL * SAVE_INTERVAL
        if not least < resumed <= last:
            raise DemoFailed(f"iteration {resumed} came after {last}, but the checkpoint of {least} was whole")


def check_mistake(out: Path) -> None:
    """A job that fails before it gets anywhere must not come back for ever."""
    job = submit("mistake", out, "--lr", "fast")
    wait_until("failing", lambda: job.state() == "FAILED", job, 600)
    starts = len(job.starts())
    say(f"job {job.number} has a mistake in its arguments: it failed, after {starts} start")
    if starts != 1:
        raise DemoFailed(f"a job with a mistake started {starts} times")


def compare(whole: Job, broken: Job) -> None:
    """Raises DemoFailed unless both have the same losses."""
    expected = {record["iteration"]: record["lm loss"] for record in whole.losses()}
    if list(expected) != list(range(1, NUM_ITERATIONS + 1)):
        raise DemoFailed(f"the undisturbed job trained iterations {list(expected)}")
    records = broken.losses()
    largest = max(abs(r["lm loss"] / expected[r["iteration"]] - 1) for r in records)
    trained, starts = [record["iteration"] for record in records], broken.starts()
    repeated = len(trained) - len(set(trained))
    print(f"\n{'iteration':>9}  {'undisturbed':>12}  {'interrupted':>12}")
    found = {record["iteration"]: record["lm loss"] for record in records}
    for iteration in (1, *range(8, NUM_ITERATIONS + 1, 8)):
        print(f"{iteration:>9}  {expected[iteration]:>12.6f}  {found.get(iteration, float('nan')):>12.6f}")
    print(f"starts {len(starts)}, iterations trained twice {repeated}, largest relative difference {largest:.1e}")
    if set(trained) != set(expected):
        raise DemoFailed(f"iterations that were never trained: {sorted(set(expected) - set(trained))}")
    if not largest <= TOLERANCE:
        raise DemoFailed(f"the losses differ by {largest:.1e}, allowed is {TOLERANCE:.0e}")
    if len(starts) != 1 + len(INTERRUPTIONS):
        raise DemoFailed(f"the job started {len(starts)} times, expected {1 + len(INTERRUPTIONS)}")
    check_order(trained, starts)


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Callable[..., None]]:
    """The cluster, gone afterwards; gives the function for `cluster.sh COMMAND ... NODE`."""

    def call(command: str, *node: str) -> None:
        done = subprocess.run([str(HERE / "cluster.sh"), command, str(folder), *node], timeout=120, check=False)
        if done.returncode:
            raise DemoFailed(f"cluster.sh {command}: status {done.returncode}")

    try:
        call("up")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield call
    finally:
        call("down")


def main() -> int:
    """Runs the demo; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("slurm_demo_out"), help="folder of what is written")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if shutil.which("sbatch") is None:
        print("slurm-demo: needs Slurm: apt-get install slurm-wlm (it runs with and without root)", file=sys.stderr)
        return 2
    begin = time.monotonic()
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="magilab") as folder:
        try:
            with running_cluster(Path(folder)) as cluster:
                whole = submit("undisturbed", out)
                say(f"job {whole.number} trains undisturbed, over two nodes")
                wait_until("training", lambda: whole.state() == "COMPLETED", whole, 600)
                broken = submit("interrupted", out)
                say(f"job {broken.number} trains the same and is interrupted")
                interrupt(broken, cluster)
                wait_until("training to the end", lambda: broken.state() == "COMPLETED", broken, 600)
                check_mistake(out)
                compare(whole, broken)
        except DemoFailed as failure:
            print(f"slurm-demo: {failure}; see {out}", file=sys.stderr)
            return 1
        finally:
            shutil.copytree(Path(folder) / "log", out / "slurm_logs", dirs_exist_ok=True)
    say(f"equal; {time.monotonic() - begin:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
