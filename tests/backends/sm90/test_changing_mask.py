"""Tables of masks that change in place, made while uploads wait for each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.backends.base import MaskSize, copy_tables
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.changing_mask import StaticMask, StaticMemory, _parts
from megatron_magi.backends.sm90.plan import Tiling, device_plan, make_host_plan, schedule_of
from megatron_magi.backends.sm90.schedule import most_items
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask import bands as bd
from megatron_magi.runtime import upload as upload_module
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import together

CPU = torch.device("cpu")
BANDS = np.array([[0, 130, 0, 150, -bd.NO_DIAGONAL, 21], [130, 300, 150, 400, -64, 64]], dtype=np.int64)
BACKWARD = Tiling(True, 400, (128, 64))
KEY = (2, 2, 132, 1, False)


class LaterBlock(upload_module._Block):
    """On a device of its own, as a GPU's memory is: what is there before the copy is nonsense."""

    def _begin(self) -> None:
        super()._begin()
        self._memory.fill_(255)
        self._staging = torch.empty(self.room, dtype=torch.uint8)


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setattr(upload_module, "_Block", LaterBlock)
    monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 20, 8))


@pytest.mark.usefixtures("waiting")
def test_tables_are_copied_to_their_places_once_the_upload_is_there():
    bands = BANDS.copy()
    mask = StaticMask([MaskSize(bands, 400, 300)], 300, 400, CPU, StaticMemory(CPU), 1.5)
    forward = Tiling(False, 300, (128, 128))
    with together(CPU):
        plans = {tiling: mask.plan(tiling, lambda _, same=tiling: same) for tiling in (forward, BACKWARD)}
        made = schedule_of(plans[BACKWARD], *KEY)
    for tiling, plan in plans.items():
        host = make_host_plan(bands, tiling)
        of_mask = torch.from_numpy(np.array(host.table))
        bounds = [offset // 4 for offset in host.offsets[1:]]
        for part, expected in zip(_parts(plan), of_mask.tensor_split(bounds), strict=True):
            assert torch.equal(part[: len(expected)], expected)
    items = make_host_plan(bands, BACKWARD).schedule(*KEY).items
    np.testing.assert_array_equal(made.items[: len(items)].numpy(), items)
    assert schedule_of(plans[BACKWARD], *KEY) is made


@pytest.mark.usefixtures("waiting")
def test_a_schedule_that_is_not_there_yet_is_not_given_to_other_threads():
    known = device_plan(BANDS.copy(), BACKWARD, CPU)
    with together(CPU):
        made = schedule_of(known, *KEY)
        assert not known.schedules
    assert known.schedules == {KEY: made} and schedule_of(known, *KEY) is made


TOTAL = 1 << 15
FORWARDS = [Tiling(False, TOTAL, (128, 128)), Tiling(False, TOTAL, (128, 128), 4), Tiling(False, TOTAL, (192, 64))]
BACKWARDS = [Tiling(True, TOTAL, (128, 64)), Tiling(True, TOTAL, (128, 64), 4)]
KEYS = [(8, 4, 132, 300, False), (8, 4, 132, 0, False), (2, 1, 132, 300, True)]


def static_mask(first: AttnMask, headroom: float) -> StaticMask:
    """With tables of many kinds."""
    num_rows = first.total_seqlen_q
    sizes = [MaskSize(first.bands, num_rows, num_rows)]
    mask = StaticMask(sizes, num_rows, num_rows, CPU, StaticMemory(CPU), headroom)
    for tiling in (*FORWARDS, *BACKWARDS):
        plan = mask.plan(tiling, lambda _, same=tiling: same)
        for key in KEYS if tiling.is_backward else ():
            schedule_of(plan, *key)
    return mask


def test_tables_that_are_made_in_inference_mode_can_be_loaded_outside_of_it(monkeypatch):
    monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 20, 8))
    with torch.inference_mode():
        mask = static_mask(builders.causal(TOTAL), 1.5)
    copy_tables(mask.take(MaskSize(builders.sliding_window(TOTAL, 300, 0).bands, TOTAL, TOTAL), 1))
    mask.memory.send()


