"""`MAGI_ATTENTION_PROFILE_MODE`: named ranges for profilers, and a summary of where the time of attention goes.

The variable is looked at once, when the package is imported. When it is off, what is here wraps nothing. When it is on,
each pass of attention, each of our kernels and each collective is an NVTX range and is timed: on GPUs by events on the
stream that it runs on, on CPUs by the host's clock.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch

from megatron_magi import envs
from megatron_magi.mask import bands as bd
from megatron_magi.runtime.graph_capture import is_capturing

ON = envs.profile_mode()
"""Whether this process profiles."""
_MOST_OPEN = 4096  # spans whose events are kept before those that are over are counted


class Row(NamedTuple):
    """Totals of one pass, kernel, collective or wait.

    Attributes:
        kind: ``pass`` (of attention on one rank, over the keys of one stage), ``kernel`` (one of ours, of which passes
            and native collectives are made), ``collective`` (of NCCL or gloo: from where its rows are ready to where
            all have come) or ``wait`` (of the caller for a collective, and what is done with what has come).
        calls: how often.
        ms: in all.
        tflops: of visible pairs, a second; 0 where nothing is computed.
        gbytes_per_s: received.
        share: of the time from the begin of the first span to the end of the last.
    """

    kind: str
    name: str
    calls: int
    ms: float
    tflops: float
    gbytes_per_s: float
    share: float


class _Span(NamedTuple):
    kind: str
    name: str
    begin: Any  # an event, or seconds of the host
    end: Any
    flops: float
    num_bytes: int


@dataclass
class _Sum:
    calls: int = 0
    ms: float = 0.0
    flops: float = 0.0
    num_bytes: int = 0


class Recorder:
    """Spans of a process, and their sums. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self.rank = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all: what follows is what a summary is of."""
        with self._lock:
            self._open: list[_Span] = []
            self._sums: dict[tuple[str, str], _Sum] = {}
            self._first: Any = None
            self._begin_ms = self._end_ms = 0.0
            """Earliest begin and latest end of all spans, relative to the begin of the span that was added first."""

    def add(self, kind: str, name: str, begin: Any, end: Any, flops: float = 0.0, num_bytes: int = 0) -> None:
        """Notes a span.

        Args:
            kind, name: of the row of the summary that it counts for.
            begin, end: events of CUDA, or seconds of the host.
            flops, num_bytes: what was computed, and sent, in it.
        """
        if torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        with self._lock:
            if self._first is None:
                self._first = begin
            self._open.append(_Span(kind, name, begin, end, flops, num_bytes))
            if len(self._open) > _MOST_OPEN:
                self._count([span for span in self._open if _is_over(span.end)])

    def _count(self, spans: list[_Span]) -> None:
        done = set(map(id, spans))
        self._open = [span for span in self._open if id(span) not in done]
        for span in spans:
            total = self._sums.setdefault((span.kind, span.name), _Sum())
            total.calls += 1
            total.ms += _elapsed_ms(span.begin, span.end)
            total.flops += span.flops
            total.num_bytes += span.num_bytes
            # A collective begins before passes that are noted before it.
            self._begin_ms = min(self._begin_ms, _elapsed_ms(self._first, span.begin))
            self._end_ms = max(self._end_ms, _elapsed_ms(self._first, span.end))

    def rows(self) -> list[Row]:
        """Totals since the last `reset`; waits for the device."""
        with self._lock:
            if any(not isinstance(span.end, float) for span in self._open):
                torch.cuda.synchronize()
            self._count(self._open)
            period_ms = max(self._end_ms - self._begin_ms, 1e-9)
            found = [
                Row(
                    kind, name, total.calls, total.ms,
                    total.flops / max(total.ms, 1e-9) / 1e9, total.num_bytes / max(total.ms, 1e-9) / 1e6,
                    total.ms / period_ms,
                )
                for (kind, name), total in self._sums.items()
            ]  # fmt: skip
        return sorted(found, key=lambda row: (row.kind, -row.ms))

    def side(self, device: torch.device) -> torch.cuda.Stream:
        """A stream that only waits."""
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return self._sides[device]


def _is_over(end: Any) -> bool:
    return isinstance(end, float) or end.query()


def _elapsed_ms(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


_recorder = Recorder()


def reset() -> None:
    """Forgets what was recorded, so that the next `summary` is of what follows."""
    _recorder.reset()


def rows() -> list[Row]:
    """Totals since the last `reset`, by kind and then the longest first. Waits for the device."""
    return _recorder.rows()


def summary() -> str:
    """`rows` as a table."""
    lines = [f"{'':<11}{'':<34}{'calls':>8}{'ms':>11}{'us each':>10}{'TFLOP/s':>9}{'GB/s':>8}{'share':>8}"]
    for row in rows():
        rate = f"{row.tflops:9.0f}" if row.tflops else " " * 9
        rate += f"{row.gbytes_per_s:8.1f}" if row.gbytes_per_s else " " * 8
        each = 1e3 * row.ms / row.calls
        lines.append(f"{row.kind:<11}{row.name:<34}{row.calls:>8}{row.ms:>11.3f}{each:>10.1f}{rate}{row.share:>8.1%}")
    return "\n".join(lines)


@contextmanager
def _range(name: str, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(f"magi {name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _mark(device: torch.device, stream: torch.cuda.Stream | None = None) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or torch.cuda.current_stream(device))
    return event


_pass_of = threading.local()  # its ``kernels``: name, begin and end of those that the pass under way has launched


def _flops(kernels: list[str], q: torch.Tensor, v: torch.Tensor, bands: Any) -> dict[str, float]:
    """Floating-point operations over visible pairs by pass and by kernel; ``kernels``: those that the pass launched."""
    product = 2.0 * float(bd.areas(bands).sum()) * q.shape[1]
    qk, pv = q.shape[2], v.shape[2]
    forward, backward = product * (qk + pv), product * (3 * qk + 2 * pv)
    # Where dq has a kernel of its own, that computes dq, and the others the rest.
    of_dq = product * qk if "ffa_backward_queries" in kernels else 0.0
    return {"forward": forward, "backward": backward, "ffa_forward": forward, "ffa_backward": backward - of_dq,
            "ffa_backward_keys": backward - of_dq, "ffa_backward_queries": of_dq}  # fmt: skip


def _pass[F: Callable](name: str, tensors: Callable[..., tuple]) -> Callable[[F], F]:
    """Decorates a pass of attention; ``tensors`` takes its arguments and gives q, v and the bands."""

    def decorate(function: F) -> F:
        if not ON:
            return function

        @wraps(function)
        def timed(*args, **kwargs):
            q, v, bands = tensors(*args)
            if is_capturing(q.device):  # a graph takes no events that are timed
                return function(*args, **kwargs)
            kernels = _pass_of.kernels = []
            try:
                with _range(f"attention {name}", q.device):
                    begin = _mark(q.device)
                    result = function(*args, **kwargs)
                    end = _mark(q.device)
            finally:
                _pass_of.kernels = None
            flops = _flops([kernel for kernel, *_ in kernels], q, v, bands)
            _recorder.add("pass", f"attention {name}", begin, end, flops[name])
            for kernel, *span in kernels:
                _recorder.add("kernel", kernel, *span, flops.get(kernel, 0.0))
            return result

        return timed

    return decorate


profiled_forward = _pass("forward", lambda qkv, bands, *_: (qkv[0], qkv[2], bands))
profiled_backward = _pass("backward", lambda inputs, bands, *_: (inputs.q, inputs.v, bands))

profiled_forward_calls = _pass("forward", lambda queue, addresses, q, v, bands: (q, v, bands))
profiled_backward_calls = _pass("backward", lambda queue, addresses, q, v, bands: (q, v, bands))


def profiled_collective[F: Callable](function: F) -> F:
    """Decorates a function ``(tensors, args, ...)`` that starts a collective and returns its `Handle`."""
    if not ON:
        return function

    @wraps(function)
    def timed(tensors, *args, **kwargs):
        device, name = (tensors if isinstance(tensors, torch.Tensor) else tensors[0]).device, function.__name__
        if is_capturing(device):
            return function(tensors, *args, **kwargs)
        begin = _mark(device)
        with _range(name, device):
            handle = function(tensors, *args, **kwargs)
        works, arrived = handle._works, None
        if device.type == "cuda" and works and all(isinstance(work, torch.distributed.Work) for work in works):
            side = _recorder.side(device)
            with torch.cuda.stream(side):  # waits for what the caller's stream will wait for
                for work in works:
                    work.wait()
            arrived = _mark(device, side)
        wait = handle.wait

        def timed_wait():
            before = _mark(device)
            with _range(f"{name} wait", device):
                result = wait()
            after = _mark(device)
            _recorder.add("wait", name, before, after)
            if device.type != "cuda" or arrived is not None:
                _recorder.add("collective", name, begin, arrived or after, 0.0, handle.received_bytes)
            return result

        handle.wait = timed_wait
        return handle

    return timed


def profiled_kernel(name: str, kernel: Any, device: torch.device, stream_of: Callable[[int], int | None]) -> Any:
    """A kernel whose launches are timed; itself when nothing is profiled.

    Args:
        name: under which they are reported.
        kernel: has a method ``launch(config, pointers)``.
        device: that it is loaded on.
        stream_of: the raw stream of a launch's ``config``.
    """
    return _TimedKernel(name, kernel, device, stream_of) if ON else kernel


class _TimedKernel:
    def __init__(self, name: str, kernel: Any, device: torch.device, stream_of: Callable[[int], int | None]) -> None:
        self._name, self._kernel, self._device, self._stream_of = name, kernel, device, stream_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def launch(self, config: int, pointers: Any) -> None:
        device = self._device
        if is_capturing(device):
            self._kernel.launch(config, pointers)
            return
        raw = self._stream_of(config)
        stream = torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)
        with _range(self._name, device):
            begin = _mark(device, stream)
            self._kernel.launch(config, pointers)
            end, kernels = _mark(device, stream), getattr(_pass_of, "kernels", None)
        if kernels is None:
            _recorder.add("kernel", self._name, begin, end)
        else:
            kernels.append((self._name, begin, end))


def _say() -> None:
    with suppress(Exception):  # a device that was lost leaves nothing to say
        if _recorder.rank == 0 and rows():
            print(f"MAGI_ATTENTION_PROFILE_MODE, rank 0:\n{summary()}", flush=True)


if ON:
    atexit.register(_say)
