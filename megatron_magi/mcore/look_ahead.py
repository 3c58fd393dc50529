"""The next microbatch is brought to the GPU, and compared, while that is busy with the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_magi.mcore.loader import LoadedBatch


class LookAhead(Iterator[Any]):
    """Iterates over the items of another iterator, and can fetch the next one before it is asked for.

    Args:
        source: of microbatches as a data loader returns them.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._plans = False
        self._fetched: LoadedBatch | None = None
        self._has_ended = False

    def __next__(self) -> Any:
        item, self._fetched = self._fetched, None
        if item is None:
            if self._has_ended:
                self._has_ended = False
                raise StopIteration
            item = next(self._source)
            self._plans = isinstance(item, LoadedBatch) and item.is_closed
        return item

    def look(self, begin: Callable[[LoadedBatch], None]) -> None:
        """Fetches the next item and calls ``begin`` with it, if workers of a data loader plan.

        Of an error of the source it makes a `LoadedBatch` that has it in place of a plan: this microbatch is not to
        fail, the next one will when it is due.
        """
        if not self._plans or self._fetched is not None or self._has_ended:
            return
        try:
            self._fetched = next(self._source)
        except StopIteration:
            self._has_ended = True
            return
        except Exception as error:  # noqa: BLE001
            self._fetched = LoadedBatch({}, error)
        if isinstance(self._fetched, LoadedBatch):
            begin(self._fetched)


def look_ahead_of(data_iterator: Iterator[Any]) -> LookAhead | None:
    """The `LookAhead` below a data iterator of Megatron's trainer, put there if need be; None for other iterators.

    It lies below what Megatron keeps for replays.

    A data loader that saves its own state stays where Megatron looks for it (``dataloader_save``).
    """
    if type(data_iterator) is not RerunDataIterator or hasattr(data_iterator.iterable, "save_state"):
        return None
    if not isinstance(data_iterator.iterable, LookAhead):
        data_iterator.iterable = LookAhead(data_iterator.iterable)
    return data_iterator.iterable
