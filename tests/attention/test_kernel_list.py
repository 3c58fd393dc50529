"""What is compiled before the first step is what steps take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_magi.attention import AttnShape, needed_kernels
from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.backward_steps import BackwardSteps
from megatron_magi.backends.sm90.forward_steps import forward_steps
from megatron_magi.backends.sm90.mask_numbers import first_arriving, numbers_on_device, pass_shape
from megatron_magi.backends.sm90.program import backward_pays
from megatron_magi.comm import peer_kernels, row_memory
from megatron_magi.comm.impl import cuda_rows
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.rows import Arrivals
from megatron_magi.config import AttendConfig, CommConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.driver import Kernel
from megatron_magi.cuda.launch_list import Step
from megatron_magi.mask import bands as bd
from megatron_magi.mask import builders
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from tests.backends.sm90.fake_driver import fake_driver

MASKS = [[60], [8200], [256] * 64]
FAR = -bd.NO_DIAGONAL, bd.NO_DIAGONAL


def _taken(monkeypatch: pytest.MonkeyPatch, shape: AttnShape, deterministic: bool) -> set:
    """Kernels of passes over some masks, of tensors that are not looked at."""
    asked = set()

    def load(_device, name, defines, threads, size):
        asked.add((hopper_kernels.source_of(name), defines))
        return Kernel(name, threads, size)

    monkeypatch.setattr(hopper_kernels, "_load", load)
    options = AttnOptions(0.1, deterministic=deterministic)
    for lengths in MASKS:
        bands = builders.varlen(doc_lengths=lengths, causal=True).bands
        rows, (heads_q, heads_kv) = int(bands[:, 1].max()), shape[:2]
        q, out = (torch.empty(rows, heads_q, dim, dtype=shape.dtype) for dim in (shape.head_dim, shape.head_dim_v))
        k, v = (torch.empty(rows, heads_kv, dim, dtype=shape.dtype) for dim in (shape.head_dim, shape.head_dim_v))
        lse = torch.empty(rows, heads_q)
        hopper.forward(ForwardInputs(q, k, v), bands, options, ForwardOutput(out, lse))
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        hopper.backward(
            BackwardInputs(q, k, v, out, lse, hopper.row_delta(out, out)), bands, options, Gradients(*grads)
        )
    return asked


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(16, 2), (16, 16)], ids=str)
@pytest.mark.parametrize("dims", [*hopper_kernels.BACKWARD_DIMS, (96, 96), (192, 192)], ids=str)
def test_attention_takes_the_kernels_that_are_compiled_and_no_others(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], heads: tuple[int, int], deterministic: bool
) -> None:
    shape = AttnShape(*heads, *dims, torch.bfloat16, num_sms=132)
    with fake_driver(monkeypatch):
        taken = _taken(monkeypatch, shape, deterministic)
    config = MagiConfig(attend=AttendConfig(deterministic=deterministic))
    assert taken == set(needed_kernels(shape, config, 1))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", list(hopper_kernels.BACKWARD_DIMS), ids=str)
def test_one_launch_takes_the_kernels_that_are_compiled_and_no_others(monkeypatch, dims, deterministic) -> None:
    shape = AttnShape(16, 2, *dims, torch.bfloat16, num_sms=132)
    config = MagiConfig(attend=AttendConfig(deterministic=deterministic), overlap=OverlapConfig(one_launch=True))
    asked, options = set(), AttnOptions(0.1, deterministic=deterministic)

    def load(_device, name, defines, threads, size):
        asked.add((hopper_kernels.source_of(name), defines))
        return Kernel(name, threads, size)

    def rows(count, heads, dim):
        return torch.empty(count, heads, dim, dtype=torch.bfloat16)

    with fake_driver(monkeypatch):
        monkeypatch.setattr(hopper_kernels, "_load", load)
        for lengths in MASKS:
            bands = builders.varlen(doc_lengths=lengths, causal=True).bands
            n = int(bands[:, 1].max())
            bands = np.concatenate([bands, [(0, n, first_arriving(n), first_arriving(n) + 7, *FAR)]])
            q, out, (k, v) = rows(n, 16, dims[0]), rows(n, 16, dims[1]), (rows(n, 2, dim) for dim in dims)
            later = Arriving([rows(7, 2, dim) for dim in dims], (("r", 0), ("r", 8)), None, 0, 0, 0, 0, 0)
            lse = torch.empty(n, 16)
            operands, of_pass = (ForwardInputs(q, k, v), ForwardOutput(out, lse)), pass_shape((q, k, v), 7, options)
            form = numbers_on_device(False, of_pass, bands, q.device, 0).form
            forward_steps(*operands, form, options, 0, later)
            if backward_pays(dims):
                inputs, grads = BackwardInputs(q, k, v, out, lse, lse), Gradients(q, k, v)
                form = numbers_on_device(True, of_pass, bands, q.device, 0).form
                BackwardSteps(inputs, out, grads, form, options, 0, later, Step(None, 1, None)).steps()
    gates = {kernel for kernel in needed_kernels(shape, config, 2) if "STREAM_KV=1" in kernel[1]}
    assert {kernel for kernel in asked if "STREAM_KV=1" in kernel[1]} == gates
    assert asked <= set(needed_kernels(shape, config, 2))


@pytest.mark.parametrize("high_precision", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_travel_by_the_kernels_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, high_precision: bool
) -> None:
    asked = []

    class Noted:
        def __init__(self, _device: object, _name: str, source: tuple, _tail: str) -> None:
            asked.append(source)

        def part(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(kernel=self)

        def fire(self, *_: object) -> None:
            pass

    monkeypatch.setattr(cuda_rows, "_RowKernel", Noted)
    for kept in (cuda_rows._gather_kernel, cuda_rows._sum_kernel):
        monkeypatch.setattr(cuda_rows, kept.__name__, kept.__wrapped__)
    config = MagiConfig(comm=CommConfig(impl="all_to_all", backward_high_precision_reduce=high_precision))
    shape = AttnShape(4, 2, 192, 128, dtype, num_sms=132)
    index = torch.arange(5)
    keys = [torch.empty(5, 2, dim, dtype=dtype) for dim in (192, 128)]
    partial = [k.float() if high_precision else k for k in keys]
    numbers = [torch.arange(5), torch.ones(5)]
    for tensors in (keys, partial, numbers[:1], numbers[1:]):
        layout = RowLayout.of(tensors)
        layout.ways.clear()
        buffer = layout.new_buffer(5, torch.device("cpu"))
        cuda_rows.pack_rows(tensors, index, layout, buffer)
        cuda_rows.unpack_rows(buffer, index, layout)
    layout = RowLayout.of(partial)
    layout.ways.clear()
    wide = [k.float() for k in keys]
    assert cuda_rows.can_add(layout, wide)
    arrivals = Arrivals(index, index, index, (5,))
    cuda_rows.add_rows(layout.new_buffer(5, torch.device("cpu")), layout, arrivals, wide)
    of_rows = [kernel for kernel in needed_kernels(shape, config, 2, rolls=True) if "group_collective" in kernel[0]]
    assert set(asked) == set(of_rows)
    assert len(needed_kernels(shape, config, 2)) == len(needed_kernels(shape, config, 2, rolls=True)) - 2


@pytest.mark.parametrize("high_precision", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_travel_between_gpus_by_the_kernels_that_are_compiled(dtype: torch.dtype, high_precision: bool) -> None:
    """Where ranks reach each other's memory."""
    config = MagiConfig(comm=CommConfig(impl="native", backward_high_precision_reduce=high_precision))
    shape = AttnShape(4, 2, 192, 128, dtype, num_sms=132)
    partial = torch.float32 if high_precision else dtype
    vector = row_memory.vector_of([(0, 4 * 2 * dim, 4 * 2 * dim) for dim in (192, 128)], partial, torch.float32)
    widest = row_memory.widest([(0, dtype.itemsize * 2 * dim, dtype.itemsize * 2 * dim) for dim in (192, 128)])
    wanted = set(needed_kernels(shape, config, 2))
    for row_bytes in (256, 4096):
        for sums in ((), ((partial, torch.float32), vector)):
            name, macros = peer_kernels.put_kernel(widest, row_bytes, *sums)
            assert (f"group_collective/{name}.cu", macros) in wanted
    assert ("group_collective/get_rows.cu", (f"UNIT={widest}",)) in wanted


def test_nothing_is_compiled_where_other_implementations_compute() -> None:
    shape = AttnShape(4, 2, 8, 8, torch.float32)
    assert needed_kernels(shape, MagiConfig(), 2) == []
