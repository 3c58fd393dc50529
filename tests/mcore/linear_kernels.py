"""Definitions in torch of the kernels that Megatron's linear layers call, which exist for GPUs only.

For tests alone: `install` puts them where Megatron looks for those of mamba-ssm, causal-conv1d and
flash-linear-attention. They define what a document is by masks and by computing each alone, so they carry no state.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor, *,
    chunk_size: int, activation: str, headdim: int, ngroups: int, norm_before_gate: bool, seq_idx: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mamba 2 of ``[batch, seqlen, d]`` as a masked product: each token with all before it in its document.

    Computed in fp64: differences of sums over the sequence would lose what comes late in it.
    """
    dtype, zxbcdt = zxbcdt.dtype, zxbcdt.double()
    batch, seqlen, width = zxbcdt.shape
    heads, inner = len(D), len(D) * headdim
    states = (width - 2 * inner - heads) // 2
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * states, heads], -1)
    document = torch.zeros(batch, seqlen, dtype=torch.int32) if seq_idx is None else seq_idx
    same = document.unsqueeze(2) == document.unsqueeze(1)
    x, b, c = F.silu(_short_conv(xbc, conv1d_weight, conv1d_bias, same)).split([inner, states, states], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for t in (b, c))
    dt = F.softplus(dt + dt_bias)
    elapsed = (dt * A).cumsum(1)  # [batch, seqlen, heads]
    visible = (same & torch.ones(seqlen, seqlen, dtype=torch.bool).tril()).unsqueeze(-1)
    decay = (elapsed.unsqueeze(2) - elapsed.unsqueeze(1)).masked_fill(~visible, -torch.inf).exp()
    weights = torch.einsum("bqhn,bkhn->bqkh", c, b) * decay * dt.unsqueeze(1)
    y = torch.einsum("bqkh,bkhp->bqhp", weights, x) + x * D.unsqueeze(-1)
    return (y.flatten(2) * F.silu(z)).to(dtype)


def _short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, same: Tensor) -> Tensor:
    """Causal, one channel at a time: weight ``[channels, width]``; ``same``: which tokens are of one document."""
    out, width = torch.zeros_like(x) if bias is None else bias.expand_as(x), weight.shape[1]
    for back in range(min(width, x.shape[1])):
        seen = F.pad(same.diagonal(-back, 1, 2), (back, 0)).unsqueeze(-1)
        out = out + F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] * seen * weight[:, width - 1 - back]
    return out


def _same(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    document = torch.zeros(x.shape[1]) if cu_seqlens is None else torch.bucketize(
        torch.arange(x.shape[1]), cu_seqlens[1:], right=True
    )  # fmt: skip
    return (document.unsqueeze(0) == document.unsqueeze(1)).expand(x.shape[0], -1, -1)


def causal_conv1d(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, initial_state: None, output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, None]:  # fmt: skip
    """Convolution and SiLU of ``[batch, seqlen, channels]``, inside documents."""
    return F.silu(_short_conv(x, weight, bias, _same(x, cu_seqlens))), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Each last dimension over its norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Megatron's own rule in torch, of one document after another."""
    from megatron.core.ssm.gated_delta_net.gdn import torch_chunk_gated_delta_rule

    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = []
    for begin, end in itertools.pairwise(bounds):
        part = (x[:, begin:end] for x in (q, k, v))
        out, _ = torch_chunk_gated_delta_rule(*part, g=g[:, begin:end], beta=beta[:, begin:end], chunk_size=16)
        parts.append(out)
    return torch.cat(parts, 1), None


class GatedNorm(nn.Module):
    """RMS norm in groups, as Mamba's; the gate is applied before it."""

    def __init__(
        self, hidden_size: int, *, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Of ``[..., hidden_size]``."""
        groups = x.unflatten(-1, (-1, self.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        """As Megatron's class for this norm, which does not exist without the kernels."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=getattr(self, "tp_group", None),
            dp_cp_group=metadata["dp_cp_group"],
        )


def tune_less() -> None:
    """Triton kernels that are defined from now on take one configuration, a small one, of those they could choose of.

    To compile and time all takes minutes, for results that do not depend on it.
    """
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def size(config: Any) -> int:
        return config.num_stages * math.prod(x for x in config.kwargs.values() if isinstance(x, int) and x)

    @functools.wraps(init)
    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **options: Any) -> None:
        init(self, fn, arg_names, [min(configs, key=size)] if configs else configs, *args, **options)

    Autotuner.__init__ = with_one


def install() -> None:
    """Puts the definitions into Megatron's modules of linear layers."""
    from megatron.core.ssm import mamba_mixer

    from megatron_magi.mcore.versions import found_version, release

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = mamba_mixer.RMSNormGated = GatedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan_combined
    mamba_mixer._check_mamba_sequence_packing_support = lambda **options: (True, None)
    if release(found_version()) < (0, 19):
        return  # gated delta nets are refused
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.causal_conv1d = causal_conv1d
    gdn.chunk_gated_delta_rule = chunk_gated_delta_rule
