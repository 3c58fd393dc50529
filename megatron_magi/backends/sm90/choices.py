"""Chooses the kernels of a pass and their tiles, from shapes and facts of the mask alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.cost import KERNELS

WHOLE_TILE = (128, 64)
"""Keys of a tile, queries of a block, of the kernel that computes dk, dv and possibly dq."""


class MaskFacts(NamedTuple):
    """The facts of a mask that choices between kernels depend on.

    Attributes:
        runs: number of runs of rows with the same structure, such as those of a document.
        area: visible pairs.
        intervals: number of intervals of queries that see a key, on average over the keys that are seen; 1 for masks of
            few slices, where it is not computed.
    """

    runs: int
    area: int
    intervals: float = 1.0


class Problem(NamedTuple):
    """Shape of one pass of attention.

    Attributes:
        num_rows, num_keys: queries and keys.
        num_heads, num_heads_kv: heads of queries; of keys and values.
        dims: head dims (qk, v) of the backward kernels; those of the tensors may be smaller.
        forward_dims: head dims of the forward kernel, likewise.
    """

    num_rows: int
    num_keys: int
    num_heads: int
    num_heads_kv: int
    dims: tuple[int, int]
    forward_dims: tuple[int, int]

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_heads_kv

    @property
    def is_narrow(self) -> bool:
        """Whether the backward has head dim 64, which orders its items differently; see `schedule.make_schedule`."""
        return self.dims[0] == 64


def make_problem(num_rows: int, num_keys: int, num_heads: int, num_heads_kv: int, dims: tuple[int, int]) -> Problem:
    """Shape of a pass over tensors of head dims ``dims``, for which there are kernels."""
    backward, forward = (hopper_kernels.kernel_dims(dims, is_backward) for is_backward in (True, False))
    assert backward is not None and forward is not None, f"head dims {dims}"
    return Problem(num_rows, num_keys, num_heads, num_heads_kv, backward, forward)


class RowTiles(NamedTuple):
    """Tiles of rows over blocks of keys.

    Attributes:
        shape: rows (queries times packed heads) of a tile, keys of a block.
        packed: query heads that share a tile, see `packed_heads`.
    """

    shape: tuple[int, int]
    packed: int


class BackwardChoice(NamedTuple):
    """The kernels of a backward pass.

    Attributes:
        whole: one kernel computes dk, dv and possibly dq; else the head dims need one for dk and dv, and one for dq.
        adds_dq: the first kernel adds dq in device memory; else dq has a kernel of its own.
        shape: keys of a tile and queries of a block of the kernel for dk and dv.
        packed: query heads that share a block.
    """

    whole: bool
    adds_dq: bool
    shape: tuple[int, int]
    packed: int


def packed_heads(facts: MaskFacts, num_rows: int, group: int) -> int:
    """Number of query heads of a group that share a tile or block of queries: 1, 2, 4 or 8.

    The tile then has fewer queries by this factor. Tiles end where runs of rows end, so with short runs, tiles of
    several heads are filled better.
    """
    short = facts.runs > 1 and num_rows < KERNELS.short_rows * facts.runs
    return math.gcd(group, KERNELS.most_packed_heads) if short else 1


def forward_tiles(facts: MaskFacts, problem: Problem) -> RowTiles:
    """Tiles of the forward kernel."""
    packed = packed_heads(facts, problem.num_rows, problem.group)
    return RowTiles(hopper_kernels.forward_tile(problem.forward_dims, facts.area / problem.num_rows, packed), packed)


def row_bytes(problem: Problem) -> int:
    """Bytes of one key and its value, of one head."""
    return 2 * sum(problem.dims)


def heads_together(num_keys: int, num_heads_kv: int, row_bytes: int) -> int:
    """Number of key heads that are processed at the same time: as many as fit in the L2 cache, a divisor of all.

    Args:
        num_keys, num_heads_kv: keys, and heads of keys.
        row_bytes: of one key and its value, of one head.
    """
    together = max(1, min(num_heads_kv, tuning.L2_BYTES // (num_keys * row_bytes)))
    while num_heads_kv % together:
        together -= 1
    return together


def late_blocks(problem: Problem, num_arriving: int, tile: tuple[int, int], products: float = 2.0) -> float:
    """Blocks that an SM can compute until ``num_arriving`` keys have arrived; ``products``: per block."""
    num_bytes = num_arriving * problem.num_heads_kv * row_bytes(problem)
    us = tuning.ARRIVAL_US + num_bytes / tuning.ARRIVAL_BYTES_PER_US
    return us * tuning.SM_FLOP_PER_US / (products * tile[0] * tile[1] * sum(problem.dims))


def backward_choice(facts: MaskFacts, problem: Problem, deterministic: bool) -> BackwardChoice:
    """The kernels of a backward pass."""
    whole = problem.dims in hopper_kernels.WHOLE_DIMS
    shape = WHOLE_TILE if whole else hopper_kernels.PART_TILES[problem.dims]
    packed = packed_heads(facts, problem.num_rows, problem.group)
    adds_dq = whole and not deterministic and sums_pay(facts, problem, packed)
    # Sums of packed heads would not fit in the L2 cache, so heads are not packed if dq is accumulated.
    return BackwardChoice(whole, adds_dq, shape, 1 if adds_dq else packed)


def sums_meet(choices: Sequence[BackwardChoice], problems: Sequence[Problem]) -> bool:
    """Whether backward passes of the same queries over different keys share the sums of dq, and the last one writes dq.

    Otherwise each pass adds its own sums to dq.
    """
    return len(choices) > 1 and all(c.adds_dq for c in choices) and all(p.num_rows and p.num_keys for p in problems)


def query_tiles(problem: Problem, packed: int) -> RowTiles:
    """Tiles of the kernel for dq."""
    return RowTiles((128, hopper_kernels.QUERIES_WIDTH[problem.dims]), packed)


def sums_pay(facts: MaskFacts, problem: Problem, packed: int) -> bool:
    """Whether accumulating dq in memory is faster than a separate kernel for dq, which recomputes the logits.

    It is slower if a query sees few or scattered keys and the fp32 sums, which are written and read at least twice,
    do not fit in the L2 cache. ``packed``: query heads that would share a tile in the separate kernel.
    """
    keys, sum_bytes = facts.area / problem.num_rows, 4 * problem.num_rows * problem.num_heads * problem.dims[0]
    limits = KERNELS.separate_dq_packed if packed > 1 else KERNELS.separate_dq if problem.dims[0] == 128 else ()
    if packed > 1 and facts.intervals >= tuning.SCATTERED_INTERVALS:
        limits = (*limits, tuning.SEPARATE_DQ_SCATTERED)
    return all(sum_bytes < many or keys >= few for many, few in limits)


def most_split(choice: BackwardChoice, problem: Problem, room_bytes: int | None) -> int:
    """Number of tiles of keys that may be split by query head: as many as there is memory for sums of dk and dv.

    Args:
        room_bytes: size of dq, if its memory can hold these sums until dq is written; else None.
    """
    if not choice.adds_dq:
        return 0
    if room_bytes is None and problem.group >= 4:
        return problem.num_keys  # all of them
    tile_bytes = 2 * 4 * WHOLE_TILE[0] * problem.num_heads_kv * problem.dims[0]
    return max(room_bytes or 0, tuning.SMALL_SUMS_BYTES) // tile_bytes


def most_split_at_once(choice: BackwardChoice, problem: Problem, dq_bytes: int) -> int:
    """`most_split` of a backward in one launch: as many as in all stages together, at least what fits in dq."""
    return max(most_split(choice, problem, room) for room in (None, dq_bytes))
