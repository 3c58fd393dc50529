"""A process that starts the ranks of one launch after another and ends whatever they leave behind.

With ``fork`` it imports Megatron and forks ranks from itself, so that imports are paid once; beyond its parser it never
runs Megatron, so every rank begins as if freshly started. With ``spawn``, for GPUs, whose driver does not survive a
fork, every rank is a fresh process. It reads one request a line from its standard input and answers with one line on
its standard output, both JSON; `megatron_magi.testing.megatron_launch` is the other end. It ends when its input closes.

It is a subreaper: however a rank ends, its orphans become children of this process, which kills them before it answers.
A second subreaper above it, which does nothing else, does the same if this one is killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

from megatron_magi.testing.descendants import become_subreaper, kill_descendants, kill_with_parent
from megatron_magi.testing.megatron_rank import Outcome, Request, rank_environment, run_rank, watch

Ranks = tuple[list[int], list[Callable[[], int | None]]]
"""Per rank, its process, and a function that gives its exit status once there is one."""

PRELOAD = (
    "numpy.ma",
    "torch._dynamo.utils",  # torch's optimizers import it at their first step
    "torch.distributed.checkpoint",
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.checkpointing",
    "megatron.core.models.mimo",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.datasets.helpers_cpp",
    "megatron_magi.mcore.entry",
    "megatron_magi.mcore.forward_step",
    "megatron_magi.mcore.loss_log",
    "megatron_magi.mcore.model",
    "megatron_magi.mcore.user_step",
)

OPTIONAL_PRELOAD = ("megatron.training.models.gpt", "megatron.core.tokenizers.text.models")
"""Not in every version of megatron-core."""


def main() -> None:
    """Serve requests, in a child, until the input closes; then end what is left."""
    become_subreaper()
    child = os.fork()
    if child == 0:
        kill_with_parent()
        become_subreaper()
        _serve_all({"fork": _fork, "spawn": _spawn}[sys.argv[1]])
        return
    _, status = os.waitpid(child, 0)
    kill_descendants()
    os._exit(int(status != 0))


def _serve_all(start: Callable[[Request], Ranks]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not be taken for an answer
    if start is _fork:
        _import_megatron()
    answers.write("ready\n")
    while line := _read_line():
        outcome = _serve(Request.from_line(line), start)
        answers.write(json.dumps(asdict(outcome)) + "\n")


def _import_megatron() -> None:
    from megatron_magi import cpu_device

    if not cpu_device.install():
        raise RuntimeError("ranks are forked on machines without GPUs only: a driver does not survive a fork")
    for name in PRELOAD:
        importlib.import_module(name)
    for name in OPTIONAL_PRELOAD:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _keep_sources()
    gc.collect()
    gc.freeze()  # else the first collection of a rank copies every page of what was imported


def _keep_sources() -> None:
    """Has ranks find the sources that Megatron's parser and the seams' check read, cut out and parsed.

    Of each option Megatron looks up the text in its class's source, each time that it makes a parser.
    """
    from megatron.training.arguments import add_megatron_arguments

    from megatron_magi.mcore import seams

    inspect.getsource = functools.cache(inspect.getsource)
    ast.parse = functools.cache(ast.parse)
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with contextlib.suppress(ValueError):  # ranks say what is not as expected
        seams.check(on_cpu=True)


def _read_line() -> str:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return ""
        data += piece
    return data.decode()


def _serve(request: Request, start: Callable[[Request], Ranks]) -> Outcome:
    try:
        pids, polls = start(request)
        return watch(polls, pids, request.timeout_s, request.grace_s, _input_has_ended)
    finally:
        kill_descendants()


def _fork(request: Request) -> Ranks:
    pids = []
    for rank in range(request.num_ranks):
        pid = os.fork()
        if pid == 0:
            run_rank(request, rank)
        pids.append(pid)
    return pids, [_poll(pid) for pid in pids]


def _spawn(request: Request) -> Ranks:
    processes = []
    for rank in range(request.num_ranks):
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_magi.testing.megatron_rank", str(rank)],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, **rank_environment(request, rank)},
        )
        assert process.stdin is not None
        process.stdin.write(request.to_line())
        process.stdin.close()
        processes.append(process)
    return [p.pid for p in processes], [p.poll for p in processes]


def _poll(pid: int) -> Callable[[], int | None]:
    def poll() -> int | None:
        done, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None

    return poll


def _input_has_ended() -> bool:
    # The other end sends nothing before it has its answer, so all there can be is the end.
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable)


if __name__ == "__main__":
    main()
