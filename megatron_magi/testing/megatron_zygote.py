"""A process that has imported Megatron and forks ranks from itself, so that imports are paid once.

It reads one request a line from its standard input and answers with one line on its standard
output, both JSON; `megatron_magi.testing.megatron_launch` is the other end. It never runs
Megatron itself, so every rank begins as if freshly started. It ends when its input closes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GRACE_S = 0.5
"""How long, after a rank has failed, others may still finish or fail by themselves."""

PRELOAD = (
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.models.gpt",
    "megatron.core.models.mimo",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers_cpp",
    "megatron_magi.attention",
    "megatron_magi.plan",
)

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Request:
    """One launch.

    Attributes:
        script: path of a Python file, or name of a module, to run as ``__main__``.
        args: its command line.
        num_ranks: processes.
        port: free TCP port of the rendezvous.
        workdir: folder of the ranks' output and of the loss log; also their working directory.
        timeout_s: seconds for the whole launch.
        env: further environment variables.
        before: ``module:function`` called with the working directory before the script, or "".
        search_path: ``sys.path`` of the ranks.
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

    def to_line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: exit statuses in rank order, and the ranks that failed, first to fail first."""

    statuses: list[int]
    failed: list[int]
    timed_out: bool


def main() -> None:
    """Import everything, say so, and serve requests until the input closes."""
    from megatron_magi.mcore import cpu_device, wheel_repairs

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not be taken for an answer
    if not cpu_device.install():
        raise RuntimeError("ranks are forked on machines without GPUs only")
    wheel_repairs.install()
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank's garbage collections would copy every page of what was imported
    answers.write("ready\n")
    while line := _read_line():
        outcome = _serve(Request(**json.loads(line)))
        answers.write(json.dumps(asdict(outcome)) + "\n")


def _read_line() -> str:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return ""
        data += piece
    return data.decode()


def _serve(request: Request) -> Outcome:
    pids = []
    for rank in range(request.num_ranks):
        pid = os.fork()
        if pid == 0:
            run_rank(request, rank)
        pids.append(pid)
    return watch(pids, request.timeout_s, _requester_is_gone)


def _requester_is_gone() -> bool:
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable)  # no second request is sent before the answer: this is the end of the input


def watch(pids: list[int], timeout_s: float, cancelled: Any) -> Outcome:
    """Wait for child processes, one a rank; end all, with what they started, after a failure or time-out.

    Args:
        pids: the processes in rank order, each the leader of a process group.
        timeout_s: seconds after which those still running are asked for their stacks and killed.
        cancelled: called now and then; True ends the wait as a time-out does.
    """
    deadline = time.monotonic() + timeout_s
    statuses: dict[int, int] = {}
    failed: list[int] = []
    timed_out = False
    while len(statuses) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in statuses and os.waitpid(pid, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    return Outcome([statuses[r] for r in range(len(pids))], failed, timed_out)
