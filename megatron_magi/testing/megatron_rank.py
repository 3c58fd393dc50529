"""One rank of a Megatron launch: its environment, its output, its end."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_magi.testing import shared_gpus
from megatron_magi.testing.descendants import kill_with_parent

GRACE_S = 0.5
_STACKS_S = 0.5
"""How long ranks may write their stacks before they are killed."""


@dataclass(frozen=True)
class Request:
    """One launch.

    Attributes:
        script: path of a Python file (``.py``), or name of a module, to run as ``__main__``.
        args: its command line.
        num_ranks: number of processes.
        port: TCP port of the rendezvous, see `megatron_magi.testing.ports`.
        workdir: folder of the ranks' output; also their working directory.
        timeout_s: seconds for the whole launch.
        env: further environment variables.
        before: ``module:function`` called with `workdir` before the script, or "".
        search_path: ``sys.path`` of the ranks.
        grace_s: how long, after a rank has failed, others may still finish or fail by themselves.
    """

    script: str
    args: list[str]
    num_ranks: int
    port: int
    workdir: str
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict)
    before: str = ""
    search_path: list[str] = field(default_factory=list)
    grace_s: float = GRACE_S

    def to_line(self) -> str:
        """The request as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def from_line(line: str) -> Request:
        """The inverse of `to_line`."""
        return Request(**json.loads(line))


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: exit statuses in rank order; the ranks that failed by themselves, first to fail first."""

    statuses: list[int]
    failed: list[int]
    timed_out: bool


def output_path(workdir: str | Path, rank: int) -> Path:
    """Where a rank writes its standard output and error."""
    return Path(workdir) / f"rank{rank}.log"


def rank_environment(request: Request, rank: int) -> dict[str, str]:
    """What torchrun would set, one thread a rank, and what the request adds."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(request.port),
        "RANK": str(rank),
        "LOCAL_RANK": str(shared_gpus.local_rank(rank)),
        "WORLD_SIZE": str(request.num_ranks),
        "LOCAL_WORLD_SIZE": str(request.num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron insists on it with tensor parallelism
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **request.env,
    }


def run_rank(request: Request, rank: int) -> None:
    """Become rank ``rank``: run the script and end the process, with status 0 if it succeeded."""
    status = 1
    try:
        _redirect_output(output_path(request.workdir, rank))
        os.environ.update(rank_environment(request, rank))
        os.chdir(request.workdir)
        sys.path[:] = request.search_path or sys.path
        import torch

        shared_gpus.begin()
        torch.set_num_threads(1)
        if request.before:
            module, function = request.before.split(":")
            getattr(importlib.import_module(module), function)(Path(request.workdir))
        _run_script(request)
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:  # noqa: BLE001  (the process ends here, whatever it is)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No exit handler of a library may hang or hide the status.
        os._exit(status)


def _redirect_output(path: Path) -> None:
    os.setpgid(0, 0)
    kill_with_parent()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _run_script(request: Request) -> None:
    sys.argv = [request.script, *request.args]
    if request.script.endswith(".py"):
        runpy.run_path(request.script, run_name="__main__")
    else:
        runpy.run_module(request.script, run_name="__main__", alter_sys=True)


def watch(
    polls: Sequence[Callable[[], int | None]],
    pids: Sequence[int],
    timeout_s: float,
    grace_s: float,
    cancelled: Callable[[], bool],
) -> Outcome:
    """Wait for the ranks; after a failure or the time-out, end all of them. What they started is left to the caller.

    Args:
        polls: per rank, gives the exit status once there is one.
        pids: per rank, its process, leader of a process group.
        timeout_s: seconds after which those still running write their stacks and are killed.
        grace_s: seconds after the first failure after which those still running are killed.
        cancelled: asked now and then; True ends the wait as the time-out does.
    """
    deadline = time.monotonic() + timeout_s
    statuses: dict[int, int] = {}
    failed: list[int] = []
    killed = timed_out = False
    while len(statuses) < len(pids):
        for rank, poll in enumerate(polls):
            if rank not in statuses and (status := poll()) is not None:
                statuses[rank] = status
                if status != 0 and not killed:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + grace_s)
        running = [pid for rank, pid in enumerate(pids) if rank not in statuses]
        if running and not killed and (time.monotonic() > deadline or cancelled()):
            timed_out = not failed
            _end(running, show_stacks=timed_out)
            killed = True
        time.sleep(0.005)
    return Outcome([statuses[rank] for rank in range(len(pids))], failed, timed_out)


def _end(pids: Sequence[int], *, show_stacks: bool) -> None:
    if show_stacks:
        for pid in pids:
            _signal(os.kill, pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)
    for pid in pids:
        _signal(os.killpg, pid, signal.SIGKILL)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
        send(pid, number)


if __name__ == "__main__":
    run_rank(Request.from_line(sys.stdin.readline()), int(sys.argv[1]))
