"""A process that has imported Megatron and forks ranks from itself, so that imports are paid once.

It reads one request a line from its standard input and answers with one line on its standard
output, both JSON; `megatron_magi.testing.megatron_launch` is the other end. It never runs
Megatron itself, so every rank begins as if freshly started. It ends when its input closes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
from collections.abc import Callable
from dataclasses import asdict

from megatron_magi.testing.megatron_rank import Outcome, Request, run_rank, watch

PRELOAD = (
    "torch._dynamo.utils",  # torch's optimizers import it at their first step
    "torch.distributed.checkpoint",
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.checkpointing",
    "megatron.training.models.gpt",
    "megatron.core.models.mimo",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers_cpp",
    "megatron.core.tokenizers.text.models",
    "megatron_magi.mcore.forward_step",
    "megatron_magi.mcore.loss_log",
    "megatron_magi.mcore.model",
    "megatron_magi.mcore.user_step",
)


def main() -> None:
    """Import everything, say so, and serve requests until the input closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not be taken for an answer
    from megatron_magi import cpu_device

    if not cpu_device.install():
        raise RuntimeError("ranks are forked on machines without GPUs only: a driver does not survive a fork")
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection of a rank copies every page of what was imported
    answers.write("ready\n")
    while line := _read_line():
        outcome = _serve(Request.from_line(line))
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
    return watch([_poll(pid) for pid in pids], pids, request.timeout_s, _input_has_ended)


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
