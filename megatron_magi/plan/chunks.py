"""Cutting the sequence into chunks: the granularity at which tokens are distributed over ranks."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd

_CHUNKS_PER_RANK = 32
"""Enough to balance any mix of documents to about 1 %, few enough to plan quickly."""
_MIN_CHUNK = 128
"""Rows of a kernel's query tile: smaller chunks leave tiles partly empty."""
_MAX_CHUNK = 2048
_MAX_NEEDS = 1 << 18
_MAX_CELLS = 1 << 23
_MAX_VISITS = 400_000_000
"""Pairs of a chunk and a block that it needs, of a rank and a block, and ranks looked at for all pairs."""
_FEWEST_CHUNKS_PER_RANK = 4
"""Short sequences: balance matters more than full tiles."""
_MAX_PADDING = 1 << 16
"""Most rows of padding for a rank. More is a mistake in a size; less may be a short batch of a long run."""


class ChunkedMask(NamedTuple):
    """A mask whose tokens, cut into chunks, are to be dealt to ranks.

    Attributes:
        mask: of the whole sequence.
        bounds: of the chunks, int64 ``[num_chunks + 1]``.
        cp_size: number of ranks.
    """

    mask: AttnMask
    bounds: np.ndarray
    cp_size: int


def chunk_bounds(total_seqlen: int, cp_size: int, config: DispatchConfig) -> np.ndarray:
    """Boundaries of the chunks, int64 ``[num_chunks + 1]``, from 0 to the padded length.

    With even shards the number of chunks is a multiple of ``cp_size`` and all are equally
    long; the padding is the smallest that allows it, or ``config.pad_size``. With ``uneven_shard``
    and on one rank the last chunk may be short, so neither needs padding.

    Raises:
        ValueError: a chunk, the alignment or the padding is far longer than a rank's share, or
            shards cannot be even with this padding.
    """
    check_sizes(total_seqlen, cp_size, config)
    if config.uneven_shard:
        return _contiguous(total_seqlen, config.chunk_size or _wanted_chunk(-(-total_seqlen // cp_size)))
    if config.pad_size is not None:
        shard = (total_seqlen + config.pad_size) // cp_size
    else:
        shard = max(1, -(-total_seqlen // cp_size))
        shard = -(-shard // config.alignment) * config.alignment
    if cp_size == 1:
        return _contiguous(shard, config.chunk_size or _wanted_chunk(shard))
    if config.pad_size is not None:
        size = config.chunk_size or _dividing_chunk(shard)
        per_rank = shard // size
    elif config.chunk_size is not None:
        size = config.chunk_size
        per_rank = -(-shard // size)
        while size * per_rank % config.alignment:
            per_rank += 1
    else:
        per_rank, size = _even_chunks(shard, config.alignment)
    return np.arange(cp_size * per_rank + 1, dtype=np.int64) * size


def check_sizes(total_seqlen: int, cp_size: int, config: DispatchConfig) -> None:
    """Raises ValueError if a chunk, the alignment or the padding is out of proportion, or shards cannot be even."""
    what = f"{total_seqlen} tokens over {cp_size} rank(s)"
    most = max(-(-total_seqlen // cp_size), _MAX_PADDING)
    for name, value in (("chunk_size", config.chunk_size), ("alignment", config.alignment)):
        if value is not None and value > most:
            raise ValueError(f"{name}: expected at most {most} for {what}, got {value}")
    pad_size = config.pad_size
    if pad_size is None or (config.uneven_shard and not pad_size):
        return
    if config.uneven_shard:
        raise ValueError(f"pad_size: uneven shards have no padding, got {pad_size}")
    unit = config.alignment * cp_size
    if cp_size > 1 and config.chunk_size is not None:
        what += f" in chunks of {config.chunk_size}"
        unit = math.lcm(config.alignment, config.chunk_size) * cp_size
    if total_seqlen + pad_size == 0 or (total_seqlen + pad_size) % unit:
        need = -total_seqlen % unit if total_seqlen else unit
        raise ValueError(
            f"pad_size: got {pad_size}, but {what} need {need} (or more by a multiple of {unit}); "
            "leave it out to have it computed"
        )
    if pad_size > most * cp_size:
        raise ValueError(f"pad_size: expected at most {most * cp_size} for {what}, got {pad_size}")


def _contiguous(seqlen: int, size: int) -> np.ndarray:
    """Chunks of ``size`` tokens; the last may be shorter."""
    return np.append(np.arange(0, seqlen, size, dtype=np.int64), seqlen)


def _wanted_chunk(shard: int) -> int:
    if shard >= _MIN_CHUNK * _FEWEST_CHUNKS_PER_RANK:
        size = min(max(shard // _CHUNKS_PER_RANK, _MIN_CHUNK), _MAX_CHUNK)
        return size // _MIN_CHUNK * _MIN_CHUNK
    return max(1, shard // _FEWEST_CHUNKS_PER_RANK)


@lru_cache(maxsize=256)  # by lengths alone
def _even_chunks(shard: int, alignment: int) -> tuple[int, int]:
    """``(chunks a rank, chunk size)``: least padding, then whole tiles, then near the wanted size."""
    wanted = shard / _wanted_chunk(shard)
    low, high = max(1, int(wanted / 2)), max(1, int(wanted * 2))
    best = None
    for per_rank in range(low, high + 1):
        size = -(-shard // per_rank)
        while size * per_rank % alignment:
            size += 1
        rank = (size * per_rank - shard, size % _MIN_CHUNK != 0, abs(per_rank - wanted), per_rank, size)
        best = rank if best is None else min(best, rank)
    assert best is not None
    return best[3], best[4]


def _dividing_chunk(shard: int) -> int:
    """A chunk size that divides ``shard``: near the desired one, preferably whole tiles, else the next larger one."""
    low = np.arange(1, math.isqrt(shard) + 1, dtype=np.int64)
    low = low[shard % low == 0]
    size = np.unique(np.concatenate([low, shard // low]))
    wanted = _wanted_chunk(shard)
    size = size[2 * size >= wanted]
    factor = np.maximum(size / wanted, wanted / size)
    is_near = factor <= 2
    return int(size[np.lexsort((factor, is_near & (size % _MIN_CHUNK != 0), ~is_near))[0]])


def chunk_areas(mask: AttnMask, bounds: np.ndarray) -> np.ndarray:
    """Visible (query, key) pairs of the queries of each chunk, int64 ``[num_chunks]``."""
    pieces, chunk = bd.cut_rows(mask.bands, bounds)
    out = np.zeros(len(bounds) - 1, dtype=np.int64)
    np.add.at(out, chunk, bd.areas(pieces))
    return out


def limits_of_blocks(num_chunks: int, cp_size: int) -> tuple[int, int]:
    """Least number of chunks in a block, and most pairs of a chunk and a block that it needs."""
    return -(-num_chunks // (_MAX_CELLS // cp_size + 1)), min(_MAX_NEEDS, _MAX_VISITS // cp_size)


def needed_blocks(mask: AttnMask, bounds: np.ndarray, cp_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which key blocks the queries of each chunk need.

    A block is one chunk, or several adjacent ones to limit the work of counting for ``cp_size`` ranks.

    Returns:
        ``(first, needed, block)``: chunk i needs the blocks ``needed[first[i] : first[i + 1]]``, ascending; and the
        block of each chunk. int64 ``[num_chunks + 1]``, ``[first[-1]]``, ``[num_chunks]``.
    """
    num_chunks = len(bounds) - 1
    pieces, chunk = bd.cut_rows(mask.bands, bounds)
    pieces, index = bd.tighten_with_index(pieces)
    chunk = chunk[index]
    low = np.searchsorted(bounds, pieces[:, bd.K0], side="right") - 1
    high = np.searchsorted(bounds, pieces[:, bd.K1], side="left")
    least, most_needs = limits_of_blocks(num_chunks, cp_size)
    group = max(1, least, -(-int((high - low).sum()) // most_needs))
    merged, owner = bd.merge_ranges(np.stack([low // group, (high - 1) // group + 1], axis=1), chunk)
    i, needed = bd.expand(merged[:, 0], merged[:, 1] - merged[:, 0])
    first = np.searchsorted(owner[i], np.arange(num_chunks + 1))
    return first, needed, np.arange(num_chunks, dtype=np.int64) // group
