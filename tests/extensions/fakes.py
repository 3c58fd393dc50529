"""What flash-attn's modules offer, in dense fp64: forwards that return out and lse, backwards that use these two.

Names, arguments and their order are those of flash-attn 2.8, FlashAttention 3 and 4. Causal masks and windows end at
the last key, as there; a row that sees nothing has lse inf in version 2 and -inf in the others.
"""

import sys
from itertools import pairwise
from types import ModuleType

import torch


def seen(sq, sk, causal, left, right):
    """Bool ``[sq, sk]``."""
    row, column = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None]
    right = 0 if causal else right
    out = torch.ones(sq, sk, dtype=torch.bool)
    if left is not None and left >= 0:
        out &= column >= row - left
    if right is not None and right >= 0:
        out &= column <= row + right
    return out


def kept(shape, dropout_p, rng_state):
    """Factors of probabilities under dropout."""
    if not dropout_p:
        return torch.ones(shape, dtype=torch.float64)
    draw = torch.Generator().manual_seed(int(rng_state))
    return (torch.rand(shape, generator=draw, dtype=torch.float64) >= dropout_p) / (1 - dropout_p)


class Dense:
    """One sequence, q ``[sq, hq, d]``, k and v ``[sk, hkv, d]``."""

    def __init__(self, q, k, v, scale, softcap, visible):
        self.q, self.group = q, q.shape[1] // k.shape[1]
        self.k, self.v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
        self.scale, self.softcap, self.visible = scale, softcap, visible
        raw = torch.einsum("qhd,khd->hqk", q, self.k) * scale
        self.capped = softcap * torch.tanh(raw / softcap) if softcap else raw
        self.logits = self.capped.masked_fill(~visible, -torch.inf)

    def forward(self, empty_lse, factors):
        lse = self.logits.logsumexp(-1)
        p = torch.exp(self.logits - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        return torch.einsum("hqk,khd->qhd", p * factors, self.v), lse.masked_fill(lse == -torch.inf, empty_lse)

    def backward(self, dout, out, lse, factors):
        p = torch.exp(self.logits - lse[..., None])
        delta = (dout * out).sum(-1).t()[..., None]
        dp = torch.einsum("qhd,khd->hqk", dout, self.v) * factors
        ds = p * (dp - delta) * self.scale
        if self.softcap:
            ds = ds * (1 - (self.capped / self.softcap) ** 2)
        heads = (*self.k.shape[:1], -1, self.group, self.k.shape[-1])
        dk, dv = torch.einsum("hqk,qhd->khd", ds, self.q), torch.einsum("hqk,qhd->khd", p * factors, dout)
        return torch.einsum("hqk,khd->qhd", ds, self.k), dk.reshape(heads).sum(2), dv.reshape(heads).sum(2)


def parts(q, k, cu_seqlens_q, cu_seqlens_k):
    """Slices of queries and of keys, sequence by sequence; of a batch its entries."""
    if cu_seqlens_q is None:
        return [(i, i) for i in range(len(q))]
    bounds = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    return list(zip(*([slice(a, b) for a, b in pairwise(x)] for x in bounds), strict=True))


def run(q, k, v, scale, causal, window, softcap, empty_lse, cu_seqlens=(None, None), dropout_p=0.0, rng_state=None):
    outs, lses = [], []
    for queries, keys in parts(q, k, *cu_seqlens):
        own = q[queries], k[keys], v[keys]
        one = Dense(*own, scale, softcap, seen(len(own[0]), len(own[1]), causal, *window))
        out, lse = one.forward(empty_lse, kept(one.logits.shape, dropout_p, rng_state))
        outs.append(out)
        lses.append(lse)
    if cu_seqlens[0] is None:
        return torch.stack(outs), torch.stack(lses)
    return torch.cat(outs), torch.cat(lses, dim=1)


def run_backward(
    dout, q, k, v, out, lse, scale, causal, window, softcap, cu_seqlens=(None, None), dropout_p=0.0, rng_state=None
):
    grads = [[], [], []]
    for queries, keys in parts(q, k, *cu_seqlens):
        own = q[queries], k[keys], v[keys]
        one = Dense(*own, scale, softcap, seen(len(own[0]), len(own[1]), causal, *window))
        own_lse = lse[queries] if cu_seqlens[0] is None else lse[:, queries]
        factors = kept(one.logits.shape, dropout_p, rng_state)
        for grad, own_grad in zip(grads, one.backward(dout[queries], out[queries], own_lse, factors), strict=True):
            grad.append(own_grad)
    return [(torch.stack if cu_seqlens[0] is None else torch.cat)(grad) for grad in grads]


def fill(grads, own_grads):
    for grad, own_grad in zip(grads, own_grads, strict=True):
        grad.copy_(own_grad)


def fa2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert q.shape[-1] % 8 == 0 and alibi_slopes is None and not return_softmax
    state = torch.tensor(7)
    window = window_size_left, window_size_right
    out, lse = run(q, k, v, softmax_scale, causal, window, softcap, torch.inf, (None, None), dropout_p, state)
    return out, lse, torch.empty(0), state


def fa2_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert q.shape[-1] % 8 == 0 and cu_seqlens_q.diff().max() <= max_seqlen_q
    state = torch.tensor(7)
    window, bounds = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k)
    out, lse = run(q, k, v, softmax_scale, causal, window, softcap, torch.inf, bounds, dropout_p, state)
    return out, lse, torch.empty(0), state


def fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    return fa2_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, None, None, None, None, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip


def fa2_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    window = window_size_left, window_size_right
    options = (softmax_scale, causal, window, softcap, (cu_seqlens_q, cu_seqlens_k), dropout_p, rng_state)
    fill((dq, dk, dv), run_backward(dout, q, k, v, out, softmax_lse, *options))
    return torch.empty(0)


def fa3_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    window, bounds = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k)
    return *run(q, k, v, softmax_scale, causal, window, softcap, -torch.inf, bounds), None, None


def fa3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    # The kernel takes such rows for lse 0.
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, 0)
    window, bounds = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k)
    options = (softmax_scale, is_causal, window, softcap, bounds)
    fill((dq, dk, dv), run_backward(dout, q, k, v, out, lse, *options))
    return torch.empty(0)


def fa4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1, pack_gqa=None, return_lse=False,
):  # fmt: skip
    assert return_lse and learnable_sink is None
    window, bounds = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k)
    return *run(q, k, v, softmax_scale, causal, window, softcap or 0.0, -torch.inf, bounds), None, None


def fa4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, pack_gqa=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    lse = lse.masked_fill(lse == -torch.inf, 0)
    window, bounds = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k)
    return tuple(run_backward(dout, q, k, v, out, lse, softmax_scale, causal, window, softcap, bounds))


def module(name, **functions):
    made = ModuleType(name)
    made.__dict__.update(functions)
    return made


def install(monkeypatch):
    """The modules by the names under which flash-attn installs them."""
    fa2 = module(
        "flash_attn.flash_attn_interface",
        _wrapped_flash_attn_forward=fa2_forward,
        _wrapped_flash_attn_backward=fa2_backward,
        _wrapped_flash_attn_varlen_forward=fa2_varlen_forward,
        _wrapped_flash_attn_varlen_backward=fa2_varlen_backward,
    )
    fa3 = module("flash_attn_interface", _flash_attn_forward=fa3_forward, _flash_attn_backward=fa3_backward)
    fa4 = module("flash_attn.cute.interface", _flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
    cute = module("flash_attn.cute", interface=fa4)
    package = module("flash_attn", flash_attn_interface=fa2, cute=cute)
    for made in (package, fa2, fa3, cute, fa4):
        monkeypatch.setitem(sys.modules, made.__name__, made)
