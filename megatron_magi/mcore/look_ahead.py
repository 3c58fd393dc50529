"""The next microbatch is brought to the GPU while that is busy with the one before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_magi.mcore.loader import LoadedBatch
from megatron_magi.upload import current_device


class LookAhead(Iterator[Any]):
    """The same items, the next of which can be fetched before it is asked for.

    Args:
        source: of microbatches as a data loader returns them.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._plans = False
        self._fetched: tuple[Any, Exception | None] | None = None

    def __next__(self) -> Any:
        item, error = self._fetched or (None, None)
        if self._fetched is None:
            item = next(self._source)
            self._plans = isinstance(item, LoadedBatch) and item.is_closed
        self._fetched = None
        if error is not None:
            raise error
        return item

    def look(self) -> None:
        """Fetches the next item, and begins to copy it to the GPU, if workers of a data loader plan.

        Errors are raised when the item is due.
        """
        if not self._plans or self._fetched is not None:
            return
        # Whatever goes wrong, this microbatch is not to fail: it will again when the next one is due.
        try:
            self._fetched = next(self._source), None
        except Exception as error:  # noqa: BLE001
            self._fetched = None, error
        item = self._fetched[0]
        if isinstance(item, LoadedBatch) and torch.cuda.is_available():
            with suppress(Exception):
                item.bring(current_device())


def look_ahead_of(data_iterator: Iterator[Any]) -> LookAhead | None:
    """That of an iterator of Megatron's trainer, below what Megatron keeps for replays; None for others.

    A data loader that saves its own state stays where Megatron looks for it (``dataloader_save``).
    """
    if type(data_iterator) is not RerunDataIterator or hasattr(data_iterator.iterable, "save_state"):
        return None
    if not isinstance(data_iterator.iterable, LookAhead):
        data_iterator.iterable = LookAhead(data_iterator.iterable)
    return data_iterator.iterable
