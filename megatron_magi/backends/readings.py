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
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megatron_magi.backends.base import ChangingMask, is_changing

_MOST_RUNS = 256
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


class Readings:
    """Forwards of a mask that recorded no gradients, which a reentrant checkpoint may run again.

    They are known by the number that their thread would give to the next node of an autograd graph: it is larger than
    that of the checkpoint around them, and not larger than that of a later one.
    """

    def __init__(self) -> None:
        self._of_threads: dict[int, deque[_Run]] = {}

    def note(self, reading: Reading) -> None:
        """Adds a forward of this thread."""
        runs = self._of_threads.setdefault(threading.get_ident(), deque(maxlen=_MOST_RUNS))
        if not runs or not runs[-1].reading.is_of(reading.content, reading.capture):
            runs.append(_Run(reading))
        runs[-1].last = torch.autograd._get_sequence_nr()

    def first_after(self, node: int) -> list[Reading]:
        """Of each thread the first forward after a node, if there is one: the thread that made the node is unknown."""
        firsts = (next((run for run in runs if run.last > node), None) for runs in self._of_threads.values())
        return [run.reading for run in firsts if run is not None]


def reading_of_forward(bands: np.ndarray, has_gradients: bool) -> Reading | None:
    """What a forward reads, for `check_reading` in its backward; None of masks that do not change.

    Args:
        bands: of a call, or of its first stage.
        has_gradients: whether it records gradients.

    Raises:
        RuntimeError: it repeats a forward, and another mask was loaded after that.
    """
    if not is_changing(bands):
        return None
    mask: ChangingMask = bands.mask
    reading = mask.reading()
    if not has_gradients:
        mask.readings.note(reading)
    node = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction):
        return reading
    found = mask.readings.first_after(node._sequence_nr())
    if not found or any(first.is_of(reading.content, reading.capture) for first in found):
        return reading
    for first in found:
        if first.content == reading.content or first.copy is not None:
            return first
    raise RuntimeError(_LOADED)


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
