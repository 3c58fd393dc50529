"""Masks that are sequences of rows and keys one behind the other, as those of packed documents.

The package computes such sequences ("variable lengths") with tiles that begin where a sequence does. Tiles of the whole
lie across the first rows and keys of sequences, and more of them are partly visible.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.mask import bands as bd

_ROWS, _KEYS = 64, 128
"""Of a tile: those of backwards on Hopper, head dims 72 to 128."""
_BLOCK = 0.25
"""Tiles that take as long as a block that is started: of short documents on an H200 (docs/performance_details.md)."""
_SPARE = 128
"""Most rows that the backward's sums in fp32 have more for each sequence; all together at most as many again."""
_MOST_STEPS = 100_000
"""Of one thread of the device, which sorts sequences times key heads in a plan by pairs (read off nvidia-cudnn-frontend
1.32, not timed). About 150 sequences for 8 key heads.
"""


class Sequences(NamedTuple):
    """Sequences of a mask, behind each other in rows and in keys.

    Attributes:
        rows, keys: where they begin, and the end of the last, int32 ``[n + 1]``. The last may be empty, so that ``n``,
            by which tensors of passes have sizes, takes few values.
        longest: at least as many as any has, of rows and of keys.
    """

    rows: np.ndarray
    keys: np.ndarray
    longest: tuple[int, int]


def split(bands: bd.IntArray, num_rows: int, num_keys: int, num_heads_kv: int) -> Sequences | None:
    """The sequences as which a mask is planned; None if it is planned as a whole.

    Args:
        bands: int64 ``[m, 6]``.
        num_rows, num_keys: of the mask.
        num_heads_kv: key heads.

    Returns:
        Sequences of which each has rows and keys, and all keys that its rows see; rows and keys in no pair belong to
        the one before.
    """
    starts = _starts(bd.tighten(bands))
    count = len(starts[0])
    if count < 2 or count**2 * num_heads_kv // 2 > _MOST_STEPS:
        return None
    if count * _SPARE > min(num_rows, num_keys):
        return None
    each = np.append(starts[0], num_rows), np.append(starts[1], num_keys)
    whole = np.array([0, num_rows]), np.array([0, num_keys])
    if _cost(each, each) >= _cost(each, whole):
        return None
    longest = (_KEYS * _most_blocks(each[0]), _KEYS * _most_blocks(each[1]))
    return Sequences(_padded(each[0]), _padded(each[1]), longest)


def local(bands: bd.IntArray, sequences: Sequences) -> bd.IntArray:
    """The bands of the mask, keys counted from the first of their sequence."""
    bands = bd.tighten(bands)
    number = np.searchsorted(sequences.rows, bands[:, bd.Q0], side="right") - 1
    return bd.shift_keys(bands, -sequences.keys[number].astype(np.int64))


def _starts(bands: bd.IntArray) -> tuple[bd.IntArray, bd.IntArray]:
    """First rows and keys of sequences of tight bands, 0 of the first: no band lies in two of them."""
    bands = bands[np.argsort(bands[:, bd.Q0], kind="stable")]
    ends = np.maximum.accumulate(bands[:, [bd.Q1, bd.K1]], axis=0)[:-1]
    first = np.minimum.accumulate(bands[::-1, bd.K0])[::-1]
    begins = 1 + np.flatnonzero((ends[:, 0] <= bands[1:, bd.Q0]) & (ends[:, 1] <= first[1:]))
    return np.append(0, bands[begins, bd.Q0]), np.append(0, first[begins])


def _most_blocks(ends: bd.IntArray) -> int:
    """Blocks of the longest sequence."""
    return int(-(-np.diff(ends).max() // _KEYS))


def _cost(each: tuple[bd.IntArray, bd.IntArray], parts: tuple[bd.IntArray, bd.IntArray]) -> float:
    """Tiles of sequences ``each`` with all their pairs, if they are computed as ``parts``; and the time of blocks.

    The package starts as many blocks for each part as for the longest.
    """
    part, number = bd.expand(np.zeros(len(parts[0]) - 1, dtype=np.int64), -(-np.diff(parts[0]) // _ROWS))
    row = parts[0][part] + _ROWS * number
    last = np.minimum(row + _ROWS, parts[0][part + 1]) - 1
    first, behind = (np.searchsorted(each[0], at, side="right") - 1 for at in (row, last))
    key, past = each[1][first] - parts[1][part], each[1][behind + 1] - parts[1][part]
    blocks = (len(parts[0]) - 1) * (_most_blocks(parts[0]) + _most_blocks(parts[1])) / 2
    return int((-(-past // _KEYS) - key // _KEYS).sum()) + _BLOCK * blocks


def _padded(ends: bd.IntArray) -> np.ndarray:
    """With empty sequences at the end, to one of eight numbers between powers of two."""
    n = len(ends) - 1
    unit = 1 << max(0, n.bit_length() - 4)
    return np.append(ends, np.full(-n % unit, ends[-1])).astype(np.int32)
