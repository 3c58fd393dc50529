"""The Hopper forward kernel against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import ForwardInputs, ForwardOutput
from tests.backends.sm90.cases import (
    FREE,
    MASKS,
    NARROW_DIMS,
    Inputs,
    assert_as_good,
    exact_forward,
    make_inputs,
    pack_heads,
    plain_attention,
    random_bands,
    run_forward,
    table,
)
from tests.gpu_memory import needs_gigabytes

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

SHAPES = [(128, 128), (64, 300), (1, 1), (333, 517), (700, 129), (1024, 1024)]


@pytest.fixture(params=[0, -1], ids=["flat", "tall"])
def tile(request, monkeypatch):
    """Each shape of tiles that there is for the head dims, whatever the mask."""
    tiles = hopper_kernels.FORWARD_TILES
    monkeypatch.setattr(hopper_kernels, "forward_tile", lambda dims, _keys, _packed: tiles[dims][request.param])


@pytest.fixture(params=[1, 8], ids=["single_heads", "packed_heads"])
def packed(request, monkeypatch, tile):
    """Both ways to share out the rows of a group of heads, whatever the mask."""
    pack_heads(monkeypatch, request.param)


def check(x: Inputs) -> None:
    out, lse, top = run_forward(x, return_max_logits=True)
    want, want_lse, want_top = exact_forward(x)
    assert_as_good("out", out, plain_attention(x)[0], want)
    empty = ~x.visible.any(1)
    assert bool((out[empty] == 0).all()) and bool((lse[empty] == -torch.inf).all())
    torch.testing.assert_close(lse[~empty].double(), want_lse[~empty], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(top.double(), want_top, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_output_lse_and_largest_logit_match_fp64(packed, mask, shape):
    check(make_inputs(MASKS[mask](*shape), *shape))


@pytest.mark.parametrize("seed", range(40))
def test_random_bands_match_fp64(packed, seed):
    rng = np.random.default_rng(seed)
    num_rows, num_keys = rng.integers(1, 900, 2).tolist()
    heads = [(8, 2), (1, 1), (8, 1), (3, 3), (6, 1)][seed % 5]
    check(make_inputs(random_bands(rng, num_rows, num_keys), num_rows, num_keys, heads=heads, seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [*hopper_kernels.FORWARD_TILES, *NARROW_DIMS], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_every_compiled_kernel_matches_fp64(packed, dims, dtype, softcap):
    for mask, shape in (("causal", (300, 300)), ("full", (200, 2000)), ("global_and_window", (257, 400))):
        check(make_inputs(MASKS[mask](*shape), *shape, dims=dims, dtype=dtype, softcap=softcap))


@pytest.mark.parametrize("dims", [(128, 128), (96, 80)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_stages_merge_to_the_whole(packed, out_dtype, dims):
    bands = MASKS["causal"](500, 700)
    whole = make_inputs(bands, 500, 700, dims=dims)
    want, want_lse, _ = exact_forward(whole)
    out = lse = None
    for k0, k1 in ((0, 300), (300, 700)):
        part = bands.copy()
        part[:, 2:4] = np.clip(part[:, 2:4], k0, k1)
        part[:, 2:4] -= k0
        part[:, 4] = -(1 << 40)
        part[:, 5] -= k0
        x = Inputs(whole.q, whole.k[k0:k1], whole.v[k0:k1], whole.dout, part, whole.options)
        out, lse, _ = run_forward(x, out=out, lse=lse, out_dtype=out_dtype)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-4, rtol=2e-4)
    assert out.dtype == out_dtype
    assert_as_good("out", out, plain_attention(whole)[0], want)


@pytest.mark.parametrize("per_row", [False, True])
def test_sink_joins_the_denominator(packed, per_row):
    x = make_inputs(MASKS["documents"](390, 400), 390, 400)
    sink = torch.randn((390, 16) if per_row else (16,), device="cuda")
    out, lse, _ = run_forward(x, sink_lse=sink)
    want, want_lse, _ = exact_forward(x, sink_lse=sink)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-4, rtol=2e-4)
    assert_as_good("out", out, plain_attention(x, sink.unsqueeze(-2))[0], want)


def test_strided_inputs_and_garbage_prior_of_empty_rows(packed):
    shape = (200, 260)
    x = make_inputs(MASKS["causal"](*shape), *shape)
    q = torch.randn(16, 200, 256, device="cuda").to(torch.bfloat16)[:, :, 128:].transpose(0, 1)
    x = Inputs(q, x.k, x.v, x.dout, x.bands, x.options)
    out = torch.full((200, 16, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
    lse = torch.full((200, 16), -torch.inf, device="cuda")
    out, lse, _ = run_forward(x, out=out, lse=lse)
    assert_as_good("out", out, plain_attention(x)[0], exact_forward(x)[0])


@pytest.mark.parametrize("heads_first", [False, True])
def test_an_output_inside_a_larger_tensor_is_written_and_nothing_beside_it(packed, heads_first):
    rows, heads = 300, 16
    x = make_inputs(MASKS["causal"](rows, rows), rows, rows)
    shape = (heads, rows + 20, 256) if heads_first else (rows + 20, heads, 256)
    around = torch.full(shape, 7.0, device="cuda", dtype=torch.bfloat16)
    out = (around.transpose(0, 1) if heads_first else around)[:rows, :, 64:192]
    lse = torch.empty(rows, heads, device="cuda")
    out.fill_(torch.nan)
    hopper.forward(ForwardInputs(x.q, x.k, x.v), x.bands, x.options, ForwardOutput(out, lse))
    assert_as_good("out", out, plain_attention(x)[0], exact_forward(x)[0])
    out.fill_(7.0)
    assert bool((around == 7.0).all())


def test_repeated_runs_are_bitwise_equal(packed):
    x = make_inputs(MASKS["causal"](1500, 1500), 1500, 1500, heads=(8, 2))
    first = run_forward(x)
    for _ in range(100):
        again = run_forward(x)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("kind", ["ramp", "huge", "late"])
@pytest.mark.parametrize("mask", ["full", "causal", "global_and_window"])
def test_logits_that_outgrow_the_first_block_match_fp64(packed, mask, kind, look):
    """Exponentials relative to an early maximum grow large (ramp, late) or overflow (huge)."""
    shape = (400, 1700)
    x = make_inputs(MASKS[mask](*shape), *shape)
    if kind == "ramp":
        x.k.mul_(torch.linspace(0.1, 12, shape[1], device="cuda")[:, None, None])
    elif kind == "late":
        x.k[1500:].mul_(6)
    else:
        x.q.mul_(8)
        x.k.mul_(8)
    out, lse, _ = run_forward(x, return_max_logits=look)
    want, want_lse, _ = exact_forward(x)
    assert_as_good("out", out, plain_attention(x)[0], want)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)


def test_offsets_past_2_to_the_31_reach_their_place():
    """300,000 rows of 64 heads: the last rows lie past 2^31 elements."""
    needs_gigabytes(24)
    num, part = 300_000, 500
    q = torch.randn(num, 64, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(num, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bands = table([[a, a + part, a, a + part, -FREE, 1] for a in (0, num - part)])
    x = Inputs(q, k, v, q, bands, AttnOptions(128**-0.5))
    out, lse, _ = run_forward(x)
    for a in (0, num - part):
        cut = slice(a, a + part)
        piece = Inputs(q[cut], k[cut], v[cut], q[cut], table([[0, part, 0, part, -FREE, 1]]), x.options)
        want, want_lse, _ = exact_forward(piece)
        assert_as_good("out", out[cut], plain_attention(piece)[0], want)
        torch.testing.assert_close(lse[cut].double(), want_lse, atol=2e-4, rtol=2e-4)
    between = slice(part, num - part)
    assert bool((out[between] == 0).all()) and bool((lse[between] == -torch.inf).all())
