"""What is kept between calls of the Hopper kernels: programs by mask, lists of launches by layout."""

from __future__ import annotations

from weakref import ref

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90 import program as hopper_program
from megatron_magi.backends.sm90.program import LaunchProgram, new_makers
from megatron_magi.cuda import driver as hopper_driver
from megatron_magi.mask import bands as bd
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import together
from tests.backends.sm90.test_host import tensors


def stage(bands, num_keys: int = 400, makers=None) -> LaunchProgram:
    """A stage's program."""
    return LaunchProgram(bands, num_keys, new_makers() if makers is None else makers)


def test_launches_keep_their_tables_and_are_bounded_by_the_memory_of_these(launched, monkeypatch):
    q, k, v, bands = tensors()
    monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30, 1))
    bound = hopper_program._bound

    def forward(table) -> ref:
        hopper.forward(
            ForwardInputs(q, k, v), table, AttnOptions(0.1), ForwardOutput(torch.empty_like(q), torch.zeros(300, 4))
        )
        tiles = launched.params["forward"].plan.tiles
        (found,) = (
            one for _, one in bound.items() if tiles in [plan.memory.data_ptr() for plan in one.tables.values()]
        )
        return ref(found)

    first = forward(bands)
    forward(bands[:0])  # whose plan takes the place of the other's
    assert forward(bands) is first and len(bound) == 2
    bound.max_bytes = first().num_bytes
    other = forward(bands[:, [2, 3, 0, 1, 4, 5]])
    assert first() is None and [one for _, one in bound.items()] == [other()]
    assert forward(bands)() is not None and other() is None


def test_other_threads_find_launches_once_their_tables_are_there(launched):
    q, k, v, bands = tensors()
    program = stage(bands)
    with together(torch.device("cpu")):
        output = ForwardOutput(torch.empty_like(q), torch.zeros(300, 4))
        hopper.forward(ForwardInputs(q, k, v), bands, AttnOptions(0.1), output, program=program)
        assert launched.params["forward"] and not program.bound and not program.kept
    assert len(program.bound) == 1


def test_tensors_that_lie_otherwise_are_not_launched_as_those_before(launched):
    """As a hook of saved tensors may give them back: contiguous instead of parts of one tensor."""
    q, k, v, bands = tensors()
    options, program = AttnOptions(0.1), stage(bands)
    apart = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (q, k, v)]
    for inputs in ((q, k, v), apart, (q, *apart[1:]), (q, k, v)):
        output = ForwardOutput(torch.empty_like(q), torch.zeros(300, 4))
        hopper.forward(ForwardInputs(*inputs), bands, options, output, program=program)
    assert len(program.bound) == 3

    out, lse = torch.empty_like(q), torch.zeros(300, 4)
    for inputs in ((q, k, v), apart, (q, *apart[1:]), (q, k, v)):
        grads = tuple(torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v))
        hopper.backward(BackwardInputs(*inputs, out, lse, lse), bands, options, Gradients(*grads), program=program)
    assert len(program.bound) == 6


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_masks_of_other_numbers_of_keys_share_the_launches_of_a_layout(launched, monkeypatch, dims, deterministic):
    """And each call runs with its own mask's numbers, rows in tensor maps included."""
    maps, seen = [], []
    monkeypatch.setattr(hopper_driver, "tensor_map", lambda t, *_: maps.append(t.shape[0]) or bytes(128))
    note = hopper_driver.Kernel.launch

    def look(kernel, config, pointers) -> None:
        note(kernel, config, pointers)
        params, blocks = launched.params[kernel.handle], hopper_driver.LaunchConfig.from_address(config).grid[0]
        tiles = params.plan.tiles if hasattr(params, "plan") else getattr(params, "tiles", 0)
        seen.append((kernel.handle, blocks, tiles, *(getattr(params, f, 0) for f in ("num_tiles", "num_items"))))

    monkeypatch.setattr(hopper_driver.Kernel, "launch", look)
    options, made, makers = AttnOptions(0.1, deterministic=deterministic), {}, new_makers()

    def step(num_keys: int) -> list:
        q, k, v, _ = tensors(dims=dims)
        k, v = k[:num_keys].contiguous(), v[:num_keys].contiguous()
        bands = np.array([[0, 300, 0, num_keys, -bd.NO_DIAGONAL, bd.NO_DIAGONAL]], dtype=np.int64)
        out, lse = torch.empty(300, 4, dims[1]).bfloat16(), torch.zeros(300, 4)
        program = made.setdefault(num_keys, stage(bands, num_keys, makers))
        seen.clear()
        hopper.forward(ForwardInputs(q, k, v), bands, options, ForwardOutput(out, lse), program=program)
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        hopper.backward(BackwardInputs(q, k, v, out, lse, lse), bands, options, Gradients(*grads), program=program)
        return list(seen)

    first = step(400)
    assert 400 in maps and 360 not in maps
    for owner, name in ((hopper_program.forward_steps, "forward_steps"), (hopper_program.back.BackwardSteps, "steps")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("made again"))
    maps.clear()
    second = step(360)
    assert set(maps) == {360}
    for a, b in zip(first, second, strict=True):
        if a[0] in ("forward", "backward", "backward_keys", "backward_queries"):
            assert a[2] != b[2], a[0]
    maps.clear()
    assert [step(400), step(360), step(400)] == [first, second, first]
    assert not maps, "nothing is encoded for a mask that is known"


def test_what_is_kept_is_not_used_where_a_tensor_begins_elsewhere(launched):
    """Gradients and inputs that do not begin at 16 bytes, or lie otherwise."""
    q, k, v, bands = tensors()
    storage, row, program = torch.zeros(300 * 4 * 128 + 8).bfloat16(), torch.zeros(300, 4), stage(bands)

    def is_direct(dout, dq) -> bool:
        """Whether the kernel wrote to dq itself."""
        grads = (dq, torch.empty_like(k), torch.empty_like(v))
        hopper.backward(
            BackwardInputs(q, k, v, dout, row, row), bands, AttnOptions(0.1), Gradients(*grads), program=program
        )
        return launched.params["postprocess_dq"].dq == dq.data_ptr()

    straight, shifted = storage[:-8].view(300, 4, 128), storage[1:-7].view(300, 4, 128)
    for _ in range(2):
        assert is_direct(q, straight) and is_direct(shifted, straight) and not is_direct(q, shifted)
    assert len(program.bound) == 2
    wide = torch.zeros(300, 8, 128).bfloat16()
    assert is_direct(wide[:, ::2], straight)
    assert len(program.bound) == 3


def test_an_output_as_wide_as_the_buffer_of_narrower_heads_is_not_taken_for_it(launched):
    """Columns of a wider tensor have the strides of the buffer, but the other columns are not the kernel's."""
    q, k, v, bands = tensors(dims=(80, 80))
    wide, program = torch.zeros(300, 4, 128).bfloat16(), stage(bands)
    for out in (torch.empty(300, 4, 80).bfloat16(), wide[..., :80]):
        output = ForwardOutput(out, torch.zeros(300, 4))
        hopper.forward(ForwardInputs(q, k, v), bands, AttnOptions(0.1), output, program=program)
        assert launched.params["forward"].out != out.data_ptr()


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
        row = torch.zeros(300, 4)
        hopper.backward(
            BackwardInputs(q, k, v, q, row, row), bands, AttnOptions(0.1), Gradients(*grads, accumulate, accumulate)
        )
        assert (launched.params["backward"].dk == grads[1].data_ptr()) == is_direct
