"""Work items of the backward kernel and their order: a tile of keys with one or all query heads, or with some query
blocks of one head. SMs take items in this order (persistent scheduling with an atomic counter).

- Long tiles are split by query head. Items of one query head are adjacent, so that they read the same queries and add
  to the same dq while these are in the L2 cache. Each adds its part of dk and dv to fp32 sums, whose memory limits the
  number of split tiles; long tiles beyond it are ordered by key head.
- The longest tiles are also cut into pieces of query blocks; first pieces of all tiles precede second pieces, as more
  queries would otherwise be in use than the L2 cache holds. If a few tiles are much longer than the others, as the
  prompt of a prefix tree, these are cut: while SMs work on them, others would begin with many more heads.
- Tiles that are not split process all query heads of a key head and write dk and dv themselves. If dq is accumulated in
  memory and query heads share key heads, they are ordered by key head: adjacent tiles of a key head share queries and
  should start close together, although SMs drift apart.
- If no tile is split and dq is not accumulated, items are ordered for balance alone, so that no long item runs last.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_magi.backends.sm90 import cpp_tables, tuning
from megatron_magi.backends.tiles import cpp_tiles

_QUERIES, _SLACK = 64, 208  # queries of a block; tolerance in columns for where tiles of one document end
_SPARE_BLOCKS = 16


@dataclass(frozen=True, eq=False)
class Schedule:
    """Work items in the order in which they start.

    Attributes:
        items: int32 ``[num_items, 4]``: tile; first query head | number of query heads << 16; first query block, and
            number of query blocks, 0 for all.
        num_split: the first ``num_split`` tiles are split by query head.
    """

    items: NDArray[np.int32]
    num_split: int


class _Work(NamedTuple):
    """What is divided into items: arguments of `make_schedule`."""

    starts: np.ndarray
    costs: np.ndarray
    heads_kv: int
    group: int
    num_sms: int

    @property
    def first_heads(self) -> range:
        """First query head of each key head."""
        return range(0, self.heads_kv * self.group, self.group)


class _Division(NamedTuple):
    """How tiles are divided.

    Attributes:
        num_long: the first ``num_long`` tiles are long.
        num_split: the first ``num_split`` of them are split by query head.
        width: query heads of an item of a split tile.
        piece, is_cached: see `_piece`; if ``is_cached``, tiles of the last heads are cut too.
        documents: tiles of the documents that are processed in `_sections`.
    """

    num_long: int
    num_split: int
    width: int
    piece: int
    is_cached: bool
    documents: list[np.ndarray]


def differ_in_length(starts: float, ends: float) -> bool:
    """Whether adjacent tiles, whose starts and ends are this many columns apart, differ in their number of blocks."""
    return min(starts, ends) < tuning.SMALL_DRIFT_COLUMNS < max(starts, ends)


def long_tile(starts: float, ends: float) -> int:
    """Blocks from which on a tile is long, if starts and ends of adjacent tiles are this many columns apart."""
    if differ_in_length(starts, ends):
        return tuning.LONG_BLOCKS_UNEVEN
    return tuning.LONG_BLOCKS if min(starts, ends) < tuning.SMALL_DRIFT_COLUMNS else tuning.LONG_BLOCKS_MOVING


def make_schedule(
    starts: np.ndarray, costs: np.ndarray, heads_kv: int, group: int, num_sms: int, *, max_split: int, long_tile: int,
    narrow: bool = False, own: tuple[int, int] | None = None, planner: str = "auto",
) -> Schedule:  # fmt: skip
    """Divides the tiles and heads of a backward pass into work items.

    Args:
        starts: ``[num_tiles]``, first key of each tile of a plan of the transposed mask.
        costs: ``[num_tiles]``, its blocks, in the order of the plan, by decreasing cost.
        heads_kv: key heads.
        group: query heads of a key head.
        num_sms: SMs that take the items in order.
        max_split: most tiles that may be split by query head; 0 also means that dq is not accumulated in memory, so
            that locality matters less.
        long_tile: blocks from which on a tile is long.
        narrow: head dim 64, for which a causal mask of one document is not divided into sections.
        own: where keys are fetched while the kernel runs, the first index of these, and ``lead`` of `local_first`.
        planner: see `cpp_tiles.chosen`; results are equal.
    """
    assert heads_kv * group < 1 << 16 and group < 1 << 15
    if cpp_tiles.chosen(planner):
        of_work = heads_kv, group, num_sms, max_split, long_tile, narrow, *(own or (-1, 0))
        return Schedule(*cpp_tables.schedule(starts, costs, of_work, _QUERIES, _SLACK, _query_bytes(narrow)))
    work = _Work(starts, costs, heads_kv, group, num_sms)
    made = _best_schedule(work, max_split, long_tile, narrow)
    return made if own is None else local_first(made, costs, group, starts < own[0], own[1])


def most_items(
    num_tiles: int, num_rows: int, heads_kv: int, group: int, num_sms: int, max_split: int, narrow: bool
) -> int:
    """Most items of `make_schedule`, whatever the mask, if no tile has more than `_SPARE_BLOCKS` partial blocks.

    Args:
        num_tiles: most tiles.
        num_rows: queries, times the heads of a pack.
        heads_kv, group, num_sms, max_split, narrow: as of `make_schedule`.
    """
    if not max_split:
        return num_tiles * heads_kv
    longest = -(-num_rows // _QUERIES) + _SPARE_BLOCKS
    # Pieces of all tiles of a head besides the first ones: for their length, and for the cache (`_piece`).
    pieces = num_tiles * longest // tuning.PIECE_BLOCKS
    pieces += 2 * num_sms * longest * _QUERIES * _query_bytes(narrow) // tuning.L2_BYTES + 1
    last = num_sms * (longest // tuning.LEAST_PIECE_BLOCKS)  # of `_cut_last`
    pieces = min(heads_kv * group * pieces, 2 * tuning.MOST_PIECES)  # which `_piece` limits too, rounded down
    return heads_kv * group * num_tiles + pieces + last


def _best_schedule(work: _Work, max_split: int, long_tile: int, narrow: bool) -> Schedule:
    """Items ordered for locality, or for balance alone."""
    _, costs, _, group, num_sms = work
    near = _near_schedule(work, max_split, long_tile, narrow)
    if max_split or len(near.items) > tuning.FALLING_COST_MOST_ITEMS * num_sms:
        return near
    items = _section(np.arange(len(costs)), work.first_heads, group)
    orders = near, Schedule(items.astype(np.int32), 0)
    times = [_makespan(_item_costs(order.items, costs, group), num_sms) for order in orders]
    return orders[times[1] < tuning.FALLING_COST_GAIN * times[0]]


def local_first(schedule: Schedule, costs: np.ndarray, group: int, is_own: np.ndarray, lead: int) -> Schedule:
    """Moves items of this rank's own keys, which need not wait, to the front.

    Args:
        costs: as in `make_schedule`.
        group: likewise.
        is_own: bool ``[num_tiles]``, tiles of own keys.
        lead: total blocks of the items to move to the front.
    """
    own = is_own[schedule.items[:, 0]]
    work = np.where(own, _item_costs(schedule.items, costs, group), 0)
    leads = own & (np.cumsum(work) - work < lead)
    return Schedule(schedule.items[np.argsort(~leads, kind="stable")], schedule.num_split)


def _near_schedule(work: _Work, max_split: int, long_tile: int, narrow: bool) -> Schedule:
    """Items ordered for locality: those that share queries are close together."""
    starts, costs, _, group, num_sms = work
    width = 1 if max_split else group
    most = max_split if width < group else len(costs)
    candidates = [long_tile]
    if width < group:
        candidates = list(dict.fromkeys([*candidates, tuning.LONG_BLOCKS_UNEVEN, 1]))
    may_have_documents = width < group and long_tile == tuning.LONG_BLOCKS_UNEVEN
    documents = _documents(np.argsort(starts, kind="stable"), starts, costs) if may_have_documents else []
    if narrow and len(documents) == 1:
        documents = []
    piece, is_cached = _piece(work, long_tile, bool(documents), narrow) if width < group else (0, False)
    if piece:
        documents = []
    best, shortest = None, float("inf")
    for least in candidates:
        num_long = _num_long(costs, least)
        schedule = _schedule(work, _Division(num_long, min(most, num_long), width, piece, is_cached, documents))
        if len(candidates) == 1 or (best is None and len(schedule.items) > tuning.ENOUGH_ITEMS * num_sms):
            return schedule
        of_items = _item_costs(schedule.items, costs, group)
        time = _makespan(of_items, num_sms)
        if time < 0.98 * shortest:
            best, shortest = schedule, time
        if shortest * num_sms <= tuning.BALANCED * int(of_items.sum()):
            break
    assert best is not None
    return best


def _num_long(costs: np.ndarray, least: int) -> int:
    """Number of tiles of at least ``least`` blocks."""
    less = np.flatnonzero(costs < least)
    return int(less[0]) if len(less) else len(costs)


def _piece(work: _Work, long_tile: int, in_sections: bool, narrow: bool) -> tuple[int, bool]:
    """``(blocks of a piece, 0 if no tile is cut; whether tiles are cut for the cache alone)``.

    Tiles are cut if adjacent ones iterate over the same queries; only longer ones if they have the same number of
    blocks, hence run in step, or if so few run together that the L2 cache holds what they read. Tiles of uneven length
    are also cut if one of them takes so long that meanwhile the SMs use the queries of more heads than the cache holds.
    """
    costs = work.costs
    longest, all_blocks = int(costs.max(initial=0)), int(costs.sum())
    limits = {tuning.LONG_BLOCKS_UNEVEN: 5 * tuning.PIECE_BLOCKS // 4, tuning.LONG_BLOCKS: tuning.MOST_BLOCKS_IN_STEP}
    limit = tuning.MOST_BLOCKS_IN_STEP if in_sections else limits.get(long_tile, np.inf)
    piece, is_cached = tuning.PIECE_BLOCKS if longest > limit else 0, False
    if long_tile == tuning.LONG_BLOCKS_UNEVEN and not in_sections and longest:
        # Meanwhile all SMs do num_sms * held blocks, of which a head has as many as all tiles together.
        head_bytes = longest * _QUERIES * _query_bytes(narrow)
        held = tuning.L2_BYTES * all_blocks // (work.num_sms * head_bytes)
        is_cached = longest > 2 * held
        if is_cached:
            held = max(held, tuning.LONG_BLOCKS)
            piece = min(piece or held, held)
    if piece:
        piece = max(piece, all_blocks * work.heads_kv * work.group // tuning.MOST_PIECES)
    return piece, is_cached


def _query_bytes(narrow: bool) -> int:
    """Bytes of a query of one head: q and dout of 16 bits, and the fp32 sums of dq."""
    return (2 + 2 + 4) * (64 if narrow else 128)


def _schedule(work: _Work, division: _Division) -> Schedule:
    """Adjacent tiles follow each other, as they share queries; the last items are sorted by decreasing cost."""
    starts, costs, heads_kv, group, num_sms = work
    num_long, num_split, width, piece, is_cached, documents = division
    place = np.argsort(starts, kind="stable")
    split, short = place[place < num_split], place[place >= num_long]
    unsplit = place[(place >= num_split) & (place < num_long)]
    are_many = width == group and len(place) * heads_kv > tuning.FALLING_COST_MOST_ITEMS * num_sms
    num_last = -(-(tuning.LAST_OF_MANY_ITEMS if are_many else tuning.LAST_ITEMS) * num_sms // heads_kv)
    ends_short = not num_long or (are_many and len(short) >= num_last)
    last = short[:0]
    if ends_short:
        is_last = short >= len(place) - num_last
        short, last = short[~is_last], np.sort(short[is_last])
    heads = range(0, heads_kv * group, width)
    *sections, split = _sections([tiles[tiles < num_split] for tiles in documents], costs) or [split]
    of_one = _pieces(split, costs, width, piece) if piece else _section(split, [0], width)
    of_last = _section(np.sort(split), [0], width)
    if is_cached:
        of_last = of_one[np.argsort(-of_one[:, 3], kind="stable")]
    alone = len(heads) - _heads_together(_blocks(of_last, costs), len(heads), num_sms)
    parts = [_by_head([unsplit], work.first_heads, group), _by_head(sections, heads, width)]
    parts.append((of_one + _of_heads(heads[:alone])).reshape(-1, 4))
    parts.append((of_last[:, None] + _of_heads(heads[alone:])[:, 0]).reshape(-1, 4))
    apart = _by_head([short], work.first_heads, group) if width < group else _section(short, work.first_heads, group)
    of_short = [apart, _section(last, work.first_heads, group)]
    parts = [*parts, *of_short] if ends_short else [*of_short, *parts]
    items = np.concatenate(parts)
    if width < group and num_split == len(place) and not piece:
        items = _cut_last(items, costs, num_sms)
    return Schedule(items.astype(np.int32), num_split if width < group else 0)


def _documents(tiles: np.ndarray, starts: np.ndarray, costs: np.ndarray) -> list[np.ndarray]:
    """Tiles of each causal document, in order of position; empty unless all tiles belong to causal documents."""
    ends, borders, first = (starts[tiles] + _QUERIES * costs[tiles]).tolist(), [], 0
    for i, start in enumerate(starts[tiles].tolist()):
        if abs(ends[i] - ends[first]) > _SLACK:
            if start < ends[i - 1] - _SLACK:
                return []
            borders.append(i)
            first = i
    return np.split(tiles, borders)


def _sections(documents: list[np.ndarray], costs: np.ndarray) -> list[np.ndarray]:
    """Documents with tiles, long ones divided into equal sections, by decreasing cost."""
    runs = []
    for tiles in documents:
        count = -(-len(tiles) // tuning.SECTION_TILES)
        runs += np.array_split(tiles, count) if count > 1 else [tiles][:count]
    if not runs:
        return []
    ends = np.cumsum([len(run) for run in runs])
    work = np.add.reduceat(costs[np.concatenate(runs)], np.append(0, ends[:-1]))
    return [runs[at] for at in np.argsort(-work, kind="stable").tolist()]


def _section(tiles: np.ndarray, first_heads, num_heads: int) -> np.ndarray:
    """Items of some tiles and heads, tile by tile."""
    heads = np.asarray(first_heads, dtype=np.int64) + (num_heads << 16)
    items = np.zeros((len(tiles) * len(heads), 4), dtype=np.int64)
    items[:, 0], items[:, 1] = np.repeat(tiles, len(heads)), np.tile(heads, len(tiles))
    return items


def _by_head(sections: Sequence[np.ndarray], first_heads: Sequence[int], num_heads: int) -> np.ndarray:
    """Items of the tiles of sections, one section after the other, each head by head."""
    heads = np.asarray(first_heads, dtype=np.int64) + (num_heads << 16)
    lengths = np.array([len(tiles) for tiles in sections], dtype=np.int64)
    counts = lengths * len(heads)
    items = np.zeros((int(counts.sum()), 4), dtype=np.int64)
    if len(items):
        begin, length = np.repeat(np.stack([np.cumsum(lengths) - lengths, lengths]), counts, axis=1)
        head, place = np.divmod(np.arange(len(items)) - begin * len(heads), length)
        items[:, 0], items[:, 1] = np.concatenate(sections)[begin + place], heads[head]
    return items


def _pieces(tiles: np.ndarray, costs: np.ndarray, width: int, piece: int) -> np.ndarray:
    """Items of the first query heads, first pieces before second ones; a last piece may be a quarter longer."""
    count, found = np.maximum(1, (costs[tiles] - piece // 4 - 1) // piece + 1), []
    for i in range(count.max(initial=1)):
        some, is_last = tiles[count > i], count[count > i] == i + 1
        items = _section(some, [0], width)
        items[:, 2], items[:, 3] = i * piece, np.where(is_last, costs[some] - i * piece, piece)
        found.append(items)
    return np.concatenate(found)


def _of_heads(heads: Sequence[int]) -> np.ndarray:
    """What is added to items of the first query head to get those of others; ``[num_heads, 1, 4]``."""
    items = np.zeros((len(heads), 1, 4), dtype=np.int64)
    items[:, 0, 1] = heads
    return items


def _cut_last(items: np.ndarray, costs: np.ndarray, num_sms: int) -> np.ndarray:
    """Cuts the last few items, of one query head each, into pieces if all items are of one size.

    Uncut, SMs would idle while some work on the last items: of 4,096 items on 132 SMs, four remain after 31 rounds.
    """
    last, blocks = len(items) % num_sms, int(costs[0])
    if not last or len(items) < num_sms or (costs != blocks).any():
        return items

    def rest(pieces: int) -> int:
        return -(-last * pieces // num_sms) * (-(-blocks // pieces) + tuning.PART_COST_BLOCKS)

    pieces = min(range(1, max(2, blocks // tuning.LEAST_PIECE_BLOCKS + 1)), key=rest)
    if pieces == 1:
        return items
    bounds = np.arange(pieces + 1) * blocks // pieces
    cut = np.repeat(items[-last:], pieces, axis=0)
    cut[:, 2], cut[:, 3] = np.tile(bounds[:-1], last), np.tile(np.diff(bounds), last)
    return np.concatenate([items[:-last], cut])


def _heads_together(costs: np.ndarray, heads: int, num_sms: int) -> int:
    """Heads, or groups, that are processed together at the end, so that no SM has a long tile left alone."""
    if not len(costs):
        return 0
    return min(heads, -(-2 * int(costs[0]) * num_sms // int(costs.sum())))


def _item_costs(items: np.ndarray, costs: np.ndarray, group: int) -> np.ndarray:
    """Cost of each item, in blocks: its blocks and its fixed cost; int64 ``[num_items]``."""
    heads = items[:, 1] >> 16
    return _blocks(items, costs) * heads + np.where(heads < group, tuning.PART_COST_BLOCKS, tuning.ITEM_COST_BLOCKS)


def _blocks(items: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Blocks of each item, for each of its query heads."""
    return np.where(items[:, 3] > 0, items[:, 3], costs[items[:, 0]])


def _makespan(costs: Sequence[int] | np.ndarray, num_sms: int) -> int:
    """Makespan in blocks if each SM takes the next item when it is free."""
    busy = [0] * max(1, num_sms)
    for cost in np.asarray(costs).tolist():
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)


def best_splits(costs: Sequence[int] | np.ndarray, num_heads_kv: int, group: int, num_sms: int) -> int:
    """Splits of the query heads of a group in the backward in parts; ``costs``: blocks of each tile."""
    costs, num_sms = np.asarray(costs).tolist(), max(1, num_sms)
    makespan = cpp_tiles.makespan if cpp_tiles.available() else _makespan
    best, shortest = 1, float("inf")
    for splits in (n for n in range(1, group + 1) if group % n == 0):
        extra = tuning.WHOLE_COST_BLOCKS if splits == 1 else tuning.SPLIT_COST_BLOCKS
        items = [c * (group // splits) + extra for c in costs for _ in range(num_heads_kv * splits)]
        if len(items) > tuning.ENOUGH_ITEMS * num_sms:
            return best
        time = makespan(items, num_sms)
        if time < 0.98 * shortest:
            best, shortest = splits, time
    return best
