"""Lists of calls on one stream, possibly with kernels that transfer rows between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch

from megatron_magi.backends.base import StepMover
from megatron_magi.cuda.launch_list import LaunchList, Step
from megatron_magi.cuda.streams import stream_lock


class LaunchesForm(NamedTuple):
    """Properties common to lists of calls of different masks.

    Attributes:
        device, stream: where they are launched; the stream's raw handle.
        fetches: keys are fetched.
        is_direct: keys and values are published from the tensors that attention reads, without a copy.
        is_empty: this rank has no rows; the calls only take part in the communication, the way back in a second list.
        left: the caller has to send the partial gradients of fetched keys.
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
    """The mask's numbers that come with steps."""
    return {name: number for step in steps for name, number in step.numbers.items()}


class StreamLaunches:
    """Lists of calls.

    Args:
        form: how they are launched.
        mover: launches kernels that transfer rows; None if there are none.
        lists: steps of each; `like` sets the numbers of a mask in them.
        slots: as `LaunchList` takes them.

    Attributes:
        form: as given.
    """

    def __init__(
        self, form: LaunchesForm, mover: StepMover | None, lists: Sequence[Sequence[Step]], slots: Sequence[str]
    ) -> None:
        lock = stream_lock(form.device, form.stream)
        self._begin(form, mover, [LaunchList(steps, slots, form.stream, lock) for steps in lists])

    def _begin(self, form: LaunchesForm, mover: StepMover | None, lists: list[LaunchList]) -> None:
        # A weak reference: the group owns memory that other ranks have mapped.
        self._mover = None if mover is None else ref(mover)
        self._version = None if mover is None else mover.version()
        self.form, self._lists = form, lists

    def like(self, mover: StepMover | None, numbers: Mapping[str, int]) -> StreamLaunches:
        """A copy for a mask with these numbers."""
        made = object.__new__(StreamLaunches)
        made._begin(self.form, mover, [calls.with_numbers(numbers) for calls in self._lists])
        return made

    def hold(self) -> bool:
        """Whether they are still valid."""
        if self._mover is None:
            return True
        mover = self._mover()
        return mover is not None and mover.version() == self._version

    def queue(self, *addresses: int, part: int = 0) -> None:
        """Launches one of the lists."""
        if self._mover is None:
            self._lists[part].queue(*addresses)
        else:
            self._mover().queue(self._lists[part], self.form.stream, *addresses)
