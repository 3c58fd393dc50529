"""Lists of calls on one stream. Some may move rows between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch

from megatron_magi.cuda.call_list import CallList, Step
from megatron_magi.ops.hopper.support import stream_lock


class StepMover(Protocol):
    """What moves rows between ranks by steps of lists, which it queues in an order of its own."""

    def version(self) -> tuple:
        """Another one when steps no longer hold."""

    def queue(self, calls: CallList, raw: int, *addresses: int) -> None:
        """Queues a list on the current stream, whose handle is ``raw``."""


class CallsForm(NamedTuple):
    """What lists of calls of different masks have in common.

    Attributes:
        device, stream: where they are queued; the stream's raw handle.
        fetches: keys arrive.
        is_direct: keys and values are published from where attention reads them.
        is_empty: this rank has no rows; the calls move those of others, there and in a second list back.
        left: partial gradients of fetched keys are left to be sent.
        kernels: the form of the pass, if this rank has rows.
    """

    device: torch.device
    stream: int
    fetches: bool
    is_direct: bool
    is_empty: bool
    left: bool = False
    kernels: Any = None


def brought(steps: Sequence[Step]) -> dict[str, int]:
    """Numbers of the mask that steps bring."""
    return {name: number for step in steps for name, number in step.numbers.items()}


class StreamCalls:
    """Lists of calls.

    Args:
        form: how they are queued.
        mover: by which they move rows; None where they move none.
        lists: steps of each; numbers of a mask in them are set by `like`.
        slots: as `CallList` takes them.

    Attributes:
        form: as given.
    """

    def __init__(
        self, form: CallsForm, mover: StepMover | None, lists: Sequence[Sequence[Step]], slots: Sequence[str]
    ) -> None:
        lock = stream_lock(form.device, form.stream)
        self._begin(form, mover, [CallList(steps, slots, form.stream, lock) for steps in lists])

    def _begin(self, form: CallsForm, mover: StepMover | None, lists: list[CallList]) -> None:
        # Not kept alive: with the group goes memory that other ranks have mapped.
        self._mover = None if mover is None else ref(mover)
        self._version = None if mover is None else mover.version()
        self.form, self._lists = form, lists

    def like(self, mover: StepMover | None, numbers: Mapping[str, int]) -> StreamCalls:
        """The same of a mask with these numbers."""
        made = object.__new__(StreamCalls)
        made._begin(self.form, mover, [calls.with_numbers(numbers) for calls in self._lists])
        return made

    def hold(self) -> bool:
        """Whether they can be queued still."""
        if self._mover is None:
            return True
        mover = self._mover()
        return mover is not None and mover.version() == self._version

    def queue(self, *addresses: int, part: int = 0) -> None:
        """Queues one of the lists."""
        if self._mover is None:
            self._lists[part].queue(*addresses)
        else:
            self._mover().queue(self._lists[part], self.form.stream, *addresses)
