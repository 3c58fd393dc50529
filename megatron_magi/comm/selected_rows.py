"""Rows of keys that a rank selects on its device, fetched from the ranks that hold them.

Which rows these are is known on the device alone: ranks exchange bits, one for each key, pack the rows that others ask
for into buffers of one size, and exchange these. No size depends on what is selected, so the host waits for nothing and
CUDA graphs can be captured; a rank that selects more rows of another than the buffer holds is told to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.comm.collective_checks import calls_of
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.runtime.lasting import lasting
from megatron_magi.runtime.upload import upload

_BITS = 8
_COUNT_SHIFT = 31


@dataclass(frozen=True, eq=False)
class KeyPlaces:
    """Which rank holds which tokens, on a device; padding left out.

    Attributes:
        rank: this rank.
        num_keys: tokens of each rank, its first rows.
        width: the most that any rank holds, rounded up to whole bytes of bits.
        place: of each token, ``rank * width + row``, int64 ``[total_seqlen]``.
        token: of each place, int64 ``[num_ranks, width]``; ``total_seqlen`` where there is none.
    """

    rank: int
    num_keys: tuple[int, ...]
    width: int
    place: Tensor
    token: Tensor

    @classmethod
    def build(
        cls, global_index: Sequence[np.ndarray], total_seqlen: int, rank: int, device: torch.device | str
    ) -> KeyPlaces:
        """Copies the tables to ``device``.

        Args:
            global_index: for each rank the token of each row, int64 ``[num_rows]``; padding, from ``total_seqlen`` on,
                comes last.
            total_seqlen: tokens of the sequence.
            rank: this rank.
            device: where keys live.
        """
        tokens = [index[index < total_seqlen] for index in global_index]
        num_keys = tuple(len(own) for own in tokens)
        width = -(-max(*num_keys, 1) // _BITS) * _BITS
        place, token = np.empty(total_seqlen, np.int64), np.full((len(tokens), width), total_seqlen, np.int64)
        for owner, own in enumerate(tokens):
            place[own] = owner * width + np.arange(len(own))
            token[owner, : len(own)] = own
        return cls(rank, num_keys, width, *upload([place, token], device))

    @property
    def num_ranks(self) -> int:
        """Ranks that hold keys."""
        return len(self.num_keys)

    @property
    def num_tokens(self) -> int:
        """Of the sequence."""
        return self.place.shape[0]

    @property
    def num_own(self) -> int:
        """Tokens of this rank."""
        return self.num_keys[self.rank]

    def others(self, x: Tensor, dim: int = 0) -> Tensor:
        """What lies along ``dim`` for the other ranks."""
        after = self.num_ranks - self.rank - 1
        return torch.cat([x.narrow(dim, 0, self.rank), x.narrow(dim, self.rank + 1, after)], dim)


class Requests(NamedTuple):
    """Rows that ranks have asked each other for; ``lists`` is the number of selections, 1 or one for each key head.

    Attributes:
        places: which rank holds which tokens.
        capacity: rows that a rank gets of each other.
        rows: own rows to send, as ``row * lists + list``, int64 ``[num_ranks - 1, capacity, lists]``. Places that were
            not asked for hold other rows, whose gradients are 0.
        source: where each token lies in the rows of `fetch`, int64 ``[lists, total_seqlen]``; -1 where it is not
            selected.
        fetched: tokens of the rows that are received, int64 ``[lists, (num_ranks - 1) * capacity]``; ``total_seqlen``
            where there is none.
        most: rows that any rank selects of another, int32 ``[]``, the same on all ranks; None where it was not
            exchanged, as they cannot exceed the capacity.
    """

    places: KeyPlaces
    capacity: int
    rows: Tensor
    source: Tensor
    fetched: Tensor
    most: Tensor | None

    @property
    def num_lists(self) -> int:
        """Selections."""
        return self.source.shape[0]


def exchange_requests(
    selected: Tensor, places: KeyPlaces, capacity: int, group: dist.ProcessGroup | None, may_overflow: bool
) -> Requests:
    """Tells each rank which of its rows this rank selects. Collective: ``width / 8`` bytes for each list and rank.

    Args:
        selected: bool ``[lists, total_seqlen]``; rows of this rank count too.
        places: which rank holds which tokens.
        capacity: rows of a buffer, at least 1, the same on all ranks.
        group: the ranks, two or more.
        may_overflow: whether a rank may select more rows of another, so that the number is exchanged.
    """
    lists, num_ranks = selected.shape[0], places.num_ranks
    marked = torch.nn.functional.pad(selected, (0, 1))[:, places.token]
    number = marked.cumsum(-1, dtype=torch.int32)  # of each marked row of an owner, from 1 on
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=selected.device)
    bits = (marked.unflatten(-1, (-1, _BITS)).to(torch.uint8) << shifts).sum(-1, dtype=torch.uint8)
    send = places.others(bits, 1).transpose(0, 1).flatten(1)
    if may_overflow:
        own_most = places.others(number[..., -1], 1).amax().view(1)
        send = torch.cat([send, own_most.view(torch.uint8).expand(num_ranks - 1, -1)], 1)
    received = torch.empty_like(send, memory_format=torch.contiguous_format)
    _all_to_all(received, send.contiguous(), 1, places, group)
    most = None
    if may_overflow:
        of_others = received[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.int32)
        most = torch.maximum(of_others.amax(), own_most[0])
        received = received[:, :-4]
    asked = (received.unflatten(1, (lists, -1, 1)) >> shifts & 1).flatten(2).bool()
    order, _ = _compacted(asked, capacity)
    rows = order.remainder(max(places.num_own, 1)).transpose(1, 2) * lists
    rows = rows + torch.arange(lists, device=rows.device)
    return Requests(places, capacity, rows, *_arrivals(selected, marked, number, places, capacity), most)


def _arrivals(
    selected: Tensor, marked: Tensor, number: Tensor, places: KeyPlaces, capacity: int
) -> tuple[Tensor, Tensor]:
    """``source`` and ``fetched`` of `Requests`."""
    owner = torch.arange(places.num_ranks, device=selected.device)
    first = places.num_own + (owner - (owner > places.rank).long()) * capacity
    at = first[:, None] + (number.long() - 1).clamp(0, capacity - 1)
    at[:, places.rank] = torch.arange(places.width, device=selected.device)
    source = at.flatten(1)[:, places.place].masked_fill(~selected, -1)
    order, count = _compacted(places.others(marked, 1), capacity)
    tokens = places.others(places.token).expand(len(selected), -1, -1).gather(2, order.remainder(places.width))
    is_none = torch.arange(capacity, device=selected.device) >= count[..., None]
    return source, tokens.masked_fill(is_none, places.num_tokens).flatten(1)


def _compacted(marked: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Positions that are marked along the last dimension, in order, int64 ``[..., capacity]``, and their number.

    Positions after these are spread, so that what is added to them does not wait for each other.
    """
    number = marked.cumsum(-1)
    width = marked.shape[-1]
    positions = torch.arange(width, device=marked.device).expand_as(number)
    order = torch.arange(capacity + 1, device=marked.device).expand(*marked.shape[:-1], -1).contiguous()
    to = (number - 1).masked_fill(~marked | (number > capacity), capacity)
    order.scatter_(-1, to, positions)
    return order[..., :capacity], number[..., -1]


