"""Models whose layers choose keys by an indexer (DeepSeek-V3.2, GLM-MoE-DSA and others): lists in place of masks.

Transformers hands the indexer's choice to attention functions as ``indices``. The indexer itself asks for its mask as a
tensor and for all keys of the sequence; its ``forward`` is wrapped, once one of the models is used, so that with this
package's masks the model's own code scores some rows at a time, against the keys of all ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.api import calc_index_sparse_attn, undispatch
from megatron_magi.api.functions import runtime_of
from megatron_magi.hf.layer_masks import LayerMask
from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.ops.sparse_attention import index_sparse_attention
from megatron_magi.runtime.no_compile import outside_graphs

_INDEXERS = {
    f"transformers.models.{name}.modeling_{name}": indexer
    for name, indexer in {
        "deepseek_v32": "DeepseekV32Indexer",
        "glm_moe_dsa": "GlmMoeDsaIndexer",
        "axk2": "AXK2Indexer",
        "dots3_note": "Dots3NoteTextIndexer",
        "hy_v4": "HYV4Indexer",
    }.items()
}
"""Modules of transformers, and their indexers, which are called alike."""

LAYER = "indexed_attention"
"""What transformers calls such a layer."""

SCORES = 1 << 26
"""Scores of a chunk of rows, over heads and keys: 256 MiB in fp32."""

_WRAPPED = "_megatron_magi_original"


def is_known(module: torch.nn.Module) -> bool:
    """Whether a model, or one of its layers, is of transformers' code for one of these models, or derives from it."""
    return any(base.__module__ in _INDEXERS for base in type(module).__mro__)


def is_known_config(text_config: Any) -> bool:
    """Whether a configuration is that of one of these models, or derives from it."""
    places = (base.__module__.replace("configuration_", "modeling_") for base in type(text_config).__mro__)
    return any(place in _INDEXERS for place in places)


def wrap_indexers() -> None:
    """Wraps the indexers of models that have been imported. Idempotent; called before layers get a mask."""
    for module, name in _INDEXERS.items():
        indexer = getattr(sys.modules.get(module), name, None)
        if indexer is not None and not hasattr(indexer.forward, _WRAPPED):
            indexer.forward = _wrapped(indexer.forward)


