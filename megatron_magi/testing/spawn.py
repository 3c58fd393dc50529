"""Runs one function on several ranks, one process each, and brings results or the failure back.

Processes are forked from a server that has imported torch already, and some of what the caller had imported when it
first started ranks, so a fresh, isolated set of ranks costs tens of milliseconds and nothing needs to be reused from
one call to the next. Ranks on GPUs are spawned instead: a process in which any import touched CUDA could not be forked
from. Forked ranks see no GPUs.

Between the caller and the ranks of a call is a supervisor, a subreaper: it imports the module of the function, so that
forked ranks need not do so one by one, starts the ranks, reports their ends, and when the caller has finished, or died,
kills whatever is left of them and of all they have started.
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
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.testing import shared_gpus
from megatron_magi.testing.descendants import become_subreaper, kill_descendants, kill_with_parent

PRELOAD = (
    "numpy.random",
    "torch",
    "torch.distributed",
    # torch imports these at the first backward pass, sympy with them.
    "torch._functorch.autograd_function",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",  # so does torch.compiler.disable
    "megatron_magi.testing.spawn",
)
"""Modules that the server imports once, for all ranks ever started."""

PRELOAD_IF_IMPORTED = (
    "pytest",
    "hypothesis",
    "torch.distributed.fsdp",
    "transformers.generation.utils",
    "transformers.trainer",
)
"""So it does with these where the caller has imported them. None of them asks for GPUs, as ranks could not be forked
then; Megatron does, and has to be imported after `cpu_device.install`. This package is not among them: profile mode
(`megatron_magi.profiling`) begins with its import, for which a rank may set the variable."""

START_METHODS = {"gloo": "fork", "nccl": "spawn"}
"""How the ranks of a backend are started from their supervisor."""

GRACE_S = 0.3
"""How long to listen, after a rank has failed, for others that failed by themselves."""

_EXIT_S = 5.0
"""How long to wait for the exit codes of ranks that have nothing left to do."""


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
    timeout_s: float = 900.0,
    backend: str = "gloo",
) -> list[Any]:
    """Runs ``fn(rank, num_ranks, *args)`` in ``num_ranks`` processes with a default process group.

    Under an already initialised default group (torchrun) the function runs in place on every rank. Else no rank, and
    no process that a rank has started, outlives the call, however the rank ends.

    Args:
        fn: a function at module level.
        num_ranks: number of processes.
        *args: picklable arguments, the same for all ranks (tensors are copied).
        timeout_s: seconds for the whole call, also the time-out of collectives.
        backend: ``gloo``, on CPUs, or ``nccl`` with one GPU a rank, its current device (`shared_gpus.local_rank`).

    Returns:
        The picklable results in rank order.

    Raises:
        RankError: a rank raised, died, or was running at the time-out.
        RuntimeError: the supervisor of the ranks has died.
        ValueError: ``num_ranks`` is not positive, or not the size of the group that exists already.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    if dist.is_initialized():
        return _run_in_place(fn, num_ranks, args)
    folder = Path(tempfile.mkdtemp(prefix="magi_ranks_"))
    try:
        with closing(_start(fn, num_ranks, backend, timeout_s, folder)) as ranks:
            ranks.send(fn, args)
            return _collect(ranks, timeout_s, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Setup:
    """What a process needs to join its group.

    Attributes:
        source: where the function is from: name and file of its module, and the path on which that is found.
        method: how ranks are started from their supervisor, ``fork`` or ``spawn``.
        environment: of the ranks; that of the supervisor when None.
    """

    source: tuple[str, str | None, list[str]]
    num_ranks: int
    backend: str
    method: str
    timeout_s: float
    folder: str
    environment: dict[str, str] | None


@dataclass(frozen=True)
class _Ranks:
    """The caller's view of the processes.

    Attributes:
        supervisor: started the ranks.
        control: brings ``(rank, exit code)`` when a rank has ended; takes ``b"stacks"``, at which ranks write theirs.
        conns: one to each rank.
        exit_codes: those that `control` brought.
    """

    supervisor: Any
    control: connection.Connection
    conns: list[connection.Connection]
    exit_codes: dict[int, int] = field(default_factory=dict)

    def send(self, fn: Callable[..., Any], args: tuple) -> None:
        """What to run, to every rank."""
        # Plain pickle: multiprocessing's own pickler would pass tensors as shared memory that dies with its owner.
        payload = pickle.dumps((fn, args))
        for conn in self.conns:
            with suppress(BrokenPipeError):  # the supervisor reports that it has ended
                conn.send_bytes(payload)

    def note_exit(self) -> int:
        """Reads the end of one rank, and gives the rank.

        Raises:
            RankError: the supervisor has died.
        """
        try:
            rank, code = self.control.recv()
        except (EOFError, ConnectionError):
            raise RankError("the supervisor of the ranks has died", list(range(len(self.conns)))) from None
        self.exit_codes[rank] = code
        return rank

    def wait_for_exits(self, ranks: Iterable[int]) -> None:
        """Until they have ended, at the longest `_EXIT_S`."""
        deadline = time.monotonic() + _EXIT_S
        while not self.exit_codes.keys() >= set(ranks) and self.control.poll(max(0.0, deadline - time.monotonic())):
            self.note_exit()

    def close(self) -> None:
        """Ends all that is left.

        Raises:
            RuntimeError: the supervisor could not.
        """
        with suppress(OSError):
            self.control.send_bytes(b"end")
        for conn in (self.control, *self.conns):
            conn.close()
        self.supervisor.join(timeout=300.0)
        if self.supervisor.exitcode != 0:
            self.supervisor.kill()
            raise RuntimeError(f"the supervisor of the ranks ended with {self.supervisor.exitcode}: see its output")


def _run_in_place(fn: Callable[..., Any], num_ranks: int, args: tuple) -> list[Any]:
    if dist.get_world_size() != num_ranks:
        raise ValueError(f"num_ranks: {num_ranks} asked for inside a group of {dist.get_world_size()} ranks")
    results: list[Any] = [None] * num_ranks
    dist.all_gather_object(results, fn(dist.get_rank(), num_ranks, *args))
    return results


def _start(fn: Callable[..., Any], num_ranks: int, backend: str, timeout_s: float, folder: Path) -> _Ranks:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_modules_of_server())
    control, its_control = context.Pipe()
    pipes = [context.Pipe() for _ in range(num_ranks)]
    method = START_METHODS[backend]
    source = fn.__module__, getattr(sys.modules.get(fn.__module__), "__file__", None), list(sys.path)
    with _child_environment():
        environment = dict(os.environ) if method == "spawn" else None
        setup = _Setup(source, num_ranks, backend, method, timeout_s, str(folder), environment)
        supervisor = context.Process(target=_supervise, args=(setup, its_control, [theirs for _, theirs in pipes]))
        supervisor.start()
    for end in (its_control, *(theirs for _, theirs in pipes)):
        end.close()
    return _Ranks(supervisor, control, [ours for ours, _ in pipes])


