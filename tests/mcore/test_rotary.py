"""Rotary embedding of several sequences by a fused kernel, which takes one row of angles for a place of all."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import attention

from megatron_magi.mcore import rotary, seams

SEQLEN, BATCH_SIZE, NUM_HEADS, HEAD_DIM, ROTARY_DIM = 5, 3, 2, 8, 6


@pytest.fixture
def installed(monkeypatch):
    """Megatron's attention rotates by the function of this package."""
    monkeypatch.setattr(
        attention, "apply_rotary_pos_emb", seams.original("core.transformer.attention:apply_rotary_pos_emb")
    )
    rotary.install()


@pytest.fixture
def calls(installed, monkeypatch):
    """Shapes that the kernel was called with; it refuses what Transformer Engine's does."""
    found = []

    def kernel(t, freqs, interleaved=False):
        found.append((tuple(t.shape), tuple(freqs.shape)))
        assert freqs.shape[1:3] == (1, 1) and freqs.dtype == torch.float32
        rotated = rope_utils._apply_rotary_pos_emb_bshd(t.float(), freqs, rotary_interleaved=interleaved)
        return rotated.to(t.dtype)

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", kernel)
    return found


def rotate(t, freqs, *, fused=True, interleaved=False, sections=None, mscale=1.0):
    config = SimpleNamespace(
        apply_rope_fusion=fused, rotary_interleaved=interleaved, mrope_section=sections, multi_latent_attention=False
    )
    return attention.apply_rotary_pos_emb(t, freqs, config=config, cu_seqlens=None, mscale=mscale, cp_group=object())


def tokens(dtype=torch.bfloat16, rotary_dim=ROTARY_DIM):
    generator = torch.Generator().manual_seed(0)
    # Queries are a slice of what the projection returns.
    mixed = torch.randn(SEQLEN, BATCH_SIZE, NUM_HEADS, 3 * HEAD_DIM, generator=generator).to(dtype)
    angles = 9 * torch.rand(SEQLEN, BATCH_SIZE, 1, rotary_dim // 2, generator=generator)
    return mixed[..., HEAD_DIM : 2 * HEAD_DIM].requires_grad_(), torch.cat([angles, angles], -1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_sequence_is_rotated_by_its_own_angles_in_fp32(calls, interleaved):
    t, freqs = tokens()
    out = rotate(t, freqs, interleaved=interleaved)
    assert calls == [((SEQLEN * BATCH_SIZE, 1, NUM_HEADS, HEAD_DIM), (SEQLEN * BATCH_SIZE, 1, 1, ROTARY_DIM))]
    exact = rope_utils._apply_rotary_pos_emb_bshd(t.double(), freqs.double(), rotary_interleaved=interleaved)
    torch.testing.assert_close(out, exact.to(torch.bfloat16), rtol=0, atol=0)
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    (grad,) = torch.autograd.grad(out, t, weights)
    (expected,) = torch.autograd.grad(exact, t, weights.double())
    torch.testing.assert_close(grad, expected, rtol=0, atol=2**-6)


def test_angles_that_all_sequences_share_reach_the_kernel_as_they_are(calls):
    t, freqs = tokens()
    rotate(t, freqs[:, :1])
    assert calls == [((SEQLEN, BATCH_SIZE, NUM_HEADS, HEAD_DIM), (SEQLEN, 1, 1, ROTARY_DIM))]


@pytest.mark.filterwarnings("ignore:apply_rope_fusion does not support mRoPE", "ignore:mscale=")
@pytest.mark.parametrize("options", [{"fused": False}, {"sections": [1, 1, 1]}, {"mscale": 1.25}])
def test_what_is_not_for_the_kernel_is_left_to_megatron(calls, options):
    t, freqs = tokens()
    out = rotate(t, freqs, **options)
    assert calls == []
    mscale = options.get("mscale", 1.0)
    torch.testing.assert_close(out, rope_utils._apply_rotary_pos_emb_bshd(t, freqs, mscale=mscale), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.filterwarnings("ignore:mscale=")
@pytest.mark.parametrize("mscale", [1.0, 1.25])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, ROTARY_DIM], ids=["whole", "partial"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_transformer_engines_kernel_rotates_each_sequence_by_its_own_angles(installed, interleaved, rotary_dim, mscale):
    t, freqs = (x.detach().cuda() for x in tokens(rotary_dim=rotary_dim))
    t.requires_grad_()
    out = rotate(t, freqs, interleaved=interleaved, mscale=mscale)
    exact = rope_utils._apply_rotary_pos_emb_bshd(
        t.double(), freqs.double(), rotary_interleaved=interleaved, mscale=mscale
    )
    # With a scale Megatron rotates itself, by sines and cosines rounded to 16 bits.
    tolerance = {"rtol": 2**-7, "atol": 2**-10 if mscale == 1 else 2**-5}
    torch.testing.assert_close(out.double(), exact, **tolerance)
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).cuda().to(torch.bfloat16)
    (grad,) = torch.autograd.grad(out, t, weights)
    (expected,) = torch.autograd.grad(exact, t, weights.double())
    torch.testing.assert_close(grad, expected, rtol=2**-7, atol=2**-5)