def _wrapped(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(
        self: torch.nn.Module,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> Tensor:
        cache = past_key_values if cache is None else cache  # its name until transformers 5.23
        rows = (hidden_states, q_resid, *position_embeddings)
        if isinstance(attention_mask, LayerMask) or hasattr(attention_mask, "shard"):
            return _chosen(functools.partial(original, self), rows, attention_mask, position_ids, cache)
        return original(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache)

    setattr(forward, _WRAPPED, original)
    return forward


class _Keys:
    """In the place of a cache: hands out the indexer's keys of the whole sequence, or takes those of some rows."""

    def __init__(self, whole: Tensor | None = None) -> None:
        self.whole = whole
        self.taken: tuple[Tensor, int] | None = None

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """``[batch_size, num_keys, head_dim]``; of the rows' keys, which are taken, the first alone."""
        if self.whole is not None:
            return self.whole
        self.taken = keys, layer
        return keys[:, :1]


class _Visible(NamedTuple):
    """The keys that rows see, as intervals, int ``[n, batch_size, num_rows]``; each sequence numbers its own from 0."""

    lo: Tensor
    hi: Tensor

    @classmethod
    def of(cls, mask: Any, position_ids: Tensor | None, batch_size: int, device: torch.device) -> _Visible:
        """Of what a layer was given as its mask, which keeps it for other layers."""
        is_shard = hasattr(mask, "shard")
        whole: AttnMask = mask.key.mask if is_shard else mask.of_layer(position_ids, None)
        kept = vars(mask).setdefault("visible_keys", {})
        if whole not in kept:
            rows = np.arange(whole.total_seqlen_q)
            if is_shard:
                runtime = runtime_of(mask.key)
                rows = runtime.shard.dispatch.global_index(runtime.cp_rank)
            bounds = np.stack(bd.row_intervals(whole.bands, rows)).reshape(2, -1, batch_size, len(rows) // batch_size)
            bounds -= np.arange(batch_size)[:, None] * (whole.total_seqlen_k // batch_size)
            kept[whole] = cls(*torch.from_numpy(bounds).to(device))
        return kept[whole]

    def of_rows(self, rows: slice, num_keys: int) -> Tensor:
        """Bool ``[batch_size, rows, num_keys]``."""
        key = torch.arange(num_keys, device=self.lo.device)
        parts = [(key >= lo[:, rows, None]) & (key < hi[:, rows, None]) for lo, hi in zip(*self, strict=True)]
        return functools.reduce(torch.logical_or, parts)


@outside_graphs
@torch.no_grad()
def _chosen(indexer: Callable, rows: tuple[Tensor, ...], mask: Any, position_ids: Tensor | None, cache: Any) -> Tensor:
    """int32 ``[batch_size, num_rows, topk]``, numbers of keys in their sequence, ascending; -1 at the end for those
    that are hidden."""
    batch_size, num_rows, _ = rows[0].shape
    device = rows[0].device

    def call(part: slice, seen: Tensor, keys: _Keys) -> Tensor:
        hidden, queries, *angles = (x[:, part] for x in rows)
        positions = None if position_ids is None else position_ids[..., part]
        return indexer(hidden, queries, tuple(angles), seen, positions, keys)

    taken = _Keys()
    call(slice(0, num_rows), torch.ones((batch_size, num_rows, 1), dtype=torch.bool, device=device), taken)
    assert taken.taken is not None, "an indexer that keeps no keys"
    whole, layer = taken.taken
    if hasattr(mask, "shard"):
        whole = undispatch(whole[0], mask.key)[None]
    elif cache is not None:
        whole = cache.update_indexer(whole, layer)
    visible, num_keys = _Visible.of(mask, position_ids, batch_size, device), whole.shape[1]
    size = max(1, SCORES // (batch_size * num_keys * indexer.args[0].n_heads))
    found = []
    for start in range(0, num_rows, size):
        part = slice(start, min(start + size, num_rows))
        seen = visible.of_rows(part, num_keys)
        keys = call(part, seen, _Keys(whole)).long()
        keys = keys.masked_fill(~seen.gather(-1, keys), num_keys).sort(-1).values
        found.append(keys.masked_fill(keys == num_keys, -1).int())
    return torch.cat(found, dim=1)


def attend(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, mask: Any, logits: dict[str, Any]
) -> Tensor:
    """Attention over the lists of an indexer, collective for a sharded batch.

    Args:
        module: the layer.
        q: ``[batch_size * q_length, num_heads, head_dim]``.
        k, v: ``[batch_size * kv_length, num_heads, head_dim]``; the head dim of values may be another.
        indices: what the layer's indexer, or that of a layer before it, has chosen.
        mask: what the layer was given.
        logits: sink, softmax_scale and softcap.

    Returns:
        ``[batch_size * q_length, num_heads, head_dim_v]``.

    Raises:
        ValueError: the layer is none of a model that is known here, was given another mask, or has a softcap.
    """
    if not is_known(module):
        raise ValueError(f"indices: {type(module).__name__} chooses keys in a way that is not known here")
    if logits["softcap"]:
        raise ValueError(f"softcap: not supported for lists of keys, got {logits['softcap']}")
    options = {"sink": logits["sink"], "softmax_scale": logits["softmax_scale"]}
    if hasattr(mask, "shard"):
        return calc_index_sparse_attn(q, k, v, indices[0, :, None], mask.key, **options)[0]
    if not isinstance(mask, LayerMask):
        raise ValueError(f"attention_mask: lists of keys need the mask that magi made, got a {type(mask).__name__}")
    first = torch.arange(len(indices), device=indices.device, dtype=indices.dtype) * (len(k) // len(indices))
    lists = (indices + first[:, None, None]).masked_fill(indices < 0, -1).flatten(0, 1)
    return index_sparse_attention(q, k, v, lists[:, None], **options)[0]
