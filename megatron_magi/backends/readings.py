"""Which mask forwards read where masks change in place, so that no backward computes with another one.

In eager mode the host compares what is loaded now with what was loaded then. It does not see replays of CUDA graphs. So
the graph of a forward copies the number of the mask (`ChangingMask.content`) into its own memory, and kernels of the
backward compare that with the number of the mask that they read.

A checkpoint computes a forward again, inside of a backward. Its backward belongs to the forward that ran first: where
that recorded gradients the autograd function of that forward compares as above. Where it did not (reentrant
checkpoints), the forward is found by its place among the nodes of the graph: it was the first one after the node of the
checkpoint was made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from megatron_magi.backends.base import ChangingMask, is_changing

_MOST_RUNS, _MOST_THREADS = 256, 64
_LOADED = (
    "key: a static key, or static plans, were given another mask between a forward and its backward, which would "
    "compute with that; load after the backward"
)


class Reading(NamedTuple):
    """The mask that a forward read.

    Attributes:
        content: `ChangingMask.content` when the host called it.
        capture: number of the CUDA graph that captured it; 0 in eager mode.
        copy: of the content in memory of that graph, int64 ``[1]``, set by each replay; None in eager mode.
    """

    content: int
    capture: int = 0
    copy: Tensor | None = None

    def is_of(self, content: int, capture: int) -> bool:
        """Whether the host knows that a forward that runs now reads the same."""
        return (self.content, self.capture) == (content, capture)


class _Run:
    """Forwards without gradients that follow each other and read the same; ``last``: see `Readings`."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.last = reading, 0


class _Backward:
    """Forwards inside of a backward of a thread. Only the engine holds it, to call it at the end; it ends with that."""

    def __init__(self, thread: int, number: int) -> None:
        self.thread, self.number = thread, number
        self.runs: deque[_Run] = deque(maxlen=_MOST_RUNS)

    def __call__(self) -> None:
        pass


class Readings:
    """Forwards of a mask that recorded no gradients, which a reentrant checkpoint may run again.

    They are known by the number that their thread would give to the next node of an autograd graph: it is larger than
    that of the checkpoint around them, and not larger than that of a later one. Each thread counts by itself. A
    checkpoint inside of another is made anew, and its forward run, in the backward of that one; its own backward is
    nested in that, in the same thread. So such forwards are kept apart, until the backward ends.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._outside: OrderedDict[object, deque[_Run]] = OrderedDict()  # of threads, some of which have ended
        self._inside: WeakSet[_Backward] = WeakSet()

    def note(self, reading: Reading) -> None:
        """Adds a forward of this thread."""
        runs = self._runs_here()
        if not runs or not runs[-1].reading.is_of(reading.content, reading.capture):
            runs.append(_Run(reading))
        runs[-1].last = torch.autograd._get_sequence_nr()

    def first_after(self, node: int) -> list[Reading]:
        """The first forward after a node, if there is one: of an outer backward of this thread, else of each thread, as
        that which made the node is unknown.
        """
        thread, backward = threading.get_ident(), torch._C._current_graph_task_id()
        outer = [one.runs for one in list(self._inside) if one.thread == thread and one.number < backward]
        inside = [run for runs in outer for run in runs if run.last > node]
        if inside:
            return [min(inside, key=lambda run: run.last).reading]
        firsts = [next((run for run in list(runs) if run.last > node), None) for runs in list(self._outside.values())]
        return [run.reading for run in firsts if run is not None]

    def _runs_here(self) -> deque[_Run]:
        thread, backward = threading.get_ident(), torch._C._current_graph_task_id()
        if backward >= 0:
            here = (one for one in list(self._inside) if (one.thread, one.number) == (thread, backward))
            if (found := next(here, None)) is None:
                found = _Backward(thread, backward)
                self._inside.add(found)
                Variable._execution_engine.queue_callback(found)
            return found.runs
        if not hasattr(self._here, "thread"):
            self._here.thread = object()  # identifiers of threads are used again
        if self._here.thread not in self._outside:
            self._outside[self._here.thread] = deque(maxlen=_MOST_RUNS)
            if len(self._outside) > _MOST_THREADS:
                self._outside.popitem(last=False)
        return self._outside[self._here.thread]


def reading_of_forward(bands: np.ndarray, has_gradients: bool) -> Reading | None:
    """What a forward reads, for `check_reading` in its backward; None of masks that do not change.

    Where it repeats another one, what that has read.

    Args:
        bands: of a call, or of its first stage.
        has_gradients: whether it records gradients.
    """
    if not is_changing(bands):
        return None
    mask: ChangingMask = bands.mask
    reading = mask.reading()
    node = torch._C._current_autograd_node()
    if isinstance(node, BackwardCFunction):
        found = mask.readings.first_after(node._sequence_nr())
        if found and not any(first.is_of(reading.content, reading.capture) for first in found):
            known = (first for first in found if first.content == reading.content or first.copy is not None)
            reading = next(known, found[0])
    if not has_gradients:
        mask.readings.note(reading)
    return reading


def check_reading(bands: np.ndarray, reading: Reading | None) -> Tensor | None:
    """Compares what a backward reads with what its forward read, or says what kernels have to compare.

    Args:
        bands: of the forward.
        reading: result of `reading_of_forward`.

    Returns:
        int64 ``[1]`` on the device, the content that kernels expect (`Backend.backward`, `Program.backward`); None if
        there is nothing to compare.

    Raises:
        RuntimeError: another mask was loaded in between.
    """
    if reading is None:
        return None
    assert is_changing(bands)
    mask: ChangingMask = bands.mask
    capture = mask.capture()
    if reading.copy is not None:
        return None if reading.capture == capture else reading.copy
    if reading.content != mask.content:
        raise RuntimeError(_LOADED)
    return torch.full((1,), reading.content, device=mask.device) if capture else None
