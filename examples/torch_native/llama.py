"""A small Llama written out. Attention is a function that is passed in, all else works on rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of the model."""

    vocabulary: int = 256
    hidden: int = 64
    num_layers: int = 2
    num_heads_q: int = 4
    num_heads_kv: int = 2
    ffn: int = 172
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads_q


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size = size
        kv = 2 * size.num_heads_kv * size.head_dim
        self.qkv = nn.Linear(size.hidden, size.hidden + kv, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.up = nn.Linear(size.hidden, 2 * size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """Rows ``[num_rows, hidden]``; ``rotation`` complex ``[num_rows, 1, head_dim / 2]``."""
        size = self.size
        qkv = self.qkv(self.attention_norm(x)).view(len(x), -1, size.head_dim)
        q, k, v = qkv.split([size.num_heads_q, size.num_heads_kv, size.num_heads_kv], dim=1)
        x = x + self.out(attend(_rotate(q, rotation), _rotate(k, rotation), v).flatten(1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Decoder with rotary positions. Layers recompute all but their matrix products in the backward pass."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits ``[num_rows, vocabulary]`` of rows at ``positions``; ``attend(q, k, v)`` is their attention."""
        power = torch.arange(0, self.size.head_dim, 2, device=tokens.device) / self.size.head_dim
        angles = positions[:, None, None] * self.size.rope_base**-power
        rotation = torch.polar(torch.ones_like(angles), angles)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, rotation, attend, use_reentrant=False, context_fn=_keep_products)
        return self.head(self.norm(x))


def _keep_products():
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def policy(_context, operation, *_args, **_kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
