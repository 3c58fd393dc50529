"""Partitions and transfers in C++ (csrc/solver/partition.cpp): equal to the Python functions of the same names.

Only where `cpp_solver.chosen`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import pairwise

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.plan import chunks, cpp_solver
from megatron_magi.plan.partition import Partition, Ranges, Runs
from megatron_magi.plan.types import Dispatch, Transfer
from megatron_magi.runtime.cpp_library import address

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = {
    "magi_needs_begin": (_Pointer, _Int, _Pointer, _Int, _Int, _Int, _Pointer, _Pointer),
    "magi_needs_end": (_Pointer,) * 3,
    "magi_partition_begin": (_Pointer, _Int, _Pointer, _Pointer, _Int, _Pointer, _Pointer),
    "magi_partition_end": (_Pointer,) * 4,
    "magi_exchange_begin": (_Pointer, _Pointer, _Int, _Int, _Pointer, _Pointer, _Pointer),
    "magi_exchange_end": (_Pointer,) * 4,
    "magi_localise_begin": (_Pointer, _Pointer, _Int, _Pointer, _Pointer, _Int, _Int, _Pointer),
    "magi_localise_end": (_Pointer,) * 2,
}


class _Columns(ctypes.Structure):
    _fields_ = [*((name, _Pointer) for name in ("start", "end", "rank", "at")), ("count", _Int)]

    def __init__(self, of: Runs | Ranges) -> None:
        start, end = of.start, of.end
        rank, at = (of.rank, of.local) if isinstance(of, Runs) else (of.dst, of.place)
        self.kept = start, end, rank, at = tuple(map(np.ascontiguousarray, (start, end, rank, at)))
        super().__init__(address(start), address(end), address(rank), address(at), len(start))


@cache
def _library() -> ctypes.CDLL:
    library = cpp_solver.library()
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _Pointer if name.endswith("_begin") else None
    return library


def needed_blocks(
    mask: AttnMask, bounds: np.ndarray, cp_size: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The results of `chunks.chunk_areas` and of `chunks.needed_blocks`."""
    library, bands, num_chunks = _library(), mask.bands, len(bounds) - 1
    areas, counts = np.zeros(num_chunks, dtype=np.int64), np.empty(2, dtype=np.int64)
    bounds = np.ascontiguousarray(bounds)
    limits = chunks.limits_of_blocks(num_chunks, cp_size)
    made = library.magi_needs_begin(
        address(bands), len(bands), address(bounds), num_chunks, *limits, address(areas), address(counts)
    )
    num_needed, group = counts.tolist()
    first, needed = np.empty(num_chunks + 1, dtype=np.int64), np.empty(num_needed, dtype=np.int64)
    library.magi_needs_end(made, address(first), address(needed))
    return areas, (first, needed, np.arange(num_chunks, dtype=np.int64) // group)


def partition(
    mask: AttnMask, dispatch: Dispatch, queries: Runs | None = None
) -> tuple[Partition, tuple[np.ndarray, np.ndarray]]:
    """The results of `partition.partition` and of `partition.areas_by_place`."""
    library, bands, cp_size = _library(), mask.bands, dispatch.cp_size
    runs = Runs.of_chunks(dispatch.chunk_bounds, dispatch.chunk_rank, dispatch.chunk_row)
    queries = runs if queries is None else queries
    totals, counts = np.zeros((3, cp_size), dtype=np.int64), np.empty(2, dtype=np.int64)
    of_keys, of_queries = _Columns(runs), _Columns(queries)
    made = library.magi_partition_begin(
        address(bands), len(bands), ctypes.addressof(of_keys), ctypes.addressof(of_queries), cp_size,
        address(totals), address(counts),
    )  # fmt: skip
    num_pieces, num_ranges = counts.tolist()
    pieces, run = np.empty((num_pieces, 6), dtype=np.int64), np.empty(num_pieces, dtype=np.int64)
    ranges = np.empty((3, num_ranges), dtype=np.int64)
    library.magi_partition_end(made, address(pieces), address(run), address(ranges))
    (dst, start, end), (rows, own, both) = ranges, totals
    length = end - start
    place = np.cumsum(length) - length - (np.cumsum(rows) - rows)[dst]
    return Partition(runs, queries, pieces, run, Ranges(dst, start, end, place), rows), (own, both - own)


def localise(part: Partition, stages: tuple[Ranges, ...], rank: int) -> tuple[np.ndarray, ...]:
    """`partition.localise`."""
    library, num_stages = _library(), len(stages) + 1
    queries, columns = _Columns(part.queries), [_Columns(places) for places in (part.runs, *stages)]
    places, ends = (_Columns * num_stages)(*columns), np.zeros(num_stages, dtype=np.int64)
    made = library.magi_localise_begin(
        address(part.bands), address(part.band_run), len(part.bands), ctypes.addressof(queries),
        ctypes.addressof(places), num_stages, rank, address(ends),
    )  # fmt: skip
    edges = [0, *ends.tolist()]
    bands = np.empty((edges[-1], 6), dtype=np.int64)
    library.magi_localise_end(made, address(bands))
    return tuple(bands[low:high] for low, high in pairwise(edges))


def transfer_of(ranges: Ranges, runs: Runs, rank: int, num_ranks: int) -> Transfer:
    """`transfers.transfer_of`, in one level."""
    library, of_ranges, of_runs = _library(), _Columns(ranges), _Columns(runs)
    splits, most = np.zeros((4, num_ranks), dtype=np.int64), np.zeros(3, dtype=np.int64)
    counts = np.empty(3, dtype=np.int64)
    made = library.magi_exchange_begin(
        ctypes.addressof(of_ranges), ctypes.addressof(of_runs), rank, num_ranks, address(splits), address(most),
        address(counts),
    )  # fmt: skip
    num_sent, num_received, is_out_of_order = counts.tolist()
    arrays = [np.empty(count, dtype=np.int64) for count in (num_sent, num_received, num_received * is_out_of_order)]
    library.magi_exchange_end(made, *(address(array) for array in arrays))
    send_index, owner_rows, order = map(_read_only, arrays)
    sent, received, first_there, first_back = map(tuple, splits.tolist())
    most_rows, most_recv, most_send = most.tolist()
    return Transfer(
        send_index=send_index,
        send_splits=sent,
        recv_splits=received,
        recv_order=order if is_out_of_order else None,
        owner_rows=owner_rows,
        first_there=first_there,
        first_back=first_back,
        most_rows=most_rows,
        most_recv=most_recv,
        most_send=most_send,
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
