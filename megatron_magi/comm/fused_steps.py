"""group_cast for a kernel that itself waits for rows as they arrive, and group_reduce of its partial results.

Both are steps of a list of calls, prepared once and launched by `Native.queue`. They depend on the transfer only
through numbers, to which the steps refer by name.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.group_collective import choose_mover
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.peer_tables import ROUTE_WORDS
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import WIDEST, can_add
from megatron_magi.comm.slots import sent_shift, slot_row_bytes
from megatron_magi.cuda.arriving import READ_BEHIND, Arriving, StepRows, part_rows
from megatron_magi.cuda.launch_list import Step

_ADD_ROUTE = 2  # index in `PeerTables.routes`
_NUM_CHUNKS = 16  # byte offset in `PeerTables.counts`, whose first entry is the number of fetched rows
_MOST_KNOWN = 64
_OF_GET = {
    "rows": "published", "starts": "published.starts", "num_chunks": "published.num_chunks", "places": "fetch",
    "num_pulled": "fetch.num_rows", "part_rows": "later.part_rows", "num_cleared": "fetch.num_cleared",
}  # fmt: skip
_OF_PUT = {
    "sent": "sums.index", "route": "sums.routes", "rows": "sums.rows", "starts": "sums.starts",
    "order": "sums.sources", "chunk_shift": "sums.shift",
}  # fmt: skip
"""The parameters of the kernels that depend on the transfer, and the names of these numbers."""

_known: WeakKeyDictionary[Native, dict[tuple, Arriving | Step]] = WeakKeyDictionary()
"""Prepared steps, by layout of the rows."""


@torch.no_grad()
def get_step(
    rows: StepRows, args: GroupCastArgs, group: dist.ProcessGroup | None, impl: str
) -> tuple[Native, Arriving] | None:
    """The kernel that publishes and fetches rows; None, on all ranks, if they are transferred otherwise. Collective.

    Args:
        rows: as in `Native.arriving`.
        args, group, impl: as in `megatron_magi.comm.group_collective.group_cast`.
    """
    mover, layout = choose_mover(rows.tensors, args, group, impl)
    if not isinstance(mover, Native):
        return None

    def make() -> Arriving:
        found = mover.arriving(rows, args, layout)
        return found._replace(step=found.step._replace(numbers=_OF_GET))

    found = _prepared(mover, layout, rows, make)
    return mover, found._replace(tensors=rows.into, step=found.step._replace(brings=_get_numbers(args)))


@torch.no_grad()
def put_step(rows: StepRows, args: GroupCastArgs, group: dist.ProcessGroup | None, impl: str) -> Step | None:
    """The kernel that sends partial rows back and adds received ones to ``into``; as `get_step`."""
    mover, layout = choose_mover(rows.tensors, args, group, impl, back=True)
    if not isinstance(mover, Native) or not can_add(layout, rows.into):
        return None

    def make() -> Step:
        return mover.adding(rows, args, layout)._replace(numbers=_OF_PUT)

    found = _prepared(mover, layout, rows, make)
    return found._replace(brings=_put_numbers(args, layout))


def _prepared[Made: (Arriving, Step)](
    mover: Native, layout: RowLayout, rows: StepRows, make: Callable[[], Made]
) -> Made:
    """The result of ``make``, cached for tensors that differ only in addresses and transfers that differ in numbers."""
    known = _known.setdefault(mover, {})
    lie = [(t.dtype, t.stride(), t.data_ptr() % WIDEST) for t in (*rows.tensors, *rows.into)]
    key = (mover.version(), layout, *rows.sources, *rows.places, *lie)
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        found = known[key] = make()
    return found


def _get_numbers(args: GroupCastArgs) -> dict[str, int]:
    """Numbers of the kernel that publishes and pulls rows."""
    assert args.peers is not None
    tables, counts = args.peers, args.peers.counts.data_ptr()
    return {
        "published": tables.published.data_ptr(), "published.starts": tables.starts.data_ptr(),
        "published.num_chunks": counts + _NUM_CHUNKS, "fetch": tables.fetch.data_ptr(), "fetch.num_rows": counts,
        "later.part_rows": part_rows(args.num_recv), "fetch.num_cleared": READ_BEHIND if args.is_static else 0,
    }  # fmt: skip


def _put_numbers(args: GroupCastArgs, layout: RowLayout) -> dict[str, int]:
    """Numbers of the kernel that sends rows back and adds them."""
    assert args.peers is not None and args.most is not None
    index, arrivals = args.recv_position, args.arrivals
    return {
        "sums.index": 0 if index is None else index.data_ptr(),
        "sums.routes": args.peers.routes.data_ptr() + 8 * ROUTE_WORDS * _ADD_ROUTE,
        "sums.rows": arrivals.rows.data_ptr(), "sums.starts": arrivals.starts.data_ptr(),
        "sums.sources": arrivals.sources.data_ptr(), "sums.shift": sent_shift(slot_row_bytes(layout), args.most.sent),
    }  # fmt: skip
