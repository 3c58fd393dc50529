"""Our kernels for rows do what plain torch does, and lie in memory as Python describes them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from megatron_magi.comm import rows
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import widest
from megatron_magi.cuda import build as cuda_build
from tests.comm.random_transfers import arrivals_of, random_tensor
from tests.gpu_memory import needs_gigabytes

cuda_rows = pytest.importorskip("megatron_magi.comm.impl.cuda_rows", reason="Triton is not installed")
SHAPES = {
    "scalar": ((),),
    "odd": ((7,), (3, 5)),
    "keys": ((2, 64), (2, 64)),
    "many": ((8,),) * 6,
    "long": ((2500,), (1,)),
}


@pytest.mark.parametrize(
    ("source", "params", "tail", "defines"),
    [
        ("gather_rows", "GatherParams", "Qq", ("UNIT=16",)),
        ("sum_rows", "SumParams", "QQQq", ("FROM=BFloat", "INTO=float", "VECTOR=4")),
    ],
)
def test_parameters_are_packed_as_the_kernel_reads_them(monkeypatch, source, params, tail, defines):
    pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")
    size = struct.calcsize(cuda_rows._ROWS + tail)
    last = size - 8
    checks = (
        f'static_assert(sizeof({params}) == {size}, "size");'
        f'static_assert(__INTADDR__(&static_cast<{params}*>(0)->num_rows) == {last}, "rows");'
        f'static_assert(sizeof(RowTensors) == {struct.calcsize(cuda_rows._ROWS)}, "tensors");'
        'static_assert(__INTADDR__(&static_cast<RowTensors*>(0)->units) == 128, "units");'
    )
    flatten = cuda_build.flatten_source
    monkeypatch.setattr(cuda_build, "flatten_source", lambda path: flatten(path) + checks + "\n")
    cuda_build.compile_kernel(f"group_collective/{source}.cu", defines)


def test_accesses_are_as_wide_as_addresses_strides_and_lengths_allow():
    assert widest([(256, 4096, 2048)]) == 16
    assert widest([(256, 4096, 2048), (512 + 8, 4096, 2048)]) == 8
    assert widest([(256, 4096, 6)]) == 2
    assert widest([(256, 4095, 16)]) == 1


def test_sums_are_left_to_triton_where_there_is_no_kernel():
    def can_add(partial, into):
        layout = RowLayout.of([torch.empty(1, 4, dtype=dtype) for dtype in partial])
        return cuda_rows.can_add(layout, [torch.empty(1, 4, dtype=dtype) for dtype in into])

    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    assert can_add([bf16, bf16], [fp32, fp32]) and can_add([fp32], [bf16]) and can_add([fp64], [fp64])
    assert not can_add([bf16, fp32], [fp32, fp32]) and not can_add([bf16, bf16], [fp32, bf16])
    assert (
        not can_add([fp64], [fp32])
        and not can_add([torch.int32], [torch.int32])
        and not can_add([fp32] * 5, [fp32] * 5)
    )


@pytest.mark.sm90
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
def test_rows_are_packed_and_unpacked_as_plain_torch_does(shapes, dtype):
    rng = np.random.default_rng(0)
    for num_rows in (0, 1, 40, 5000):
        tensors = [random_tensor((9, *shape), dtype, i).cuda() for i, shape in enumerate(shapes)]
        layout = RowLayout.of(tensors)
        spread = [torch.stack([x, x], dim=1)[:, 1] for x in tensors]  # rows further apart than they are long
        turned = [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in tensors]  # rows that are not contiguous
        for some in (tensors, spread, turned):
            for index in (torch.from_numpy(rng.integers(0, 9, num_rows)).cuda(), None):
                got, expected = (layout.new_buffer(9 if index is None else num_rows, "cuda").zero_() for _ in range(2))
                cuda_rows.pack_rows(some, index, layout, got)
                rows.pack_rows(some, index, layout, expected)
                assert torch.equal(got, expected)
        order = torch.from_numpy(rng.permutation(num_rows)).cuda()
        buffer = layout.new_buffer(num_rows, "cuda")
        rows.pack_rows(tensors, torch.from_numpy(rng.integers(0, 9, num_rows)).cuda(), layout, buffer)
        for index in (order, None):
            for got, expected in zip(
                cuda_rows.unpack_rows(buffer, index, layout), rows.unpack_rows(buffer, index, layout), strict=True
            ):
                assert got.dtype == dtype and torch.equal(got, expected)


@pytest.mark.sm90
@pytest.mark.parametrize("shapes", [s for s in SHAPES.values() if len(s) <= 4])
@pytest.mark.parametrize(
    ("partial", "into"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_rows_are_added_bit_by_bit_as_plain_torch_does(shapes, partial, into):
    rng = np.random.default_rng(1)
    for num_arriving, num_rows in ((0, 8), (1, 8), (30, 8), (9000, 3000)):
        arrivals = arrivals_of(rng.integers(0, num_rows, num_arriving), "cuda")
        arriving = [random_tensor((num_arriving, *shape), partial, i).cuda() for i, shape in enumerate(shapes)]
        layout = RowLayout.of(arriving)
        buffer = layout.new_buffer(num_arriving, "cuda")
        rows.pack_rows(arriving, None, layout, buffer)
        wide = [random_tensor((num_rows, 2, *shape), into, 9 + i).cuda() for i, shape in enumerate(shapes)]
        got, expected = ([x.clone()[:, 0] for x in wide] for _ in range(2))
        assert cuda_rows.can_add(layout, got)
        cuda_rows.add_rows(buffer, layout, arrivals, got)
        rows.add_rows(buffer, layout, arrivals, expected)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.sm90
def test_rows_beyond_two_to_the_31_elements_are_reached():
    needs_gigabytes(10)
    num_rows, width = (1 << 21) + 3, 1024
    x = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.arange(width, device="cuda") % 128
    layout = RowLayout.of([x])
    buffer = layout.new_buffer(2, "cuda")
    cuda_rows.pack_rows([x], torch.tensor([num_rows - 1, 0], device="cuda"), layout, buffer)
    (got,) = layout.views(buffer)
    assert torch.equal(got[0], x[-1]) and not got[1].any()
    cuda_rows.add_rows(buffer[:1], layout, arrivals_of(np.array([num_rows - 1]), "cuda"), [x])
    assert torch.equal(x[-1], 2 * got[0])
