"""Microbatches one after another, and which of them a data loader with workers has not given out."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One microbatch for each rank: lists of documents, and the number of the step that they are of."""

    step: int
    microbatches: list[list[int]]


class MicrobatchIterator:
    """A rank's microbatches, without end.

    Args:
        next_turn: draws the next one.
        dp_rank: whose microbatches these are.
        num_ahead: turns that were drawn last and have not come out of the data loader.

    Attributes:
        ahead: these turns, in their order.
    """

    def __init__(self, next_turn: Callable[[], Turn], dp_rank: int, num_ahead: int) -> None:
        self._next_turn, self._dp_rank, self._is_left = next_turn, dp_rank, False
        self.ahead: deque[Turn] = deque(maxlen=num_ahead)

    def __iter__(self) -> MicrobatchIterator:
        return self

    def __next__(self) -> list[int]:
        if self._is_left:
            raise RuntimeError(
                "batch_sampler: what this iterator's data loader had asked for was given to a newer iterator, or "
                "dropped by load_state_dict; with workers one iterator at a time can be used"
            )
        turn = self._next_turn()
        self.ahead.append(turn)
        return list(turn.microbatches[self._dp_rank])

    def leave(self) -> list[Turn]:
        """Returns the turns that have not come out of the data loader, which then cannot go on."""
        out = list(self.ahead)
        self.ahead.clear()
        self._is_left = bool(self.ahead.maxlen)
        return out


def num_ahead(sampler: Any) -> int:
    """Batches that the data loader which is asking ``sampler`` for an iterator holds back; 0 if none is.

    A loader draws ``prefetch_factor`` batches for each worker at the start and one more for each that it gives out. It
    says nothing of itself to its sampler, so it is looked for among the callers, by its attributes.

    Raises:
        ValueError: it gives batches out of order.
    """
    frame = inspect.currentframe()
    while frame is not None:
        # Of other frames f_locals would keep copies, and with them a user's old iterators and their workers.
        loader = frame.f_locals.get("self") if frame.f_code.co_name == "__iter__" else None
        if hasattr(loader, "batch_sampler") and hasattr(loader, "prefetch_factor"):
            asks_for = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            if asks_for is sampler:
                break
        frame = frame.f_back
    else:
        return 0
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ValueError("in_order: expected True, so that all ranks are at the same microbatch of a step, got False")
    return loader.num_workers * (loader.prefetch_factor or 0)
