"""Attention over the whole matrix, straight from its definition."""

import torch


def dense_attention(q, k, v, visible, *, sink=None, softmax_scale=None):
    """``(out, lse)`` of q ``[n, hq, d]``, k ``[m, hkv, d]``, v ``[m, hkv, dv]``, visible bool ``[n, m]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    logits = logits.masked_fill(~torch.as_tensor(visible), float("-inf"))
    if sink is not None:
        extra = sink.to(logits.dtype).t()[:, None, :].expand(-1, q.shape[0], -1)
        logits = torch.cat([logits, extra], dim=-1)
    lse = logits.logsumexp(dim=-1)
    # Rows that see nothing have lse -inf: they must give 0, not nan.
    weights = torch.exp(logits - lse.masked_fill(lse.isneginf(), 0.0)[..., None])[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), lse.t()
