"""The host side of the Hopper kernels, without a GPU: struct layouts, prepared launches, errors."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90 import support as hopper_support
from megatron_magi.cuda import build as hopper_build
from megatron_magi.cuda import driver as hopper_driver
from megatron_magi.cuda import launch_list
from megatron_magi.cuda.params import kernel_params
from megatron_magi.mask import bands as bd
from megatron_magi.mask import builders
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from tests.cuda.struct_layout import layout_checks

_WIDE = (
    "HEAD_DIM=192", "HEAD_DIM_V=128", "WIDTH=64", "STAGES=2", "STAGES_V=2", "STAGED=0", "DTYPE=Bf16", "SOFTCAP=0",
)  # fmt: skip
_OF_DTYPE = ("HEAD_DIM=64", "DTYPE=Bf16")
KERNELS = {
    "forward": (hopper_kernels.forward(torch.bfloat16, (64, 64), (128, 128), False).macros, ("CAPTURED", "STREAM_KV")),
    "backward": (hopper_kernels.backward(torch.bfloat16, (64, 64), False, True).macros, ("CAPTURED", "STREAM_KV")),
    "backward_keys": (_WIDE, ("CAPTURED",)),
    "backward_queries": (_WIDE, ("CAPTURED", "STREAM_KV")),
    "preprocess": ((), ("CAPTURED",)),
    "postprocess_dq": (_OF_DTYPE, ()),
    "postprocess_keys": (_OF_DTYPE, ("CAPTURED", "STREAM_KV")),
    "row_delta": (("HEAD_DIM_V=64", "DTYPE=Bf16"), ()),
}
STRUCTS = [
    (source, (*macros, *(f"{kind}=1" for kind in one)))
    for source, (macros, kinds) in KERNELS.items()
    for one in ((), *((kind,) for kind in kinds))
]
STRUCTS.append(("preprocess", ("DELTA=1", "HEAD_DIM_V=64", "DTYPE=Bf16")))


@pytest.mark.parametrize(("source", "defines"), STRUCTS)
def test_struct_fields_lie_where_the_kernel_expects_them(monkeypatch, source, defines):
    pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")
    checks = layout_checks(kernel_params(hopper_kernels.source_of(source), defines))
    flatten, options = hopper_build.flatten_source, hopper_build._options
    monkeypatch.setattr(hopper_build, "flatten_source", lambda path: flatten(path) + checks + "\n")
    # Code is generated in test_ffa_build.py.
    monkeypatch.setattr(hopper_build, "_options", lambda *args: [*options(*args), "--fdevice-syntax-only"])
    hopper_build.compile_kernel(f"attention/sm90/{source}.cu", defines)


def tensors(dtype=torch.bfloat16, dims=(128, 128)):
    q = torch.randn(300, 4, dims[0]).to(dtype)
    k, v = torch.randn(400, 2, dims[0]).to(dtype), torch.randn(400, 2, dims[1]).to(dtype)
    bands = np.array([[0, 300, 0, 400, -bd.NO_DIAGONAL, 101]], dtype=np.int64)
    return q, k, v, bands


@pytest.mark.parametrize(
    ("documents", "heads", "dim", "summed"),
    [
        ([1024] * 2, (256, 2), 128, True),  # 256 MB of sums
        ([640] * 4, (256, 2), 128, False),
        ([704] * 4, (256, 256), 128, True),  # one head at a time
        ([256] * 9, (256, 256), 128, False),
        ([512] * 4, (128, 2), 128, True),  # 128 MB
        ([256] * 9, (128, 2), 128, False),
        ([512] * 4, (128, 128), 128, True),
        ([256] * 9, (128, 128), 128, False),
        ([256] * 5, (128, 2), 128, True),  # 80 MB
        ([192] * 6, (128, 2), 128, False),
        ([192] * 8, (16, 2), 128, True),  # 12 MB
        ([256] * 8, (512, 2), 64, False),
        ([256] * 8, (512, 512), 64, True),
    ],
)
def test_dq_has_its_own_kernel_where_a_query_sees_few_keys_and_sums_are_many(launched, documents, heads, dim, summed):
    mask, rows = builders.varlen(doc_lengths=documents, causal=False), sum(documents)
    q, k = (torch.empty(rows, n, dim).bfloat16() for n in heads)
    row = torch.empty(rows, heads[0])
    grads = tuple(torch.empty_like(t) for t in (q, k, k))
    hopper.backward(BackwardInputs(q, k, k, q, row, row), mask.bands, AttnOptions(0.1), Gradients(*grads))
    assert launched[:2] == ["preprocess", "backward"] and launched[-1] == (
        "postprocess_dq" if summed else "backward_queries"
    )
    by_name = launched.params
    assert (by_name["preprocess"].num_sums > 0) == summed


@pytest.mark.parametrize(
    ("documents", "heads", "packed"),
    [
        ([1152] * 4, (8, 2), 4),
        ([3968, 3968], (8, 2), 4),
        ([4096, 4096], (8, 2), 1),
        ([4000], (8, 2), 1),
        ([1152] * 4, (6, 2), 1),
        ([1152] * 4, (12, 2), 2),
        ([1152] * 4, (2, 2), 1),
        ([1152] * 4, (2, 1), 2),
        ([1152] * 4, (8, 1), 8),
        ([1152] * 4, (16, 1), 8),
    ],
)
def test_heads_are_packed_in_tiles_of_fewer_rows_where_documents_are_short(
    launched, monkeypatch, documents, heads, packed
):
    boxes = []
    monkeypatch.setattr(hopper_driver, "tensor_map", lambda t, *box: boxes.append((t.shape[1], *box)) or bytes(128))
    mask, rows = builders.varlen(doc_lengths=documents, causal=True), sum(documents)
    q, k = (torch.empty(rows, n, 128).bfloat16() for n in heads)
    row, options = torch.empty(rows, heads[0]), AttnOptions(0.1, deterministic=True)
    hopper.forward(ForwardInputs(q, k, k), mask.bands, options, ForwardOutput(torch.empty_like(q), row))
    grads = tuple(torch.empty_like(t) for t in (q, k, k))
    hopper.backward(BackwardInputs(q, k, k, q, row, row), mask.bands, options, Gradients(*grads))
    by_name = launched.params
    for params, places in ((by_name["forward"], 192 if packed > 1 else 128), (by_name["backward_queries"], 128)):
        assert 1 << params.log2_packed == packed
        assert (params.num_heads, params.group) == (heads[0] // packed, heads[0] // heads[1] // packed)
        assert params.num_tiles == len(documents) * -(-documents[0] * packed // places)
    params, stats = by_name["backward"], by_name["preprocess"]
    assert {1 << params.log2_packed, 1 << stats.log2_packed} == {packed}
    assert params.group == heads[0] // heads[1] // packed
    assert abs(params.plan.step) == 64, "a block is as many rows of packed heads as of single ones"
    assert params.stats_row == stats.stats_row == by_name["backward_queries"].stats_row >= rows * packed
    if heads[0] != heads[1]:
        found = {tuple(box) for num_heads, *box in boxes if num_heads == heads[0]}
        assert found == {(rows // packed, packed) for rows in (64, 16)}, "what is read, what is written"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sm_margin", [0, 8])
def test_kernels_of_a_backward_overlap_unless_processors_are_left_to_others(
    launched, monkeypatch, deterministic, sm_margin
):
    seen = {}

    def look(kernel, config, _pointers) -> None:
        config = hopper_driver.LaunchConfig.from_address(config)
        seen[kernel.handle] = config.num_attributes
        assert (config.attributes[0].id, config.attributes[0].value, config.block[0]) == (6, 1, kernel.threads)

    monkeypatch.setattr(hopper_driver.Kernel, "launch", look)
    q, k, v, bands = tensors()
    options = AttnOptions(0.1, deterministic=deterministic, sm_margin=sm_margin)
    out, lse = torch.empty_like(q), torch.empty(300, 4)
    hopper.forward(ForwardInputs(q, k, v), bands, options, ForwardOutput(out, lse))
    delta, grads = hopper.row_delta(q, out), tuple(torch.empty_like(t) for t in (q, k, v))
    hopper.backward(BackwardInputs(q, k, v, q, lse, delta), bands, options, Gradients(*grads))
    assert seen.pop("forward") == seen.pop("row_delta") == 0
    assert set(seen) >= {"preprocess", "backward", "backward_queries" if deterministic else "postprocess_dq"}
    assert set(seen.values()) == {int(sm_margin == 0)}


def test_kernels_that_overlap_take_different_counters_and_all_wait_for_those_before(launched):
    q, k, v, bands = tensors()
    row, grads = torch.empty(300, 4), tuple(torch.empty_like(t) for t in (q, k, v))
    hopper.backward(BackwardInputs(q, k, v, q, row, row), bands, AttnOptions(0.1, 0.0, True), Gradients(*grads))
    params = launched.params
    assert params["backward_queries"].counter == params["backward"].counter + hopper_support.COUNTER_BYTES
    assert hopper_support.work_counter(q.device, 0).nbytes == 2 * hopper_support.COUNTER_BYTES
    for source in (hopper_build.source_root() / "attention/sm90").glob("*.cu"):
        text = source.read_text()
        # Those that wait for keys, or run while rows are moved, do so at the end, and not where the others do.
        counts = [text.count(f"{when}await_earlier_kernels();") for when in ("", "if (!STREAM_KV) ", "if (STREAM_KV) ")]
        is_concurrent = source.name in ("preprocess.cu", "postprocess_dq.cu")
        assert counts == ([2, 0, 0] if is_concurrent else [2, 1, 1] if counts[0] > 1 else [1, 0, 0])


def test_a_launch_lies_in_memory_as_the_driver_wants_it():
    """CUlaunchConfig and CUlaunchAttribute of cuda.h."""
    config, attribute = hopper_driver.LaunchConfig, hopper_driver._Attribute
    fields = ("grid", "block", "shared_bytes", "stream", "attributes", "num_attributes")
    assert [getattr(config, name).offset for name in fields] == [0, 12, 24, 32, 40, 48]
    assert (ctypes.sizeof(config), ctypes.sizeof(attribute), attribute.value.offset) == (56, 72, 8)


@pytest.mark.parametrize("started", [0, 7])
def test_a_launch_may_overlap_or_record_an_event(started):
    config = hopper_driver.LaunchConfig(hopper_driver.Kernel(ctypes.c_void_p(1), 32, 64), 3, started)
    assert (config.grid[0], config.block[0], config.shared_bytes, config.num_attributes) == (3, 32, 64, started > 0)
    # Else programmatic stream serialization, which is switched on by their number.
    assert (config.attributes[0].id, config.attributes[0].value) == ((12, 7) if started else (6, 1))


@pytest.mark.parametrize(
    ("dims", "lengths", "heads", "tile"),
    [
        ((128, 128), [3999], (2, 2), (128, 128)),
        ((128, 128), [4000], (2, 2), (192, 64)),
        ((128, 128), [8] * 100, (2, 1), (192, 64)),  # packed
        ((128, 128), [8] * 100, (2, 2), (128, 128)),
        ((64, 64), [99], (2, 2), (128, 128)),
        ((64, 64), [100], (2, 2), (192, 128)),
        ((64, 64), [99] * 10, (2, 1), (128, 128)),
        ((64, 64), [100] * 10, (2, 1), (192, 128)),
        ((192, 128), [4000], (2, 2), (128, 128)),
        ((256, 256), [4000], (2, 2), (128, 64)),
    ],
)
def test_tiles_are_tall_where_queries_see_many_keys_or_heads_are_packed(
    launched, monkeypatch, dims, lengths, heads, tile
):
    boxes, threads = [], []
    monkeypatch.setattr(hopper_driver, "tensor_map", lambda t, *box: boxes.append(box) or bytes(128))
    load = hopper_kernels._load
    monkeypatch.setattr(hopper_kernels, "_load", lambda *args: threads.append(args[3]) or load(*args))
    rows = sum(lengths)
    q, k, v = (torch.empty(rows, heads[i > 0], dims[i > 1]).bfloat16() for i in range(3))
    hopper.forward(
        ForwardInputs(q, k, v),
        builders.varlen(doc_lengths=lengths, causal=False).bands,
        AttnOptions(0.1),
        ForwardOutput(torch.empty(rows, heads[0], dims[1]).bfloat16(), torch.empty(rows, heads[0])),
    )
    assert threads == [128 + 2 * tile[0]]
    assert boxes[-2:] == [(tile[1],)] * 2, "keys and values of a block"
    params = launched.params["forward"]
    places = rows * (1 << params.log2_packed)
    assert params.num_tiles == -(-places // tile[0]) or len(lengths) > 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_queues_its_kernels_and_prepares_them_once(launched, monkeypatch, deterministic):
    q, k, v, bands = tensors()
    options = AttnOptions(0.1, deterministic=deterministic)
    out, lse = torch.empty_like(q), torch.empty(300, 4)
    backward = ["backward", "backward_queries"] if deterministic else ["backward", "postprocess_keys", "postprocess_dq"]
    for _ in range(3):
        hopper.forward(ForwardInputs(q, k, v), bands, options, ForwardOutput(out, lse))
        delta = hopper.row_delta(q, out)
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        hopper.backward(BackwardInputs(q, k, v, q, lse, delta), bands, options, Gradients(*grads))
        monkeypatch.setattr(hopper_driver, "LaunchConfig", lambda *_: pytest.fail("prepared again"))
        monkeypatch.setattr(launch_list, "LaunchConfig", lambda *_: pytest.fail("prepared again"))
    assert launched == ["forward", "row_delta", "preprocess", *backward] * 3


def test_a_launch_is_kept_for_its_head_dim_alone(launched, monkeypatch):
    """Gradients that are parts of wider tensors: their strides do not tell head dims apart."""
    dims = []
    loaded = hopper_kernels.loaded

    def record(variant, device):
        dims.append((variant.name, *(int(d.split("=")[1]) for d in variant.macros if d.startswith("HEAD_DIM"))))
        return loaded(variant, device)

    monkeypatch.setattr(hopper_kernels, "loaded", record)
    bands = np.array([[0, 2000, 0, 2000, -bd.NO_DIAGONAL, bd.NO_DIAGONAL]], dtype=np.int64)
    wide_q, wide_k = torch.zeros(2000, 16, 128), torch.zeros(2000, 2, 128)
    row = torch.zeros(2000, 16)
    for dim in (64, 128):
        q, k = wide_q[..., :dim].bfloat16(), wide_k[..., :dim].bfloat16()
        grads = (wide_q[..., :dim], wide_k[..., :dim], wide_k[..., :dim])
        hopper.row_delta(wide_q[..., :dim].bfloat16(), q)
        hopper.backward(BackwardInputs(q, k, k, q, row, row), bands, AttnOptions(0.1), Gradients(*grads))
    for name in ("row_delta", "postprocess_keys", "postprocess_dq"):
        assert [size for found, *size in dims if found == name] == [[64], [128]]


def test_sums_of_keys_lie_in_dq_until_it_is_written(launched):
    q, k = torch.randn(2000, 64, 128).bfloat16(), torch.randn(2000, 8, 128).bfloat16()
    bands = np.array([[0, 2000, 0, 2000, -bd.NO_DIAGONAL, bd.NO_DIAGONAL]], dtype=np.int64)
    row = torch.zeros(2000, 64)
    for grad_dtype, inside in ((torch.bfloat16, True), (torch.float32, True), (torch.float64, False)):
        grads = tuple(torch.empty(t.shape, dtype=grad_dtype) for t in (q, k, k))
        hopper.backward(BackwardInputs(q, k, k, q, row, row), bands, AttnOptions(0.1), Gradients(*grads))
        by_name = launched.params
        begin, end = grads[0].data_ptr(), grads[0].data_ptr() + grads[0].numel() * grads[0].element_size()
        assert (begin <= by_name["backward"].key_sums < end) == inside
        assert by_name["postprocess_keys"].sums == by_name["backward"].key_sums
        assert by_name["preprocess"].num_key_sums * 16 == 16 * 128 * 8 * 2 * 128 * 4


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", list(hopper_kernels.PART_TILES))
def test_wide_heads_take_a_kernel_for_keys_and_one_for_queries(launched, dims, deterministic):
    q, k, v, bands = tensors(dims=dims)
    options, dout, row = (
        AttnOptions(0.1, deterministic=deterministic),
        torch.randn(300, 4, dims[1]),
        torch.zeros(300, 4),
    )
    for _ in range(2):
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        hopper.backward(BackwardInputs(q, k, v, dout, row, row), bands, options, Gradients(*grads))
    assert launched == ["preprocess", "backward_keys", "backward_queries"] * 2
    by_name = launched.params
    keys, queries = by_name["backward_keys"], by_name["backward_queries"]
    assert (keys.dk, keys.dk_row, keys.dk_head) == (grads[1].data_ptr(), 2 * dims[0], dims[0])
    assert (keys.dv, keys.dv_row, keys.dv_head) == (grads[2].data_ptr(), 2 * dims[1], dims[1])
    assert (queries.dq, queries.dq_row, queries.dq_head) == (grads[0].data_ptr(), 4 * dims[0], dims[0])
    assert (keys.num_tiles, queries.num_tiles, queries.head_section) == (7, 3, 4)
    assert keys.splits == 1 or not deterministic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_what_a_plain_step_runs_is_compiled_ahead(launched, monkeypatch, documents, dtype, dim, deterministic):
    asked = []

    def load(_device, name, defines, threads, size):
        asked.append(hopper_kernels.KernelVariant(name, defines, threads, size))
        return hopper_driver.Kernel(name, threads, size)

    monkeypatch.setattr(hopper_kernels, "_load", load)
    q, k, v, bands = (t[..., :dim].contiguous() if isinstance(t, torch.Tensor) else t for t in tensors(dtype))
    if documents:
        bands = builders.varlen(doc_lengths=[100] * 3, causal=True).bands
    options, out, lse = AttnOptions(0.1, deterministic=deterministic), torch.empty_like(q), torch.empty(300, 4)
    hopper.forward(ForwardInputs(q, k, v), bands, options, ForwardOutput(out, lse))
    delta = hopper.row_delta(q, out)
    grads = tuple(torch.empty_like(t) for t in (q, k, v))
    hopper.backward(BackwardInputs(q, k, v, q, lse, delta), bands, options, Gradients(*grads))
    assert len(asked) == (5 if deterministic else 6) and set(asked) <= set(hopper_kernels.common_kernels())


def test_tensors_that_do_not_begin_at_16_bytes_are_copied_though_a_launch_for_their_strides_is_known(
    launched, monkeypatch
):
    _, k, v, bands = tensors()
    storage, moved = torch.randn(300 * 4 * 128 + 8).bfloat16(), []
    monkeypatch.setattr(hopper_driver, "move_tensor_map", lambda _at, address: moved.append(address))
    q, shifted = storage[:-8].view(300, 4, 128), storage[1:-7].view(300, 4, 128)
    for x, out in ((q, torch.empty_like(q)), (shifted, torch.empty_like(q)), (q, torch.empty_like(q))):
        moved.clear()
        hopper.forward(ForwardInputs(x, k, v), bands, AttnOptions(0.1), ForwardOutput(out, torch.empty(300, 4)))
        assert launched.params["forward"].out == out.data_ptr()
        assert moved[0] % 16 == 0 and (moved[0] == x.data_ptr()) == (x is q)
    assert launched == ["forward"] * 3


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_output_that_does_not_begin_at_16_bytes_is_computed_elsewhere_and_copied(launched, dtype, accumulate):
    q, k, v, bands = tensors()
    storage = torch.zeros(300 * 4 * 128 + 8, dtype=dtype)
    for first in (0, 1):
        out = storage[first : first - 8].view(300, 4, 128)
        hopper.forward(
            ForwardInputs(q, k, v), bands, AttnOptions(0.1), ForwardOutput(out, torch.zeros(300, 4), accumulate)
        )
        written = launched.params["forward"].out
        assert written % 16 == 0 and (written == out.data_ptr()) == (first == 0)
    assert launched == ["forward"] * 2


def test_a_sink_of_all_rows_and_one_of_each_row_have_launches_of_their_own(launched):
    q, k, v, bands = tensors()
    found = []
    for sink in (torch.zeros(4), torch.zeros(1, 4), torch.zeros(300, 4), torch.zeros(4)):
        hopper.forward(
            ForwardInputs(q, k, v, sink),
            bands,
            AttnOptions(0.1),
            ForwardOutput(torch.empty_like(q), torch.empty(300, 4)),
        )
        found.append((launched.params["forward"].sink_row, launched.params["forward"].sink_lse == sink.data_ptr()))
    assert found == [(0, True), (0, True), (4, True), (0, True)]


def test_a_prepared_launch_follows_its_tensors(launched, monkeypatch):
    moved = []
    monkeypatch.setattr(hopper_driver, "move_tensor_map", lambda _at, address: moved.append(address))
    q, k, v, bands = tensors()
    out, lse = torch.empty_like(q), torch.empty(300, 4)
    other = q.clone()
    for x in (q, q, other):
        hopper.forward(ForwardInputs(x, k, v), bands, AttnOptions(0.1), ForwardOutput(out, lse))
        params = launched.params["forward"]
        assert (params.out, params.lse) == (out.data_ptr(), lse.data_ptr())
    assert moved == [t.data_ptr() for t in (q, k, v, out, other)]  # each once


def test_nothing_runs_without_rows_and_gradients_without_keys_are_zero(launched):
    q, k, v, bands = tensors()
    options, empty = AttnOptions(0.1), bands[:0]
    hopper.forward(ForwardInputs(q[:0], k, v), empty, options, ForwardOutput(q[:0], torch.empty(0, 4)))
    grads = (torch.full_like(q, torch.nan), k[:0].clone(), v[:0].clone())
    row = torch.zeros(300, 4)
    hopper.backward(BackwardInputs(q, k[:0], v[:0], q, row, row), empty, options, Gradients(*grads))
    assert launched == [] and bool((grads[0] == 0).all())


def test_other_machines_dtypes_and_head_dims_are_refused_by_name(monkeypatch):
    q, k, v, bands = tensors()

    def run(q, k, v):
        hopper.forward(ForwardInputs(q, k, v), bands, AttnOptions(0.1), ForwardOutput(q, torch.empty(300, 4)))

    with pytest.raises(ValueError, match=r"impl: 'ffa' needs a Hopper GPU.*q is on cpu; use 'torch'"):
        run(q, k, v)
    monkeypatch.setattr(hopper_support, "_is_hopper", lambda _device: True)
    with pytest.raises(ValueError, match=r"q: impl 'ffa' takes bf16 and fp16, got torch.float32"):
        run(q.float(), k.float(), v.float())
    with pytest.raises(
        ValueError, match=r"q, v: impl 'ffa' takes head dims that are multiples of 8 up to 256, got 100 "
    ):
        run(q[..., :100], k[..., :100], v)
