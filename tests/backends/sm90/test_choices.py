"""Which kernels a backward takes, by the mask."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi.backends.sm90.choices import backward_choice, make_problem
from megatron_magi.backends.sm90.plan import Tiling, make_host_plan, mask_facts
from megatron_magi.mask import bands as bd
from megatron_magi.mask import builders


def random_blocks(rng, tokens, size, density) -> tuple[np.ndarray, np.ndarray]:
    """Bands of a random mask of blocks, one for each run of blocks of keys; and the mask of blocks."""
    blocks = rng.random((tokens // size, tokens // size)) < density
    steps = np.diff(np.pad(blocks, ((0, 0), (1, 1))).astype(int), axis=1)
    (row, first), (_, past) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    table = np.stack([row, row + 1, first, past], axis=1) * size
    ends = np.full((len(table), 1), bd.NO_DIAGONAL)
    return np.concatenate([table, -ends, ends], axis=1), blocks


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_intervals_of_a_mask_of_blocks_are_those_of_its_columns(density):
    bands, blocks = random_blocks(np.random.default_rng(0), 4096, 64, density)
    begins = blocks & ~np.pad(blocks, ((1, 0), (0, 0)))[:-1]
    assert mask_facts(bands).intervals == pytest.approx(begins.sum() / blocks.any(axis=0).sum())


@pytest.mark.parametrize(
    "mask",
    [builders.causal(8192), builders.varlen(doc_lengths=[100] * 80, causal=True), builders.sliding_window(8192, 1000)],
)
def test_a_key_of_a_mask_in_one_piece_is_seen_by_one_interval_of_queries(mask):
    assert mask_facts(mask.bands).intervals == 1


@pytest.mark.parametrize(
    ("tokens", "density", "heads", "one"),
    [
        (8192, 0.1, (64, 8), False),
        (8192, 0.1, (32, 8), False),
        (8192, 0.1, (16, 8), True),  # few sums
        (8192, 0.1, (24, 24), True),  # no packed heads
        (8192, 0.5, (64, 8), True),  # many keys a query
        (32768, 0.05, (64, 8), False),
    ],
)
def test_dq_of_scattered_blocks_has_a_kernel_of_its_own(tokens, density, heads, one):
    bands, _ = random_blocks(np.random.default_rng(0), tokens, 128, density)
    problem = make_problem(tokens, tokens, *heads, (128, 128))
    assert backward_choice(mask_facts(bands), problem, deterministic=False).adds_dq is one


@pytest.mark.parametrize(
    ("heads_kv", "group", "adds_dq", "by_heads"),
    [(4, 1, True, True), (4, 1, False, False), (4, 4, True, True), (4, 4, False, False)],
)
def test_tiles_that_add_dq_go_head_by_head(heads_kv, group, adds_dq, by_heads):
    mask = builders.sliding_window(8192, 1000, causal=True)  # 18 blocks a tile, fewer than are long for packed groups
    plan = make_host_plan(mask.bands, Tiling(True, 8192, (128, 64)))
    schedule = plan.schedule(heads_kv, group, 1, max_split=4 * adds_dq)
    changes = np.count_nonzero(np.diff(schedule.items[:, 1] & 0xFFFF))
    assert (changes < plan.num_tiles) == by_heads and schedule.num_split == 0
