"""What is kept between calls of the Hopper kernels: launches by layout, passes by mask, what callers remember."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import backward as hopper_backward
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.cuda import driver as hopper_driver
from megatron_magi.cuda import launch as hopper_launch
from megatron_magi.mask import bands as bd
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.runtime.lru import LruCache
from tests.backends.sm90.test_host import tensors


def test_passes_keep_their_plans_and_are_bounded_by_the_memory_of_these(launched, monkeypatch):
    q, k, v, bands = tensors()
    monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30, 1))

    def forward(table):
        hopper.forward(
            ForwardInputs(q, k, v), table, AttnOptions(0.1), ForwardOutput(torch.empty_like(q), torch.zeros(300, 4))
        )
        ((_, launch),) = hopper_launch._launches.items()
        found = hopper._passes.items()[-1][1]
        assert launch.params.tiles == found.plan.memory.data_ptr()
        return found

    first = forward(bands)
    forward(bands[:0])  # whose plan takes the place of the other's
    assert forward(bands) is first and len(hopper._passes) == 2
    hopper._passes.max_bytes = first.plan.memory.nbytes
    other = forward(bands[:, [2, 3, 0, 1, 4, 5]])
    assert hopper._passes.items() == [(hopper._passes.items()[0][0], other)]
    assert forward(bands) is not first


def test_tensors_that_lie_otherwise_are_not_launched_as_those_before(launched):
    """As a hook of saved tensors may give them back: contiguous instead of parts of one tensor."""
    q, k, v, bands = tensors()
    memo, options = {}, AttnOptions(0.1)
    apart = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (q, k, v)]
    for inputs in ((q, k, v), apart, (q, *apart[1:]), (q, k, v)):
        hopper.forward(
            ForwardInputs(*inputs), bands, options, ForwardOutput(torch.empty_like(q), torch.zeros(300, 4)), memo=memo
        )
    # The first call of a layout in a process is not remembered, the second is.
    passes, launches = hopper._passes.items(), hopper_launch._launches.items()
    assert len(passes) == len(launches) == 3 and len(memo) == 1

    memo = {}
    before = len(hopper_launch._launches.items())
    out, lse = torch.empty_like(q), torch.zeros(300, 4)
    for inputs in ((q, k, v), apart, (q, *apart[1:])):
        grads = tuple(torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v))
        hopper.backward(BackwardInputs(*inputs, out, lse, lse), bands, options, Gradients(*grads), memo=memo)
    assert len(memo) == 3 and len(hopper_launch._launches.items()) > before

    memo = {}
    for other in (out, torch.cat([out, out], -1)[..., : out.shape[-1]]):
        hopper.row_delta(out, other, memo)
    assert len(memo) == 2


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_masks_of_other_numbers_of_keys_share_the_launches_of_a_layout(launched, monkeypatch, dims, deterministic):
    """And each call runs with its own mask's numbers, rows in tensor maps included."""
    maps = []
    monkeypatch.setattr(hopper_driver, "tensor_map", lambda t, *_: maps.append(t.shape[0]) or bytes(128))
    seen = []

    def look(kernel, config, _pointers) -> None:
        launch = next(x for _, x in hopper_launch._launches.items() if x._config_address == config)
        blocks = hopper_driver.LaunchConfig.from_address(config).grid[0]
        seen.append(
            (
                kernel.handle,
                blocks,
                *(getattr(launch.params, f, 0) for f in ("tiles", "num_tiles", "num_items")),
                [r for r in launch._map_rows if r != 300],
            )
        )

    monkeypatch.setattr(hopper_driver.Kernel, "launch", look)
    options, made = AttnOptions(0.1, deterministic=deterministic), {}

    def step(num_keys: int) -> list:
        q, k, v, _ = tensors(dims=dims)
        k, v = k[:num_keys].contiguous(), v[:num_keys].contiguous()
        bands = np.array([[0, 300, 0, num_keys, -bd.NO_DIAGONAL, bd.NO_DIAGONAL]], dtype=np.int64)
        out, lse = torch.empty(300, 4, dims[1]).bfloat16(), torch.zeros(300, 4)
        memos = made.setdefault(num_keys, ({}, {}))
        seen.clear()
        hopper.forward(ForwardInputs(q, k, v), bands, options, ForwardOutput(out, lse), memo=memos[0])
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        hopper.backward(BackwardInputs(q, k, v, out, lse, lse), bands, options, Gradients(*grads), memo=memos[1])
        return list(seen)

    first = step(200)
    num_launches = len(hopper_launch._launches)
    second, encoded = step(120), len(maps)
    assert len(hopper_launch._launches) == num_launches
    for a, b in zip(first, second, strict=True):
        if a[0] in ("forward", "backward", "backward_keys", "backward_queries"):
            assert a[2] != b[2] and (a[5], b[5]) == ([200, 200], [120, 120]), a[0]
    assert [step(200), step(120), step(200)] == [first, second, first], "with or without what was remembered"
    assert len(maps) > encoded
    encoded = len(maps)
    assert step(200) == first and len(maps) == encoded, "nothing is encoded for the mask that was there before"