def _modules_of_server() -> list[str]:
    return [*PRELOAD, *(name for name in PRELOAD_IF_IMPORTED if name in sys.modules)]


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


def _collect(ranks: _Ranks, timeout_s: float, folder: Path) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    num_ranks = len(ranks.conns)
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {conn: rank for rank, conn in enumerate(ranks.conns)}
    while waiting:
        ready = connection.wait([*waiting, ranks.control], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        if ranks.control in ready:
            rank = ranks.note_exit()
            conn = ranks.conns[rank]
            # What it has sent before is read. Its end of the connection may be open still, in a process it started.
            if conn in waiting and not conn.poll():
                failures[waiting.pop(conn)] = f"died with exit code {ranks.exit_codes[rank]}"
        else:
            for conn in ready:
                _receive(ranks, waiting.pop(conn), results, failures)
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        text = "\n".join(f"rank {rank} of {num_ranks}: {message}" for rank, message in failures.items())
        raise RankError(text, list(failures))
    if waiting:
        late = sorted(waiting.values())
        stacks = _stacks(ranks, late, folder)
        raise RankError(f"ranks {late} of {num_ranks} still running after {timeout_s} s\n{stacks}", late)
    for conn in ranks.conns:
        with suppress(BrokenPipeError):
            conn.send_bytes(b"exit")
    ranks.wait_for_exits(range(num_ranks))
    return [results[rank] for rank in range(num_ranks)]


def _receive(ranks: _Ranks, rank: int, results: dict[int, Any], failures: dict[int, str]) -> None:
    try:
        done, value = pickle.loads(ranks.conns[rank].recv_bytes())
    except (EOFError, ConnectionError):
        ranks.wait_for_exits([rank])
        failures[rank] = f"died with exit code {ranks.exit_codes.get(rank)}"
        return
    if done:
        results[rank] = value
    else:
        failures[rank] = value


def _stacks(ranks: _Ranks, late: list[int], folder: Path) -> str:
    """Where the ranks hang: each has been told to write its stack on a signal."""
    ranks.control.send_bytes(b"stacks")
    time.sleep(GRACE_S)
    files = [(rank, folder / f"stack{rank}") for rank in late]
    return "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in files if path.exists())


def _supervise(setup: _Setup, control: connection.Connection, conns: list[connection.Connection]) -> None:
    """The supervisor's process: never returns."""
    os.setpgid(0, 0)  # an interrupt from the keyboard is the caller's: it ends the ranks
    become_subreaper()
    status = 1
    try:
        if setup.environment is not None:
            os.environ.clear()
            os.environ.update(setup.environment)
        context = multiprocessing.get_context(setup.method)
        if setup.method == "fork":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            with suppress(Exception):  # each rank raises it again, and reports it
                _import_source(setup)
        processes = []
        for rank, conn in enumerate(conns):
            # A fork has all connections of this process: while it is open in one rank, none sees another's end.
            inherited = [control, *conns[:rank], *conns[rank + 1 :]] if setup.method == "fork" else []
            processes.append(context.Process(target=_rank_main, args=(rank, setup, conn, inherited), daemon=True))
            processes[-1].start()
        for conn in conns:
            conn.close()
        _report_exits(setup, processes, control)
        status = 0
    except Exception:  # noqa: BLE001  (the process ends here, whatever it is)
        traceback.print_exc()
    try:
        kill_descendants()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        status = 1
    shutil.rmtree(setup.folder, ignore_errors=True)  # a caller that was killed cannot
    sys.stderr.flush()
    os._exit(status)


def _report_exits(setup: _Setup, processes: list[Any], control: connection.Connection) -> None:
    """Sends the exit codes of ranks to the caller, until that has finished or died."""
    running = dict(enumerate(processes))
    # Not the processes' sentinels: these are open as long as one that a rank has forked is.
    with suppress(EOFError, OSError):
        while True:
            if control.poll(0.01):
                if control.recv_bytes() == b"end":
                    return
                _print_stacks(setup, running)
            for rank, code in [(rank, p.exitcode) for rank, p in running.items()]:
                if code is not None:
                    del running[rank]
                    control.send((rank, code))


def _print_stacks(setup: _Setup, running: dict[int, Any]) -> None:
    """Has the ranks that can write their stacks to their files."""
    for rank, process in running.items():
        if (Path(setup.folder) / f"stack{rank}").exists():
            os.kill(process.pid, signal.SIGUSR1)


def _rank_main(rank: int, setup: _Setup, conn: connection.Connection, inherited: list[connection.Connection]) -> None:
    """A rank's process: never returns, so that no exit handler of a library can hang it."""
    kill_with_parent()
    for other in inherited:
        other.close()
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
    _import_source(setup)
    fn, args = pickle.loads(conn.recv_bytes())
    torch.set_num_threads(1)
    local_rank = shared_gpus.local_rank(rank) if setup.backend == "nccl" else rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(setup.num_ranks))
    device_id = None
    if setup.backend == "nccl":
        shared_gpus.begin()
        device_id = torch.device("cuda", local_rank)
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


def _import_source(setup: _Setup) -> None:
    """Makes the function's module importable by name even where only its file is known (pytest's importlib mode)."""
    module, path, search_path = setup.source
    sys.path[:] = search_path
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
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[module]
            raise
