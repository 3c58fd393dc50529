"""Rotary embedding of dispatched tokens: each row is rotated by its own position, not by its place."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import nn

from megatron_magi.mcore import seams
from megatron_magi.mcore.carrier import MagiSeqParams, ShardLayout, carrier_of

_APPLY = "core.transformer.attention:apply_rotary_pos_emb"


def install() -> None:
    """Lets Transformer Engine's fused kernel rotate dispatched tokens of several sequences. Idempotent."""
    seams.put(_APPLY, apply_rotary_pos_emb)


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, config: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Megatron's function of this name, where several sequences with angles of their own count as one to the kernel.

    Transformer Engine's kernel takes one row of angles for all sequences of a place. Without it Megatron rotates by
    sines and cosines rounded to 16 bits.

    Args:
        t: ``[seqlen, batch_size, num_heads, head_dim]``, queries or keys.
        freqs: angles, ``[seqlen, 1 or batch_size, 1, rotary_dim]``.
        config: Megatron's.
        *args: passed on.
        **kwargs: passed on.

    Returns:
        The shape of ``t``.
    """
    original = seams.original(_APPLY)
    # Angles of three axes (mRoPE) are a sequence's own in Megatron too, which says how it rotates by them.
    if not config.apply_rope_fusion or config.mrope_section is not None or freqs.shape[1] == 1:
        return original(t, freqs, config, *args, **kwargs)
    assert t.shape[:2] == freqs.shape[:2], f"tokens {t.shape}, angles {freqs.shape}"
    rows = original(t.flatten(0, 1).unsqueeze(1), freqs.flatten(0, 1).unsqueeze(1), config, *args, **kwargs)
    return rows.view(*t.shape[:2], *rows.shape[2:])


def select_positions(table: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Rows of a table of angles for this rank's tokens.

    Args:
        table: ``[num_positions, 1, 1, dim]``.
        layout: of the shard.

    Returns:
        ``[seqlen, 1, 1, dim]``, or ``[seqlen, batch_size, 1, dim]`` with several sequences.
    """
    return layout.from_rows(table.index_select(0, layout.positions).squeeze(1))


def unslice(rotary: nn.Module) -> None:
    """Makes a rotary embedding return the angles of all positions instead of a rank's zigzag share."""
    if isinstance(rotary, MultimodalRotaryEmbedding):
        # Its angles come from position ids, which are dispatched already.
        rotary.cp_group = None
        return
    original = rotary.forward

    def forward(max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        # Stock leaves packed sequences whole. The arguments left out are keys of its cache.
        return original(max_seq_len, offset, packed_seq=True)

    rotary.forward = forward


class LatentRotary:
    """The rotary embedding inside an MLA layer: looks up the positions of the microbatch at hand.

    Replaces the ``forward`` of the layer's ``rotary_pos_emb``. MLA takes a packed microbatch of
    one sequence as ``[num_tokens, ...]``, without a batch dimension, and the angles follow.
    """

    def __init__(self, layer: MultiLatentAttention | AbsorbedMLASelfAttention) -> None:
        self._original = layer.rotary_pos_emb.forward
        self._params: MagiSeqParams | None = None
        layer.rotary_pos_emb.forward = self
        # The hook runs in every forward pass of the layer, also in those of recomputation.
        layer.register_forward_pre_hook(self._take_params, with_kwargs=True)

    def _take_params(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._params = carrier_of(kwargs.get("packed_seq_params"), type(module).__name__)

    def __call__(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        assert self._params is not None, "called outside of the layer's forward"
        out = self._original(max_seq_len, offset, packed_seq=True)
        table, scale = out if isinstance(out, tuple) else (out, None)
        layout = self._params.layout
        angles = select_positions(table, layout)
        if layout.batch_size == 1:
            angles = angles.squeeze(1)
        return angles if scale is None else (angles, scale)
