"""Masks as tensors: what is copied to the host when, and that a changed tensor is a changed mask."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_magi.mask import AttnMask
from megatron_magi.ops import mask_tensors
from megatron_magi.ops.mask_tensors import DeviceRanges, bands_of

ROWS = [(0, 4, 0, 4, 1), (4, 9, 0, 7, 0), (4, 9, 7, 10, 3)]
MASK = AttnMask(ROWS, 10, 11)


def range_tensors(rows=ROWS, dtype=torch.int32, device="cpu"):
    table = torch.tensor(rows, dtype=dtype, device=device)
    return [table[:, :2].contiguous(), table[:, 2:4].contiguous(), table[:, 4].contiguous()]


@pytest.fixture
def copies(monkeypatch):
    """One entry for each copy to the host; tensors are taken for those of a device."""
    made = []
    to_host = mask_tensors._to_host
    monkeypatch.setattr(mask_tensors, "_to_host", lambda tensors: made.append(len(tensors)) or to_host(tensors))
    device_ranges = DeviceRanges()
    monkeypatch.setattr(mask_tensors, "mask_of_ranges", lambda *args: device_ranges.ranges(*args).mask)
    return made


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_all_forms_give_the_same_bands(dtype):
    forms = [range_tensors(dtype=dtype), [torch.from_numpy(MASK.packed)], [torch.from_numpy(np.array(MASK.bands))]]
    for form in forms:
        assert np.array_equal(bands_of(form, 10, 11), MASK.bands)


@pytest.mark.parametrize("num_slices", [0, 1, 64, 65, 600])
def test_packed_masks_are_unpacked_as_they_were(num_slices):
    mask = AttnMask([(i, i + 1, 0, i, 0) for i in range(num_slices)], 600)
    assert len(mask.packed) in (65, 513, 4097)
    mask_tensors._masks.drop(lambda _: True)
    assert np.array_equal(bands_of([torch.from_numpy(mask.packed)], 600, 600), mask.bands)


def test_a_packed_mask_of_other_lengths_is_refused():
    with pytest.raises(ValueError, match="mask_or_bands: the mask is not over 11 x 11 tokens"):
        bands_of([torch.from_numpy(MASK.packed)], 11, 11)


def test_layers_share_one_copy(copies):
    ranges = range_tensors()
    masks = [mask_tensors.mask_of_ranges(ranges, 10, 11) for _ in range(5)]
    assert masks[0] == MASK and all(mask is masks[0] for mask in masks)
    assert copies == [3]
    assert mask_tensors.mask_of_ranges(ranges[:2], 10, 11).table[:, 4].tolist() == [0, 0, 0]
    assert copies == [3, 2]


def test_other_objects_for_the_same_memory_are_known_again(copies):
    ranges = range_tensors()
    mask = mask_tensors.mask_of_ranges(ranges, 10, 11)
    assert mask_tensors.mask_of_ranges([t.detach() for t in ranges], 10, 11) is mask
    assert mask_tensors.mask_of_ranges([t.view(t.shape) for t in ranges], 10, 11) is mask
    assert len(copies) == 1


def test_a_change_in_place_is_noticed(copies):
    ranges = range_tensors()
    mask_tensors.mask_of_ranges(ranges, 10, 11)
    ranges[0][0, 1] = 3
    assert mask_tensors.mask_of_ranges(ranges, 10, 11).table[0].tolist() == [0, 3, 0, 4, 1]
    ranges[2].zero_()
    assert mask_tensors.mask_of_ranges(ranges, 10, 11).table[:, 4].tolist() == [0, 0, 0]
    assert len(copies) == 3


def test_a_view_of_other_elements_is_another_tensor(copies):
    table = torch.tensor([[0, 4], [4, 9], [9, 10]])
    first, last = table[:2], table[1:]
    keys = torch.tensor([[0, 4], [4, 9]])
    assert mask_tensors.mask_of_ranges([first, keys], 10, 11).table[0, 0] == 0
    assert mask_tensors.mask_of_ranges([last, keys], 10, 11).table[0, 0] == 4
    assert mask_tensors.mask_of_ranges([table[:2].flip(0), keys], 10, 11).table[0, 0] == 4
    square = torch.tensor([[0, 2], [3, 9]])
    assert mask_tensors.mask_of_ranges([square, keys], 10, 11).table[0, 1] == 2
    assert mask_tensors.mask_of_ranges([square.T, keys], 10, 11).table[0, 1] == 3


def test_memory_that_is_used_again_is_another_tensor(copies):
    for start in range(200):
        # Tensors of one size, freed and made again: addresses repeat.
        ranges = [torch.tensor([[start % 7, 9]]) for _ in range(2)]
        assert mask_tensors.mask_of_ranges(ranges, 10, 11).table[0].tolist() == [start % 7, 9, start % 7, 9, 0]
        del ranges
    gc.collect()
    assert len(copies) == 200


def test_other_numbers_of_tokens_are_another_mask(copies):
    ranges = range_tensors()
    assert mask_tensors.mask_of_ranges(ranges, 10, 11) != mask_tensors.mask_of_ranges(ranges, 12, 11)
    with pytest.raises(ValueError, match=r"k_range of slice 2"):
        mask_tensors.mask_of_ranges(ranges, 10, 9)


def test_tensors_of_inference_mode_are_copied_each_time(copies):
    with torch.inference_mode():
        ranges = range_tensors()
        mask_tensors.mask_of_ranges(ranges, 10, 11)
        ranges[0][0, 1] = 3
        assert mask_tensors.mask_of_ranges(ranges, 10, 11).table[0, 1] == 3
    assert len(copies) == 2


def test_tensors_of_the_host_are_read_each_time():
    array = np.array([[0, 4], [4, 9]])
    ranges = [torch.from_numpy(array)] * 2
    assert mask_tensors.mask_of_ranges(ranges, 10, 11).table[0, 1] == 4
    array[0, 1] = 3  # unseen by torch
    assert mask_tensors.mask_of_ranges(ranges, 10, 11).table[0, 1] == 3


@pytest.mark.parametrize("bad", [torch.zeros(2, 2), torch.zeros(2, 2).bfloat16(), torch.zeros(2, 3, dtype=torch.int32)])
@pytest.mark.parametrize("on_device", [False, True])
def test_wrong_tensors_are_named_wherever_they_are(bad, on_device):
    ranges_of = DeviceRanges().ranges if on_device else mask_tensors.ranges_of_tensors
    with pytest.raises(ValueError, match=r"k_ranges: expected (integers|shape)"):
        ranges_of([torch.zeros(2, 2, dtype=torch.int32, device=bad.device), bad], 10, 11)


def test_the_cache_is_bounded_and_keeps_no_tensor_alive(copies):
    cache = DeviceRanges(max_items=4)
    for _ in range(10):
        ranges = range_tensors()
        cache.ranges(ranges, 10, 11)
        memory = StorageWeakRef(ranges[0].untyped_storage())
        del ranges
        assert memory.expired()
    assert len(cache._ranges) == 4


@pytest.mark.gpu
def test_ranges_on_a_gpu_are_copied_once_for_many_calls(monkeypatch):
    made, to_host = [], mask_tensors._to_host
    monkeypatch.setattr(mask_tensors, "_to_host", lambda tensors: made.append(1) or to_host(tensors))
    ranges = range_tensors(device="cuda")
    for _ in range(3):
        assert mask_tensors.mask_of_ranges(ranges, 10, 11) == MASK
    ranges[0][0, 1] = 3
    assert mask_tensors.mask_of_ranges(ranges, 10, 11).table[0, 1] == 3
    assert len(made) == 2
