"""Runs one function on several ranks, one process each, and brings results or the failure back.

Processes are forked from a server that has imported torch already, so a fresh, isolated set of
ranks costs tens of milliseconds and nothing needs to be reused from one call to the next. Ranks on
GPUs are spawned instead: a server in which any import touched CUDA could not be forked from.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = (
    "numpy.random",
    "torch",
    "torch.distributed",
    # torch imports these at the first backward pass, sympy with them.
    "torch._functorch.autograd_function",
    "torch.fx.experimental.symbolic_shapes",
    "megatron_magi.testing.spawn",
)
"""Modules that the server imports once, for all ranks ever started."""

GRACE_S = 0.3
"""How long to listen, after a rank has failed, for others that failed by themselves."""


class RankError(RuntimeError):
    """A rank failed, died, or did not finish in time; the message holds the tracebacks.

    Attributes:
        ranks: the ranks that failed or were still running, the first to fail first.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """Runs ``fn(rank, num_ranks, *args)`` in ``num_ranks`` processes with a default process group.

    Under an already initialised default group (torchrun) the function runs in place on every rank.

    Args:
        fn: a function at module level.
        num_ranks: number of processes.
        *args: picklable arguments, the same for all ranks (tensors are copied).
        timeout_s: seconds for the whole call, also the time-out of collectives.
        backend: ``gloo``, or ``nccl`` with one GPU a rank.

    Returns:
        The picklable results in rank order.

    Raises:
        RankError: a rank raised, died, or was running at the time-out. No process outlives the call.
        ValueError: ``num_ranks`` is not positive, or not the size of the group that exists already.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    if dist.is_initialized():
        return _run_in_place(fn, num_ranks, args)
    folder = Path(tempfile.mkdtemp(prefix="magi_ranks_"))
    ranks: list[_Rank] = []
    try:
        _start(ranks, fn, num_ranks, args, _Setup(num_ranks, backend, timeout_s, str(folder)))
        return _collect(ranks, timeout_s, folder)
    finally:
        for r in ranks:
            r.process.kill()
        for r in ranks:
            r.process.join()
            r.conn.close()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Setup:
    """What a process needs to join its group."""

    num_ranks: int
    backend: str
    timeout_s: float
    folder: str


@dataclass(frozen=True)
class _Rank:
    """The parent's view of a process."""

    rank: int
    process: Any
    conn: connection.Connection


def _run_in_place(fn: Callable[..., Any], num_ranks: int, args: tuple) -> list[Any]:
    if dist.get_world_size() != num_ranks:
        raise ValueError(f"num_ranks: {num_ranks} asked for inside a group of {dist.get_world_size()} ranks")
    results: list[Any] = [None] * num_ranks
    dist.all_gather_object(results, fn(dist.get_rank(), num_ranks, *args))
    return results


def _start(ranks: list[_Rank], fn: Callable[..., Any], num_ranks: int, args: tuple, setup: _Setup) -> None:
    """Appends the started processes to ``ranks``, so that a failure half way leaves none behind."""
    # Plain pickle: multiprocessing's own pickler would pass tensors as shared memory that dies with its owner.
    payload = pickle.dumps((fn, args))
    source = (fn.__module__, getattr(sys.modules.get(fn.__module__), "__file__", None), list(sys.path))
    if setup.backend == "nccl":
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        # Test modules import pytest; ranks should not do so one by one.
        context.set_forkserver_preload([*PRELOAD, *(("pytest",) if "pytest" in sys.modules else ())])
    with _child_environment():
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, setup, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours))
    for r in ranks:
        r.conn.send_bytes(pickle.dumps(source))
        r.conn.send_bytes(payload)


@contextmanager
def _child_environment():
    """One thread a rank from the first import on; the parent's environment is put back."""
    wanted = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(ranks: list[_Rank], timeout_s: float, folder: Path) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {r.conn: r for r in ranks}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for conn in ready:
            r = waiting.pop(conn)
            _receive(r, results, failures)
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        text = "\n".join(f"rank {rank} of {len(ranks)}: {message}" for rank, message in failures.items())
        raise RankError(text, list(failures))
    if waiting:
        late = sorted(r.rank for r in waiting.values())
        stacks = _stacks([r for r in ranks if r.rank in late], folder)
        raise RankError(f"ranks {late} of {len(ranks)} still running after {timeout_s} s\n{stacks}", late)
    for r in ranks:
        r.conn.send_bytes(b"exit")
    for r in ranks:
        r.process.join(timeout=5.0)
    return [results[rank] for rank in range(len(ranks))]


def _receive(r: _Rank, results: dict[int, Any], failures: dict[int, str]) -> None:
    try:
        done, value = pickle.loads(r.conn.recv_bytes())
    except (EOFError, ConnectionError):
        r.process.join(timeout=5.0)
        failures[r.rank] = f"died with exit code {r.process.exitcode}"
        return
    if done:
        results[r.rank] = value
    else:
        failures[r.rank] = value


def _stacks(ranks: list[_Rank], folder: Path) -> str:
    """Where the ranks hang: each has been told to write its stack on a signal."""
    for r in ranks:
        if (folder / f"stack{r.rank}").exists() and r.process.is_alive():
            os.kill(r.process.pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    files = [(r.rank, folder / f"stack{r.rank}") for r in ranks]
    return "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in files if path.exists())


def _rank_main(rank: int, setup: _Setup, conn: connection.Connection) -> None:
    """A rank's process: never returns, so that no exit handler of a library can hang it."""
    threading.Thread(target=_exit_with_parent, args=(setup.folder,), daemon=True).start()
    stack = open(Path(setup.folder) / f"stack{rank}", "w")  # noqa: SIM115  (must stay open for the signal)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        message = pickle.dumps((True, _call(rank, setup, conn)))
    except BaseException:  # noqa: BLE001  (whatever it is, the parent raises it)
        message = pickle.dumps((False, traceback.format_exc()))
    try:
        conn.send_bytes(message)
        # The connections stay open until every rank is done: a peer must fail for its own reasons only.
        conn.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _call(rank: int, setup: _Setup, conn: connection.Connection) -> Any:
    module, path, search_path = pickle.loads(conn.recv_bytes())
    payload = conn.recv_bytes()
    sys.path[:] = search_path
    _import_from(module, path)
    fn, args = pickle.loads(payload)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setup.num_ranks))
    device_id = None
    if setup.backend == "nccl":
        device_id = torch.device("cuda", rank)
        torch.cuda.set_device(device_id)
    store = dist.FileStore(os.path.join(setup.folder, "store"), setup.num_ranks)
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=rank,
        world_size=setup.num_ranks,
        timeout=timedelta(seconds=setup.timeout_s),
        device_id=device_id,
    )
    result = fn(rank, setup.num_ranks, *args)
    if setup.backend == "nccl":
        torch.cuda.synchronize()
    return result


def _import_from(module: str, path: str | None) -> None:
    """Makes ``module`` importable by name even where only its file is known (pytest's importlib mode)."""
    if module in sys.modules or path is None:
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)


def _exit_with_parent(folder: str) -> None:
    """A killed parent cleans up nothing: its ranks remove the folder and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
