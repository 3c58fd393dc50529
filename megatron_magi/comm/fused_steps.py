"""group_cast for a kernel that itself waits for rows as they arrive, and group_reduce of its partial results.

Both are steps of a list of calls, prepared once and launched by `Native.queue`. They depend on the transfer only
through numbers, to which the steps refer by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.group_collective import choose_mover
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.peer_kernels import SHAPES
from megatron_magi.comm.peer_tables import ROUTE_WORDS
from megatron_magi.comm.peers import PEERS
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import SLOT_ROWS, WIDEST, can_add
from megatron_magi.comm.slots import sent_shift, slot_row_bytes
from megatron_magi.cuda.arriving import READ_BEHIND, Arriving, part_rows
from megatron_magi.cuda.launch_list import Place, Step
from megatron_magi.cuda.layout import Like

_ADD_ROUTE = 2  # index in `PeerTables.routes`
_NUM_CHUNKS = 16  # byte offset in `PeerTables.counts`, whose first entry is the number of fetched rows
_MOST_KNOWN = 64
_OF_GET = {
    0: "published", 1: "published.starts", 2: "published.num_chunks", 3: "fetch", 4: "fetch.num_rows",
    7: "later.part_rows", 9: "fetch.num_cleared",
}  # fmt: skip
_OF_PUT = {0: "sums.index", 1: "sums.routes", 2: "sums.rows", 3: "sums.starts", 4: "sums.sources", 5: "sums.shift"}
"""The parameters in `peer_kernels.SHAPES` that depend on the transfer, and their names."""

_known: WeakKeyDictionary[Native, dict[tuple, Arriving | Step]] = WeakKeyDictionary()
"""Prepared steps, by layout of the rows."""


@torch.no_grad()
def get_step(
    tensors: Sequence[Like],
    args: GroupCastArgs,
    group: dist.ProcessGroup | None,
    impl: str,
    into: Sequence[Like],
    sources: Sequence[Place],
    places: tuple[Place, Place],
) -> tuple[Native, Arriving] | None:
    """The kernel that publishes and fetches rows; None, on all ranks, if they are transferred otherwise. Collective.

    Args:
        tensors, args, group, impl: as in `megatron_magi.comm.group_collective.group_cast`.
        into, sources, places: as in `Native.arriving`.
    """
    mover, layout = choose_mover(tensors, args, group, impl)
    if not isinstance(mover, Native):
        return None

    def make() -> Arriving:
        found = mover.arriving(tensors, args, layout, into, sources, places)
        return found._replace(step=_naming(found.step, "get_rows", _OF_GET))

    found = _prepared(mover, layout, (*tensors, *into), (*sources, *places), make)
    return mover, found._replace(tensors=into, step=found.step._replace(brings=_get_numbers(args)))


@torch.no_grad()
def put_step(
    tensors: Sequence[Like],
    args: GroupCastArgs,
    group: dist.ProcessGroup | None,
    impl: str,
    into: Sequence[Like],
    sources: Sequence[Place],
    places: Sequence[Place],
) -> Step | None:
    """The kernel that sends partial rows back and adds received ones to ``into``; as `get_step`."""
    mover, layout = choose_mover(tensors, args, group, impl, back=True)
    if not isinstance(mover, Native) or not can_add(layout, into):
        return None

    def make() -> Step:
        return _naming(mover.adding(tensors, args, layout, into, sources, places), "put_sums", _OF_PUT)

    found = _prepared(mover, layout, (*tensors, *into), (*sources, *places), make)
    return found._replace(brings=_put_numbers(args, layout))


def _prepared[Made: (Arriving, Step)](
    mover: Native, layout: RowLayout, tensors: Sequence[Like], places: Sequence[Place], make: Callable[[], Made]
) -> Made:
    """The result of ``make``, cached for tensors that differ only in addresses and transfers that differ in numbers."""
    known = _known.setdefault(mover, {})
    lie = [(t.dtype, t.stride(), t.data_ptr() % WIDEST) for t in tensors]
    key = (mover.version(), layout, *places, *lie)
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        found = known[key] = make()
    return found


def _naming(step: Step, kernel: str, names: dict[int, str]) -> Step:
    """The step, with names for its 8-byte parameters after the rows."""
    rest = PEERS.size + SHAPES[kernel].num_lists * SLOT_ROWS.size
    return step._replace(numbers={rest + 8 * i: name for i, name in names.items()})


def _get_numbers(args: GroupCastArgs) -> dict[str, int]:
    """Numbers of the kernel that publishes and pulls rows."""
    assert args.peers is not None
    tables, counts = args.peers, args.peers.counts.data_ptr()
    found = (
        tables.published.data_ptr(), tables.starts.data_ptr(), counts + _NUM_CHUNKS, tables.fetch.data_ptr(), counts,
        part_rows(args.num_recv), READ_BEHIND if args.is_static else 0,
    )  # fmt: skip
    return dict(zip(_OF_GET.values(), found, strict=True))


def _put_numbers(args: GroupCastArgs, layout: RowLayout) -> dict[str, int]:
    """Numbers of the kernel that sends rows back and adds them."""
    assert args.peers is not None and args.most is not None
    index, arrivals = args.recv_position, args.arrivals
    found = (
        0 if index is None else index.data_ptr(), args.peers.routes.data_ptr() + 8 * ROUTE_WORDS * _ADD_ROUTE,
        arrivals.rows.data_ptr(), arrivals.starts.data_ptr(), arrivals.sources.data_ptr(),
        sent_shift(slot_row_bytes(layout), args.most[2]),
    )  # fmt: skip
    return dict(zip(_OF_PUT.values(), found, strict=True))
