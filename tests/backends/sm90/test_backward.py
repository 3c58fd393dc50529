"""The Hopper backward kernel against fp64."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import choices as hopper_choices
from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.choices import WHOLE_TILE
from megatron_magi.backends.sm90.plan import Tiling
from megatron_magi.backends.sm90.program import LaunchProgram, new_makers
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, Gradients
from megatron_magi.ops.slice_attention import slice_attention
from tests.backends.sm90.cases import (
    FREE,
    MASKS,
    NARROW_DIMS,
    Inputs,
    assert_as_good,
    exact_backward,
    exact_forward,
    make_inputs,
    pack_heads,
    plain_attention,
    poisoned,
    random_bands,
    run_backward,
    run_forward,
    table,
)
from tests.gpu_memory import needs_gigabytes

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

WAYS = {"accumulated": (True, 1), "separate": (False, 1), "separate, packed": (False, 8)}
"""Ways to compute dq: whether as sums in memory, else by a kernel of its own; and how many heads are packed at most."""
SHAPES = [(128, 128), (64, 300), (1, 1), (333, 517), (700, 129), (1024, 1024)]


def check(x: Inputs) -> None:
    out, lse, _ = run_forward(x)
    grads = run_backward(x, out, lse)
    visible = x.visible
    for name, got, plain, exact in zip(
        ("dq", "dk", "dv"), grads, plain_attention(x)[1:], exact_backward(x), strict=True
    ):
        assert_as_good(name, got, plain, exact)
        unseen = ~visible.any(1 if name == "dq" else 0)
        assert bool((got[unseen] == 0).all()), f"{name} of tokens in no pair is not zero"


KERNEL_DIMS = list(hopper_kernels.BACKWARD_DIMS)


def all_ways(all_dims):
    """Parameters ``dims`` and ``way``: dq as sums in memory, if a kernel does so, and by a kernel of its own."""
    kernels = {d: hopper_kernels.kernel_dims(d) for d in all_dims}
    ways = [
        (d, way) for d in all_dims for way in WAYS if way != "accumulated" or kernels[d] in hopper_kernels.WHOLE_DIMS
    ]
    return pytest.mark.parametrize(("dims", "way"), ways, indirect=["way"], ids=str)


@pytest.fixture
def way(request, monkeypatch):
    """How dq is computed, whatever the mask."""
    accumulated, most = WAYS[request.param]
    monkeypatch.setattr(hopper_choices, "sums_pay", lambda *_: accumulated)
    pack_heads(monkeypatch, most)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@all_ways(KERNEL_DIMS)
def test_gradients_match_fp64(dims, way, mask, shape):
    check(make_inputs(MASKS[mask](*shape), *shape, dims=dims))


@pytest.mark.parametrize("seed", range(40))
@all_ways(KERNEL_DIMS)
def test_random_bands_match_fp64(dims, way, seed):
    rng = np.random.default_rng(seed)
    num_rows, num_keys = rng.integers(1, 900, 2).tolist()
    heads = [(8, 2), (1, 1), (8, 1), (3, 3), (6, 1)][seed % 5]
    check(make_inputs(random_bands(rng, num_rows, num_keys), num_rows, num_keys, heads=heads, dims=dims, seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@all_ways([*hopper_kernels.BACKWARD_DIMS, *NARROW_DIMS])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_every_compiled_kernel_matches_fp64(dims, way, dtype, softcap):
    for mask, shape in (("causal", (300, 300)), ("full", (200, 2000)), ("global_and_window", (257, 400))):
        check(make_inputs(MASKS[mask](*shape), *shape, dims=dims, dtype=dtype, softcap=softcap))


@all_ways(KERNEL_DIMS)
def test_long_sequences_and_many_heads_match_fp64(dims, way):
    check(make_inputs(MASKS["causal"](5000, 5000), 5000, 5000, heads=(2, 2), dims=dims))
    check(make_inputs(MASKS["window"](640, 640), 640, 640, heads=(128, 128), dims=dims))
    check(make_inputs(MASKS["causal"](640, 640), 640, 640, heads=(128, 32), dims=dims))
    check(make_inputs(MASKS["causal"](640, 640), 640, 640, heads=(40, 5), dims=dims))


def test_tiles_worked_on_in_pieces_match_fp64():
    heads, num_sms = 8, torch.cuda.get_device_properties(0).multi_processor_count
    rows = 128 * (num_sms // heads + 1)  # a few items more than one round
    x = make_inputs(MASKS["full"](rows, rows), rows, rows, heads=(heads, 1))
    check(x)
    plan = hopper_plan.device_plan(x.bands, Tiling(True, rows, WHOLE_TILE), x.q.device)
    assert any(bool(schedule.items[:, 3].any()) for schedule in plan.schedules.values())


@all_ways([*KERNEL_DIMS, (96, 80), (160, 160)])
def test_gradients_add_to_given_fp32_and_bf16(dims, way):
    x = make_inputs(MASKS["causal"](300, 400), 300, 400, dims=dims)
    out, lse, _ = run_forward(x)
    plain, exact = plain_attention(x)[1:], exact_backward(x)
    for dtype in (torch.float32, torch.bfloat16):
        start = tuple(torch.randn(t.shape, device="cuda").to(dtype) for t in (x.q, x.k, x.v))
        grads = run_backward(x, out, lse, grads=tuple(t.clone() for t in start))
        for name, got, before, *add in zip(("dq", "dk", "dv"), grads, start, plain, exact, strict=True):
            assert_as_good(f"{name} {dtype}", got, before + add[0], before.double() + add[1])


@pytest.mark.parametrize("heads", [(4, 2), (64, 8)])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_dq_is_added_to_while_dk_and_dv_are_written(heads, way):
    x = make_inputs(MASKS["causal"](300, 400), 300, 400, heads=heads)
    out, lse, _ = run_forward(x)
    start = torch.randn(x.q.shape, device="cuda")
    grads = (start.clone(), poisoned(x.k.shape, torch.bfloat16), poisoned(x.v.shape, torch.bfloat16))
    delta = hopper.row_delta(x.dout, out)
    hopper.backward(
        BackwardInputs(x.q, x.k, x.v, x.dout, lse, delta), x.bands, x.options, Gradients(*grads, True, False)
    )
    starts = (start, torch.zeros_like(x.k), torch.zeros_like(x.v))
    for name, got, before, plain, exact in zip(
        ("dq", "dk", "dv"), grads, starts, plain_attention(x)[1:], exact_backward(x), strict=True
    ):
        assert_as_good(name, got, before + plain, before.double() + exact)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float64])
@all_ways(KERNEL_DIMS)
def test_gradients_of_a_dtype_are_written_whole(dims, way, grad_dtype):
    x = make_inputs(MASKS["documents"](390, 400), 390, 400, dims=dims)
    out, lse, _ = run_forward(x)
    grads = run_backward(x, out, lse, grad_dtype=grad_dtype)
    for name, got, plain, exact in zip(
        ("dq", "dk", "dv"), grads, plain_attention(x)[1:], exact_backward(x), strict=True
    ):
        assert got.dtype == grad_dtype
        assert_as_good(name, got, plain, exact)


@all_ways(KERNEL_DIMS)
def test_lse_of_more_keys_gives_the_part_of_these_keys(dims, way):
    whole = make_inputs(MASKS["causal"](500, 700), 500, 700, dims=dims)
    out, lse, _ = run_forward(whole)
    plain, exact = plain_attention(whole)[1:], exact_backward(whole)
    dq = torch.zeros(whole.q.shape, device="cuda")
    delta = hopper.row_delta(whole.dout, out)
    for k0, k1 in ((0, 300), (300, 700)):
        part = whole.bands.copy()
        part[:, 2:4] = np.clip(part[:, 2:4], k0, k1) - k0
        part[:, 4:6] = (-(1 << 40), part[0, 5] - k0)
        k, v = whole.k[k0:k1], whole.v[k0:k1]
        dk, dv = (torch.zeros(t.shape, device="cuda") for t in (k, v))
        hopper.backward(
            BackwardInputs(whole.q, k, v, whole.dout, lse, delta),
            part,
            whole.options,
            Gradients(dq, dk, dv, True, True),
        )
        for i, got in enumerate((dk, dv), 1):
            assert_as_good(("dq", "dk", "dv")[i], got, plain[i][k0:k1], exact[i][k0:k1])
    assert_as_good("dq", dq, plain[0], exact[0])


@pytest.mark.parametrize("dims", [(128, 128), (96, 80)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (2, 2)])
@pytest.mark.parametrize("rows", [500, 5000])
@pytest.mark.parametrize("way", ["accumulated"], indirect=True)
def test_parts_sum_dq_in_one_place_and_the_last_writes_it(way, rows, heads, dims):
    """Long tiles too, whose sums of dk and dv lie in dq until then; and again, with what was remembered."""
    keys = rows + 200
    whole = make_inputs(MASKS["causal"](rows, keys), rows, keys, heads=heads, dims=dims)
    out, lse, _ = run_forward(whole)
    plain, exact = plain_attention(whole)[1:], exact_backward(whole)
    delta, programs = hopper.row_delta(whole.dout, out), {}
    for _ in range(3):
        dq, shared = poisoned(whole.q.shape, whole.q.dtype), hopper.SharedSums(3)
        for k0, k1 in ((0, 300), (300, 350), (350, keys)):
            part = whole.bands.copy()
            part[:, 2:4] = np.clip(part[:, 2:4], k0, k1) - k0
            part[:, 4:6] = (-(1 << 40), part[0, 5] - k0)
            k, v = whole.k[k0:k1], whole.v[k0:k1]
            dk, dv = poisoned(k.shape, torch.float32), poisoned(v.shape, torch.float32)
            program = programs.setdefault(k0, LaunchProgram(part, k1 - k0, new_makers()))
            hopper.backward(
                BackwardInputs(whole.q, k, v, whole.dout, lse, delta),
                part,
                whole.options,
                Gradients(dq, dk, dv, True, False),
                program=program,
                shared=shared,
            )
            for i, got in enumerate((dk, dv), 1):
                assert_as_good(("dq", "dk", "dv")[i], got, plain[i][k0:k1], exact[i][k0:k1])
        assert_as_good("dq", dq, plain[0], exact[0])
        assert shared.left == 0 and all(len(program.bound) == 1 for program in programs.values())


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "one_token", "empty"])
@all_ways([*KERNEL_DIMS, (96, 80)])
def test_what_lies_behind_the_last_visible_row_and_key_is_never_used(dims, way, mask):
    x = make_inputs(MASKS[mask](300, 400), 333, 450, dims=dims)
    last_row, last_key = x.bands[:, 1].max(initial=0), x.bands[:, 3].max(initial=0)
    padded = Inputs(x.q.clone(), x.k.clone(), x.v.clone(), x.dout.clone(), x.bands, x.options)
    for t, last in ((padded.q, last_row), (padded.k, last_key), (padded.v, last_key), (padded.dout, last_row)):
        t[max(1, last) :] = torch.nan
    out, lse, _ = run_forward(padded)
    assert_as_good("out", out, plain_attention(x)[0], exact_forward(x)[0])
    for name, got, plain, exact in zip(
        ("dq", "dk", "dv"), run_backward(padded, out, lse), plain_attention(x)[1:], exact_backward(x), strict=True
    ):
        assert_as_good(name, got, plain, exact)


def test_row_delta_is_the_row_sum_and_ignores_garbage_where_out_is_zero():
    x = make_inputs(MASKS["documents"](390, 400), 390, 400)
    out, _, _ = run_forward(x)
    dout = x.dout.clone()
    dout[~x.visible.any(1)] = torch.nan
    want = torch.where(out == 0, 0, dout.double() * out.double()).sum(-1)
    torch.testing.assert_close(hopper.row_delta(dout, out).double(), want, atol=1e-4, rtol=1e-4)
    assert bool(torch.isfinite(exact_forward(x)[0]).all())


@pytest.mark.parametrize("mask", ["causal", "global_and_window"])
@pytest.mark.parametrize("dims", [*KERNEL_DIMS, (96, 96)], ids=str)
def test_deterministic_gradients_repeat_bit_by_bit_and_match_fp64(dims, mask):
    x = make_inputs(MASKS[mask](1500, 1500), 1500, 1500, heads=(8, 2), dims=dims)
    x.options = AttnOptions(x.options.softmax_scale, deterministic=True)
    check(x)
    out, lse, _ = run_forward(x)
    first = run_backward(x, out, lse)
    for _ in range(100):
        again = run_backward(x, out, lse)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("packed", [1, 8])
def test_dq_inside_a_larger_tensor_is_written_and_nothing_beside_it(monkeypatch, packed):
    pack_heads(monkeypatch, packed)
    x = make_inputs(MASKS["causal"](300, 300), 300, 300)
    x.options = AttnOptions(x.options.softmax_scale, deterministic=True)
    out, lse, _ = run_forward(x)
    around = torch.full((16, 320, 256), 7.0, device="cuda", dtype=torch.bfloat16)
    dq = around.transpose(0, 1)[:300, :, 64:192]
    dq.fill_(torch.nan)
    grads, delta = (dq, poisoned(x.k.shape, x.k.dtype), poisoned(x.v.shape, x.v.dtype)), hopper.row_delta(x.dout, out)
    hopper.backward(BackwardInputs(x.q, x.k, x.v, x.dout, lse, delta), x.bands, x.options, Gradients(*grads))
    assert_as_good("dq", dq, plain_attention(x)[1], exact_backward(x)[0])
    dq.fill_(7.0)
    assert bool((around == 7.0).all())


@pytest.mark.parametrize("deterministic", [False, True])
@all_ways([*hopper_kernels.BACKWARD_DIMS, (96, 80)])
def test_autograd_through_views_of_one_projection_matches_fp64(dims, way, deterministic):
    x = make_inputs(MASKS["causal"](300, 300), 300, 300, dims=dims)
    columns = dims[0], dims[0], dims[1]
    heads = 16, 2, 2
    widths = [h * c for h, c in zip(heads, columns, strict=True)]
    joined = torch.cat([t.flatten(1) for t in (x.q, x.k, x.v)], dim=1).requires_grad_()
    parts = joined.split(widths, dim=1)
    q, k, v = (t.view(300, h, c) for t, h, c in zip(parts, heads, columns, strict=True))
    out, _ = slice_attention(q, k, v, x.bands, deterministic=deterministic, impl="ffa")
    out.backward(x.dout)
    grads = joined.grad.split(widths, dim=1)
    for name, got, plain, exact in zip(
        ("dq", "dk", "dv"), grads, plain_attention(x)[1:], exact_backward(x), strict=True
    ):
        assert_as_good(name, got, plain.flatten(1), exact.flatten(1))


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_offsets_past_2_to_the_31_reach_their_place(way):
    """300,000 rows of 64 heads: the last rows of q, dout and dq, and most sums of dq, lie past 2^31 elements."""
    needs_gigabytes(40)
    num, part = 300_000, 500
    q, dout = (torch.randn(num, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(num, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bands = table([[a, a + part, a, a + part, -FREE, 1] for a in (0, num - part)])
    x = Inputs(q, k, v, dout, bands, AttnOptions(128**-0.5))
    grads = run_backward(x, *run_forward(x)[:2])
    for a in (0, num - part):
        cut = slice(a, a + part)
        piece = Inputs(q[cut], k[cut], v[cut], dout[cut], table([[0, part, 0, part, -FREE, 1]]), x.options)
        for name, got, plain, exact in zip(
            ("dq", "dk", "dv"), grads, plain_attention(piece)[1:], exact_backward(piece), strict=True
        ):
            assert_as_good(name, got[cut], plain, exact)
    for got in grads:
        assert not bool(got[part : num - part].any())


def test_a_thread_that_never_used_the_device_can_launch():
    # Autograd's threads are such: the first thing that they do may be a kernel here, loaded then or before.
    out = torch.randn((300, 4, 128), device="cuda", dtype=torch.bfloat16)
    spare = torch.empty((300, 4), device="cuda")
    del spare  # so that the kernel's output comes from torch's cache, without a call of the runtime
    for _ in range(2):
        found = []
        thread = threading.Thread(target=lambda found=found: found.append(hopper.row_delta(out, out)))
        thread.start()
        thread.join()
        assert torch.allclose(found[0], (out.double() ** 2).sum(-1).float(), rtol=1e-4)