def lengths(rng: np.random.Generator, count: int) -> list[int]:
    cuts = np.sort(rng.choice(np.arange(1, TOTAL), count - 1, replace=False))
    return np.diff(cuts, prepend=0, append=TOTAL).tolist()


def random_tree(rng: np.random.Generator, count: int) -> AttnMask:
    """Each node follows one before it, or begins a tree; nodes in the order of a walk."""
    parents = [-1, *(int(rng.integers(-1, i)) for i in range(1, count))]
    paths = [[0]]
    for i in range(1, count):
        paths.append([*(paths[parents[i]] if parents[i] >= 0 else []), i])
    order = sorted(range(count), key=lambda i: paths[i])
    place = {node: i for i, node in enumerate(order)}
    return builders.prefix_tree(lengths(rng, count), [[place[node] for node in path] for path in paths])[0]


def masks_of(kind: str, rng: np.random.Generator) -> list[AttnMask]:
    """A simple mask of a kind, and others."""
    if kind == "windows":
        return [builders.sliding_window(TOTAL, width, 0) for width in (16, 300, 1000, 4096, TOTAL)]
    if kind == "full documents":
        return [builders.varlen(doc_lengths=lengths(rng, n), causal=False) for n in (200, 40, 8, 2, 1)]
    if kind == "documents":
        return [builders.varlen(doc_lengths=lengths(rng, n)) for n in (200, 40, 8, 2, 1)]
    if kind == "block causal":
        return [builders.block_causal(TOTAL, size) for size in (16, 100, 1000, 8192)]
    return [random_tree(rng, n) for n in (2, 20, 100, 200, 500)]


@pytest.mark.parametrize("kind", ["windows", "full documents", "documents", "block causal", "trees"])
def test_there_is_room_for_masks_of_one_kind(monkeypatch, kind):
    monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30))
    first, *others = masks_of(kind, np.random.default_rng(0))
    mask = static_mask(first, 2.0)
    for other in others:
        assert mask.shortage(MaskSize(other.bands, TOTAL, TOTAL)) is None


def test_where_there_is_no_room_the_headroom_that_would_do_is_known():
    few, many = builders.causal(TOTAL), AttnMask([(0, TOTAL, at, at + 10, 0) for at in range(0, TOTAL, 400)], TOTAL)
    size = MaskSize(many.bands, TOTAL, TOTAL)
    text, headroom = static_mask(few, 1.5).shortage(size)
    assert "there is room for" in text and headroom > 1.5
    assert static_mask(few, headroom).shortage(size) is None
    assert static_mask(few, 0.9 * headroom).shortage(size) is not None


def test_a_first_mask_that_shows_nothing_leaves_room_for_tiles_of_all_rows():
    """As of a stage for which the first batch fetches nothing."""
    nothing, causal = AttnMask([], TOTAL), builders.causal(TOTAL)
    mask = static_mask(nothing, 2.0)
    assert mask.shortage(MaskSize(causal.bands, TOTAL, TOTAL)) is None
    trees = AttnMask([(0, TOTAL, at, at + 10, 0) for at in range(0, TOTAL - 10, 200)], TOTAL)
    text, headroom = mask.shortage(MaskSize(trees.bands, TOTAL, TOTAL))
    assert "there is room for" in text and headroom == np.inf


def test_items_of_long_sequences_take_bounded_memory():
    for tokens in (1 << 17, 1 << 20, 1 << 22):
        most = most_items(tokens // 128, tokens, 8, 4, 132, 300, False)
        assert most <= 32 * (tokens // 128) + (1 << 21) + 132 * tokens // 64
        plan = device_plan(builders.causal(tokens).bands, Tiling(True, tokens, (128, 64)), CPU)
        assert len(schedule_of(plan, 8, 4, 132, 300, False).items) <= most
