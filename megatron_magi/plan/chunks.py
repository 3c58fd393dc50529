"""Cutting the sequence into chunks: the grain at which tokens are spread over ranks."""

from __future__ import annotations

import numpy as np

from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd

_CHUNKS_PER_RANK = 32
"""Enough grains to balance any mix of documents to about 1 %, few enough to plan quickly."""
_MIN_CHUNK = 128
"""Rows of a kernel's query tile: smaller chunks leave tiles partly empty."""
_MAX_CHUNK = 2048
_MAX_NEEDS = 1 << 18
_MAX_CELLS = 1 << 23
_MAX_VISITS = 400_000_000
"""Pairs of a chunk and a block that it needs, of a rank and a block, and ranks looked at for all pairs."""
_FEWEST_CHUNKS_PER_RANK = 4
"""Short sequences: balance matters more than full tiles."""


def chunk_bounds(total_seqlen: int, cp_size: int, config: DispatchConfig) -> np.ndarray:
    """Boundaries of the chunks, int64 ``[num_chunks + 1]``, from 0 to the padded length.

    With even shards the number of chunks is a multiple of ``cp_size`` and all are equally
    long; the padding is the smallest that allows it. With ``uneven_shard`` there is no padding
    and the last chunk may be short.
    """
    if config.uneven_shard:
        size = config.chunk_size or _wanted_chunk(-(-total_seqlen // cp_size))
        return np.append(np.arange(0, total_seqlen, size, dtype=np.int64), total_seqlen)
    if config.chunk_size is not None:
        size = config.chunk_size
        per_rank = max(1, -(-total_seqlen // (size * cp_size)))
        while size * per_rank % config.alignment:
            per_rank += 1
    else:
        shard = max(1, -(-total_seqlen // cp_size))
        shard = -(-shard // config.alignment) * config.alignment
        per_rank, size = _even_chunks(shard, config.alignment)
    return np.arange(cp_size * per_rank + 1, dtype=np.int64) * size


def _wanted_chunk(shard: int) -> int:
    if shard >= _MIN_CHUNK * _FEWEST_CHUNKS_PER_RANK:
        size = min(max(shard // _CHUNKS_PER_RANK, _MIN_CHUNK), _MAX_CHUNK)
        return size // _MIN_CHUNK * _MIN_CHUNK
    return max(1, shard // _FEWEST_CHUNKS_PER_RANK)


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


def chunk_areas(mask: AttnMask, bounds: np.ndarray) -> np.ndarray:
    """Visible (query, key) pairs of the queries of each chunk, int64 ``[num_chunks]``."""
    pieces, chunk = bd.cut_rows(mask.bands, bounds)
    out = np.zeros(len(bounds) - 1, dtype=np.int64)
    np.add.at(out, chunk, bd.areas(pieces))
    return out


def needed_blocks(mask: AttnMask, bounds: np.ndarray, cp_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which key blocks the queries of each chunk need.

    A block is one chunk, or several neighbouring ones where there is much to count for ``cp_size`` ranks.

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
    most_needs = min(_MAX_NEEDS, _MAX_VISITS // cp_size)
    group = max(1, -(-num_chunks // (_MAX_CELLS // cp_size + 1)), -(-int((high - low).sum()) // most_needs))
    merged, owner = bd.merge_ranges(np.stack([low // group, (high - 1) // group + 1], axis=1), chunk)
    i, needed = bd.expand(merged[:, 0], merged[:, 1] - merged[:, 0])
    first = np.searchsorted(owner[i], np.arange(num_chunks + 1))
    return first, needed, np.arange(num_chunks, dtype=np.int64) // group
