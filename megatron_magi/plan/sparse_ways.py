"""Whether attention over lists fetches the keys of all ranks or the selected ones: what either is predicted to take."""

from __future__ import annotations

from typing import NamedTuple

from megatron_magi.cost_model import Rates

_LIST_PASSES = 4
"""Reads and writes of the lists, to find the keys that they name and to renumber them."""
_KEY_BYTES = 40
"""Bytes that are read and written for a key of the sequence and a list, to number what is selected."""


class SparseShape(NamedTuple):
    """What decides; numbers that the host knows without reading a list, the same on all ranks.

    Attributes:
        num_ranks: ranks.
        num_keys: tokens of the sequence.
        longest: the most that a rank holds.
        capacity: rows that a rank receives of each other, if it fetches what is selected.
        row_bytes: bytes of a row of k and v.
        num_lists: 1, or key heads with lists of their own.
        list_bytes: bytes of the lists of a rank.
        copies: whether fetched rows are copied to blocks: lists of blocks.
    """

    num_ranks: int
    num_keys: int
    longest: int
    capacity: int
    row_bytes: int
    num_lists: int
    list_bytes: int
    copies: bool


class WaysUs(NamedTuple):
    """Microseconds of a forward and a backward to get keys and return gradients, by either way."""

    all_keys: float
    selected: float


def ways_us(shape: SparseShape, rates: Rates) -> WaysUs:
    """Predicts both ways; attention itself takes the same time.

    All keys: gathered once, copied to the order of the sequence; gradients zeroed, copied back and summed. Selected
    ones: bits are exchanged, lists renumbered; rows packed, exchanged, and for blocks copied; gradients likewise,
    and added in fp32. The host issues that as it does a remote stage, which is an assumption.
    """
    whole, others = shape.num_keys * shape.row_bytes, shape.num_ranks - 1
    moved = max(0, shape.num_keys - shape.longest) * shape.row_bytes
    gathered = 2 * (_transfer_us(moved, shape.num_ranks, rates)) + _memory_us(5 * whole, rates)
    packed = others * shape.capacity * shape.row_bytes
    bits = others * shape.num_lists * shape.longest / 8
    prepared = _LIST_PASSES * shape.list_bytes + _KEY_BYTES * shape.num_lists * shape.num_keys
    copied = 4 * (packed + shape.longest * shape.row_bytes) if shape.copies else 0
    selected = (
        _transfer_us(bits, shape.num_ranks, rates)
        + 2 * _transfer_us(packed, shape.num_ranks, rates)
        # Packed, and added to fp32 sums that are read and written.
        + _memory_us(prepared + 2 * packed + 5 * packed + copied + 2 * shape.longest * shape.row_bytes, rates)
        + rates.host_stage_forward_us
    )
    return WaysUs(gathered, selected)


def _transfer_us(num_bytes: float, num_ranks: int, rates: Rates) -> float:
    """Microseconds of an exchange in which a rank gets so many bytes from all others, the same from each."""
    near = min(num_ranks, rates.ranks_per_node) - 1
    far = num_ranks - 1 - near
    of_each = num_bytes / (num_ranks - 1)
    inside = rates.collective_us + near * of_each / (rates.gbytes_per_s * 1e3)
    if not far:
        return inside
    return max(inside, rates.far_collective_us + far * of_each / (rates.far_gbytes_per_s * 1e3))


def _memory_us(num_bytes: float, rates: Rates) -> float:
    return num_bytes / (rates.memory_gbytes_per_s * 1e3)