def test_what_is_remembered_is_not_used_where_a_tensor_begins_elsewhere(launched):
    """Gradients and inputs that do not begin at 16 bytes, or lie otherwise."""
    q, k, v, bands = tensors()
    storage, row, memo = torch.zeros(300 * 4 * 128 + 8).bfloat16(), torch.zeros(300, 4), {}
    options = AttnOptions(0.1)

    def is_direct(dout, dq) -> bool:
        """Whether the kernel wrote to dq itself."""
        grads = (dq, torch.empty_like(k), torch.empty_like(v))
        finish = [launch.params for key, launch in hopper_launch._launches.items() if key[0] == "postprocess_dq"]
        for params in finish:
            params.dq = None
        hopper.backward(BackwardInputs(q, k, v, dout, row, row), bands, options, Gradients(*grads), memo=memo)
        finish = [launch.params for key, launch in hopper_launch._launches.items() if key[0] == "postprocess_dq"]
        return dq.data_ptr() in [params.dq for params in finish]

    straight, shifted = storage[:-8].view(300, 4, 128), storage[1:-7].view(300, 4, 128)
    for _ in range(2):
        assert is_direct(q, straight) and is_direct(shifted, straight) and not is_direct(q, shifted)
    assert len(memo) == 1
    wide = torch.zeros(300, 8, 128).bfloat16()
    assert is_direct(wide[:, ::2], straight)
    assert len(memo) == 2


@pytest.mark.parametrize("empty", [[0, 0, 0, 300], [0, 300, 0, 0], [0, 0, 0, 0]])
def test_tensor_maps_have_rows_where_a_band_has_none(launched, monkeypatch, empty):
    described = []
    monkeypatch.setattr(hopper_driver, "tensor_map", lambda t, *_: described.append(t.shape[0]) or bytes(128))
    q, k, v, _ = tensors()
    bands = np.array([[*empty, -1000, 1000]])
    out, lse = torch.empty_like(q), torch.zeros(300, 4)
    hopper.forward(ForwardInputs(q, k, v), bands, AttnOptions(0.1), ForwardOutput(out, lse))
    grads = tuple(torch.empty_like(t) for t in (q, k, v))
    hopper.backward(BackwardInputs(q, k, v, out, lse, lse), bands, AttnOptions(0.1), Gradients(*grads))
    assert described and min(described) == 1


def test_gradients_that_kernels_write_themselves_are_written_directly(launched):
    q, k, v, bands = tensors()
    grads = tuple(torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v))
    for accumulate, is_direct in ((False, True), (True, False)):
        hopper.backward(
            BackwardInputs(q, k, v, q, torch.zeros(300, 4), torch.zeros(300, 4)),
            bands,
            AttnOptions(0.1),
            Gradients(*grads, accumulate, accumulate),
        )
        assert hopper_backward._passes.items()[-1][1]._is_direct == is_direct