def fetch(kv: Tensor, requests: Requests, group: dist.ProcessGroup | None, verify: bool = True) -> Tensor:
    """Own rows and those that were requested. Collective, also backward; differentiable.

    Args:
        kv: rows of this rank's tokens, ``[num_own, num_heads, dim]``; the number of lists is 1 or num_heads.
        requests: of all ranks.
        group: the ranks.
        verify: see `megatron_magi.comm.collective_checks`.

    Returns:
        ``[num_own + (num_ranks - 1) * capacity, num_heads, dim]``: own rows, then those of each other rank. A row of a
        list is that of its head. In the backward gradients are sent in the dtype of ``kv``; a rank adds those of the
        others in their order to its own, in fp32 (fp64), so that sums are bitwise repeatable.
    """
    return _Fetch.apply(kv, requests, group, verify)


class _FetchCall(NamedTuple):
    """What ranks must agree on."""

    operation: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    num_lists: int
    capacity: int
    gradient: bool = False


class _Fetch(torch.autograd.Function):
    """`fetch`."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, requests: Requests, group: dist.ProcessGroup | None, verify: bool) -> Tensor:
        places, capacity = requests.places, requests.capacity
        ctx.requests, ctx.group, ctx.verify = requests, group, verify
        call = _FetchCall("fetch", kv.dtype, kv.shape[1:], requests.num_lists, capacity, ctx.needs_input_grad[0])
        with calls_of(group, places.num_ranks, verify) as calls:
            calls.agree(call)
            num_own = len(kv)
            found = kv.new_empty((num_own + (places.num_ranks - 1) * capacity, *kv.shape[1:]))
            found[:num_own] = kv
            if not num_own:
                found[:1].zero_()  # kernels may load row 0 in the place of absent keys
            rows = kv.contiguous() if num_own else kv.new_zeros((1, *kv.shape[1:]))
            send = rows.view(len(rows) * requests.num_lists, -1).index_select(0, requests.rows.flatten())
            _all_to_all(found[num_own:], send, capacity, places, group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Return.apply(grad, ctx.requests, ctx.group, ctx.verify), None, None, None


class _Return(torch.autograd.Function):
    """Sends gradients of rows to their owners, which add them up: the adjoint of `_Fetch`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, requests: Requests, group: dist.ProcessGroup | None, verify: bool) -> Tensor:
        ctx.requests, ctx.group, ctx.verify = requests, group, verify
        places, capacity, lists = requests.places, requests.capacity, requests.num_lists
        with calls_of(group, places.num_ranks, verify) as calls:
            calls.agree(_FetchCall("fetch backward", grad.dtype, grad.shape[1:], lists, capacity))
            own, send = grad[: places.num_own], grad[places.num_own :].contiguous()
            received = torch.empty_like(send)
            _all_to_all(received, send, capacity, places, group)
        total = own.to(accumulate_dtype(grad.dtype), copy=True, memory_format=torch.contiguous_format)
        if places.num_own:
            flat = total.view(places.num_own * lists, -1)
            parts = received.view(places.num_ranks - 1, capacity * lists, -1)
            for rows, part in zip(requests.rows, parts, strict=True):
                # Of one rank each row comes once, apart from zeros: the order of additions does not matter.
                flat.index_add_(0, rows.flatten(), part.to(flat.dtype))
        return total.to(grad.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return fetch(grad, ctx.requests, ctx.group, ctx.verify), None, None, None


def _all_to_all(received: Tensor, send: Tensor, count: int, places: KeyPlaces, group: dist.ProcessGroup | None) -> None:
    """Exchanges ``count`` rows with each other rank, as bytes; nothing with itself."""
    splits = [count] * places.num_ranks
    splits[places.rank] = 0
    rows = count * (places.num_ranks - 1)
    into, out_of = (x.view(rows, -1).view(torch.uint8) for x in (received, send))
    dist.all_to_all_single(into, out_of, splits, splits, group=group)


class OverflowWatch:
    """Tells the host that rows did not fit, without waiting for the device.

    Calls, also those of replayed CUDA graphs, are counted on the device. The last one whose rows did not fit is copied
    to the host with the number of its rows, as one word; a later call finds it there. Calls that are queued when the
    host finds it copy it again, which the count tells from another.
    """

    @lasting()
    def __init__(self, device: torch.device) -> None:
        self._count, self._last = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._taken = 0

    def note(self, requests: Requests) -> None:
        """Remembers the number of rows that were selected, if there were too many."""
        assert requests.most is not None
        self._count.add_(1)
        most = requests.most.view(1)
        self._last.copy_(torch.where(most > requests.capacity, (self._count << _COUNT_SHIFT) | most, self._last))
        self._seen.copy_(self._last, non_blocking=True)

    def take(self) -> int:
        """The rows that were selected in the last call where they did not fit, as far as the host knows; 0 if there is
        none that was not taken before.
        """
        found = int(self._seen)
        if found <= self._taken:
            return 0
        self._taken = found
        return found & ((1 << _COUNT_SHIFT) - 1)


_watches: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, OverflowWatch]] = WeakKeyDictionary()
"""One for each living group and device, as a call may find what an earlier one with another key has left."""


def watch_of(group: dist.ProcessGroup, device: torch.device) -> OverflowWatch:
    """The watch of a group."""
    found = _watches.setdefault(group, {})
    if device not in found:
        found[device] = OverflowWatch(device)
    return found[device]
