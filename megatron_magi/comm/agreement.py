"""A check that all ranks have the same value, such as a plan: a disagreement raises an error instead of a hang.

Calls are compared in `megatron_magi.comm.collective_checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_magi.comm.collective_checks import CallLog, calls_of, log_of
from megatron_magi.comm.groups import all_gather_single, names_of

MAX_VALUES = 16
"""Values of a comparison; a rank sends all of them, so that ranks which compare others do not wait for each other."""


class _Comparison(NamedTuple):
    """Record by which ranks verify that they wait for the same comparison."""

    operation: str


class Agreement:
    """A comparison in progress; made by `start_agreement`."""

    def __init__(
        self,
        done: dist.Work | torch.cuda.Event | None,
        values: torch.Tensor,
        group: dist.ProcessGroup | None,
        names: tuple[str, ...],
        log: CallLog | None = None,
        call: int = 0,
    ) -> None:
        self._done = done
        self._values = values
        self._group = group
        self._names = names
        self._log = log
        self._call = call

    def wait(self) -> None:
        """Waits for all ranks' values. The host blocks, but not for compute that is queued on the GPU.

        Raises:
            RuntimeError: the values differ; all ranks raise the same message. Or some ranks made another call, or did
                not take part within the group's timeout; the message names them.
        """
        self.values()
        names = (*self._names, *["values of other names"] * (MAX_VALUES - len(self._names)))
        columns = zip(names, self._values.T.tolist(), strict=False)
        differ = [_message(values, self._group, name) for name, values in columns if len(set(values)) > 1]
        if differ:
            raise RuntimeError("\n".join(differ))

    def values(self) -> list[int]:
        """Waits like `wait`, and returns the (first) values of all ranks, in their order, without comparing them."""
        if self._log is not None:
            self._await(self._log)
        return self._values[:, 0].tolist()

    def _await(self, log: CallLog) -> None:
        done = self._done
        if isinstance(done, torch.cuda.Event):
            log.wait(self._call, done.query)
            return
        assert done is not None
        log.wait(self._call, done.is_completed)
        try:
            done.wait()
        except RuntimeError as error:
            text, note = log.explanation(self._call)
            if text is None and not note:
                raise
            raise RuntimeError(text or f"{note}: {error}") from error


def start_agreement(
    value: int, group: dist.ProcessGroup | None, what: str, others: Mapping[str, int] | None = None
) -> Agreement:
    """Starts comparing ``value`` over the group: one all-gather of 128 bytes a rank.

    Every rank of the group must call it, in the same order among its collectives.

    Args:
        value: 0 <= value < 2**63, for example a hash.
        group: the ranks; the default group when None. Without any, a single rank agrees with itself.
        what: what is compared, for the message, for example ``plan``.
        others: values that are compared with it, by what they are, in the same order on all ranks.

    Raises:
        ValueError: a value is out of bounds, or there are more than `MAX_VALUES`.
    """
    values = {what: value, **(others or {})}
    for one in values.values():
        if not 0 <= one < 1 << 63:
            raise ValueError(f"value: expected 63 bits, got {one}")
    if len(values) > MAX_VALUES:
        raise ValueError(f"others: at most {MAX_VALUES - 1} can be compared, got {len(values) - 1}")
    names, row = tuple(values), [*values.values(), *[0] * (MAX_VALUES - len(values))]
    num_ranks = 1 if group is None and not dist.is_initialized() else dist.get_world_size(group)
    if num_ranks == 1:
        return Agreement(None, torch.tensor([row], dtype=torch.int64, device="cpu"), group, names)
    log = log_of(dist.group.WORLD if group is None else group)
    with log:
        call = log.begin(_Comparison(what))
        on_gpu = _needs_gpu(group)
        mine = torch.tensor([row], dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        found = torch.empty((num_ranks, MAX_VALUES), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        if on_gpu:
            return Agreement(_gather_aside(found, mine, group), found, group, names, log, call)
        # The work keeps both tensors.
        work = all_gather_single(found, mine, group=group, async_op=True)
        return Agreement(work, found, group, names, log, call)


@contextmanager
def told(group: dist.ProcessGroup | None, verify: bool = True) -> Iterator[None]:
    """Encloses code before a call on ``group``: reports an error in it to the ranks that wait in the call.

    Args:
        group: the ranks; None where there is no call, or one rank alone.
        verify: as of the call, see `megatron_magi.comm.collective_checks.calls_of`.
    """
    try:
        yield
    except Exception:
        if group is None:
            raise
        with calls_of(group, group.size(), verify):
            raise


def _gather_aside(values: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.cuda.Event:
    """Gathers ``mine`` of all ranks into ``values``, both pinned, through the GPU; the event marks completion.

    On a stream of its own: neither the collective nor its result waits for compute that was
    queued before, which a read on the compute's stream would drain.
    """
    stream = _side_stream(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        sent = mine.to(stream.device, non_blocking=True)
        received = torch.empty(values.shape, dtype=values.dtype, device=stream.device)
        # This makes the side stream wait for the collective, so the two tensors may be freed when this returns.
        all_gather_single(received, sent, group=group, async_op=True).wait()
        values.copy_(received, non_blocking=True)
        return stream.record_event()


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for each device: the allocator has separate memory for each stream."""
    return torch.cuda.Stream(device)


def _needs_gpu(group: dist.ProcessGroup | None) -> bool:
    return "cpu" not in {entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")}


def _message(values: list[int], group: dist.ProcessGroup | None, what: str) -> str:
    """Names the ranks that differ from the most common value; from that of the lowest rank in a tie."""
    counts = Counter(values)
    # max returns the first of equals, and values are in rank order.
    expected = max(values, key=lambda value: counts[value])
    world_ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    differ = ", ".join(
        f"{names_of([rank], world_ranks)} has {value:#018x}" for rank, value in enumerate(values) if value != expected
    )
    agree = [rank for rank, value in enumerate(values) if value == expected]
    return f"{what}: ranks disagree: {differ}; expected {expected:#018x}, as ranks {agree} of the group have"
