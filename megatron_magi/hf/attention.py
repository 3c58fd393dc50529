"""``attn_implementation="magi"``: the mask that layers are given, and the attention that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from megatron_magi.api import calc_attn
from megatron_magi.hf import indexed
from megatron_magi.hf.intervals import Intervals
from megatron_magi.hf.layer_kinds import check_kinds_of_mask
from megatron_magi.hf.layer_masks import WINDOWS, Documents, LayerMask, check_mask, check_no_window, document_bounds_of
from megatron_magi.hf.mask_functions import Rows, Unknown, intervals_of, parts_of, positions_in, to_numpy
from megatron_magi.hf.numbering import check_counting, is_tuned, reaches_a_higher_temperature, renumbered
from megatron_magi.hf.router_losses import wrap_balance
from megatron_magi.mask import AttnMask, builders
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.runtime.no_compile import outside_graphs

if TYPE_CHECKING:
    from megatron_magi.api.key import DistAttnRuntimeKey
    from megatron_magi.hf.shard import Shard, ShardMask

NAME = "magi"
"""What ``attn_implementation`` is set to."""

OWN_NAME = "megatron_magi"
"""The same where a framework does something of its own for "magi"."""

CP_GROUP = "magi_cp_group"
"""Attribute of the modules of a context-parallel model: the group's name."""

MAX_DENSE = 16384
"""Tokens up to which a mask function of a user's is evaluated for each pair: the matrix has 256 MiB a sequence then."""

REFUSED = ("head_mask", "position_bias", "alibi", "block_indices", "sinks", "output_attentions")
"""Arguments that change or ask for the attention matrix: biases, keys that a layer selects, a sink for each row."""


@outside_graphs
def layer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_options: Any,
) -> LayerMask | ShardMask:
    """What transformers calls once a forward for each kind of layer: its mask, as slices.

    Masks that transformers composes are read off their functions. One with a function of a user's is evaluated for
    each pair of tokens.

    Raises:
        ValueError: a user's function over more than `MAX_DENSE` tokens; under context parallelism any that
            needs the tensors of the whole sequence.
    """
    indexed.wrap_indexers()
    if isinstance(attention_mask, LayerMask):
        return attention_mask  # generation with a cache of fixed size made it before it called the model
    shard: Shard | None = getattr(attention_mask, "magi_shard", None)
    if shard is not None:
        return shard.layer_mask(mask_function)
    q_offset, q_length = int(q_offset), int(q_length)
    has_window = not WINDOWS.isdisjoint(parts_of(mask_function))
    padding = None if attention_mask is None else to_numpy(attention_mask.to(torch.bool))

    def dense(function: Callable, unknown: Unknown) -> list[Intervals]:
        if max(q_length, kv_length) > MAX_DENSE:
            raise ValueError(
                f"mask_function: {unknown} is none of transformers' own and is asked for {q_length} x {kv_length} "
                f"tokens; above {MAX_DENSE} give the mask as slices, magi_mask=AttnMask(...)"
            ) from None
        shape = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
        options = {"allow_is_causal_skip": False, "use_vmap": use_vmap, "device": device}
        seen = sdpa_mask(batch_size, mask_function=function, attention_mask=attention_mask, **shape, **options)
        return [Intervals.of_dense(to_numpy(one)) for one in seen.expand(batch_size, -1, -1, -1)[:, 0]]

    documents = None
    if not q_offset and not kv_offset:
        documents = Documents(mask_function, padding, dense, positions_in(mask_function), device)
    options = {"has_window": has_window, "documents": documents}
    index = np.arange(q_length) + q_offset
    try:
        parts = [intervals_of(mask_function, Rows(i, index)) for i in range(batch_size)]
    except Unknown as unknown:
        return LayerMask(dense(mask_function, unknown), kv_length, **options)
    if padding is not None:
        parts = [part & Intervals.of_runs(row, q_length) for part, row in zip(parts, padding, strict=True)]
    inside = Intervals.of(kv_offset, kv_offset + kv_length, q_length)
    parts = [(part & inside).shifted(-kv_offset) for part in parts]
    return LayerMask(parts, kv_length, **options)


@outside_graphs
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | ShardMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    magi_mask: AttnMask | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, as transformers calls it.

    Args:
        query: ``[batch_size, num_heads_q, q_length, head_dim]``.
        key, value: ``[batch_size, num_heads_kv, kv_length, head_dim]``; the head dim of values may be another.
            Under autocast all three are cast to its dtype.
        attention_mask: what `layer_mask` made; or bool, or 0 and the smallest number, ``[batch_size or 1, 1 or
            num_heads_q, q_length or 1, kv_length]``; or None for causal (by ``is_causal`` or the module's), full if
            not.
        scaling: of logits, ``head_dim ** -0.5`` when None.
        softcap: of logits.
        s_aux: ``[num_heads_q]``, the logits of a sink.
        sliding_window: looked at where ``attention_mask`` is None.
        position_ids, cu_seq_lens_q: documents of a packed batch; see `LayerMask.of_layer`.
        cu_seq_lens_k: the same as ``cu_seq_lens_q``.
        magi_mask: in place of the layer's own mask, over ``batch_size * q_length`` tokens.
        indices: int ``[batch_size, q_length, topk]``, keys that an indexer has chosen; see `indexed`.

    Returns:
        ``(out, None)``, out ``[batch_size, q_length, num_heads_q, head_dim_v]``. Rows that see nothing are 0.

    Raises:
        ValueError: dropout, a bias or a mask for single heads; a mask that is neither; see `layer_mask`.
    """
    _refuse(dropout, cu_seq_lens_q, cu_seq_lens_k, options)
    batch_size, num_heads, q_length, _ = query.shape
    query = _at_positions(module, query, attention_mask, magi_mask, position_ids, cu_seq_lens_q)
    q, k, v = (_as_autocast(x).transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (query, key, value))
    sink = None if s_aux is None else s_aux.reshape(1, num_heads).to(torch.promote_types(s_aux.dtype, torch.float32))
    logits = {"sink": sink, "softmax_scale": scaling, "softcap": softcap or 0.0}
    if hasattr(attention_mask, "shard"):
        if not attention_mask.shard.num_calls:
            wrap_balance([module])
        attention_mask.shard.num_calls += 1
        _check_sink(sink, module, attention_mask.key)
    if indices is not None:
        _check_indexed(attention_mask, magi_mask, cu_seq_lens_q)
        out = indexed.attend(module, q, k, v, indices, attention_mask, logits)
    elif hasattr(attention_mask, "shard"):
        out, _ = calc_attn(q, k, v, attention_mask.key, **logits)
    elif getattr(module, CP_GROUP, None) is not None:
        kind = type(attention_mask).__name__
        raise ValueError(
            f"attention_mask: a layer of a context-parallel model was given a {kind}, not that of its shard"
        )
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        shape = (batch_size, q_length, key.shape[2])
        if magi_mask is not None:
            mask = _explicit(module, magi_mask, attention_mask, batch_size * q_length)
        elif isinstance(attention_mask, LayerMask):
            mask = attention_mask.of_layer(position_ids, cu_seq_lens_q)
        elif attention_mask is None:
            mask = _default_mask(shape, causal, sliding_window, cu_seq_lens_q)
        else:
            mask = _dense_mask(attention_mask, shape)
        _check_keys(mask, len(k))
        out, _ = slice_attention(q, k, v, mask, **logits)
    return out.view(batch_size, q_length, num_heads, -1), None


def _check_indexed(attention_mask: Any, magi_mask: AttnMask | None, cu_seq_lens: Tensor | None) -> None:
    """Raises ValueError for masks of the batch that the indexer of a layer on one rank was not given."""
    if not isinstance(attention_mask, LayerMask):
        return
    if magi_mask is not None:
        raise ValueError("magi_mask: the indexers of this model choose keys by the model's own mask; drop it")
    if cu_seq_lens is not None and attention_mask.of_layer(None, cu_seq_lens) != attention_mask.of_layer(None, None):
        raise ValueError("cu_seq_lens_q: the indexers of this model know documents by position_ids alone; give these")


def _at_positions(
    module: torch.nn.Module,
    query: Tensor,
    attention_mask: Any,
    magi_mask: AttnMask | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
) -> Tensor:
    """Queries as if the layer had known their places in documents, where it numbers rows.

    Raises:
        ValueError: the places are not known, or how the layer numbers rows.
    """
    if hasattr(attention_mask, "shard"):
        check_counting(module)
        return renumbered(module, query, attention_mask.shard.positions(query.device)) if is_tuned(module) else query
    if not is_tuned(module):
        return query
    if magi_mask is not None and reaches_a_higher_temperature(module, query.shape[2]):
        raise ValueError(
            f"magi_mask: {type(module).__name__} scales queries by the number of their row (attn_temperature_tuning), "
            f"which a mask of one's own says nothing of; from {module.floor_scale} tokens on it cannot be used"
        )
    numbers = None
    if isinstance(attention_mask, LayerMask) and magi_mask is None:
        numbers = attention_mask.positions(position_ids, cu_seq_lens)
    if numbers is None:
        return query
    positions = torch.from_numpy(numbers).to(query.device)
    return renumbered(module, query, positions.view(query.shape[0], -1))


def _as_autocast(x: Tensor) -> Tensor:
    """In autocast's dtype, as torch's own attention takes it: rotated queries and keys are wider than values there."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _check_keys(mask: AttnMask, num_keys: int) -> None:
    if mask.total_seqlen_k != num_keys:
        raise ValueError(
            f"attention_mask: it is over {mask.total_seqlen_k} keys, the layer has {num_keys}; layers whose keys are "
            "not the tokens alone, such as compressed attention, are not supported"
        )


def _refuse(dropout: float, cu_q: Tensor | None, cu_k: Tensor | None, options: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout: attention dropout is not supported, got {dropout}; set attention_dropout=0")
    if cu_q is not None and cu_k is not None and cu_q is not cu_k and not torch.equal(cu_q, cu_k):
        raise ValueError("cu_seq_lens_k: queries and keys must have the same documents")
    for name in REFUSED:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{name}: not supported with attn_implementation='{NAME}'")


def _check_sink(sink: Tensor | None, module: torch.nn.Module, key: DistAttnRuntimeKey) -> None:
    """Raises ValueError where the gradient of a sink would be that of all ranks, times their number."""
    averaged = getattr(module, CP_GROUP, None) is not None
    if sink is not None and averaged and key.config.comm.dsink_all_reduce == "sum":
        raise ValueError(
            "dsink_all_reduce: 'sum' adds up gradients of sinks that are added up again with all others; give 'none' "
            "(MAGI_ATTENTION_DSINK_ALL_REDUCE_OP)"
        )


def _explicit(module: torch.nn.Module, mask: AttnMask, own: Any, num_rows: int) -> AttnMask:
    check_mask(mask, num_rows)
    if hasattr(module, "config"):
        check_kinds_of_mask(module.config, "magi_mask")
    check_no_window(isinstance(own, LayerMask) and own.has_window)
    return mask


def check_implementation(model_config: Any) -> None:
    """Raises ValueError for a model that attends otherwise, and would pass over our masks without a word."""
    found = model_config.get_text_config()._attn_implementation
    if found not in (NAME, OWN_NAME):
        raise ValueError(f"attn_implementation: expected {NAME!r}, got {found!r}")


def _default_mask(
    shape: tuple[int, int, int], causal: bool, window: int | None, cu_seq_lens: Tensor | None
) -> AttnMask:
    """The mask of a call without one: of its sequences, or of its documents."""
    batch_size, q_length, kv_length = shape
    left = -1 if window is None else window - 1
    right = 0 if causal else left
    if cu_seq_lens is None:
        lengths = {"doc_lengths": [q_length] * batch_size, "doc_lengths_k": [kv_length] * batch_size}
    else:
        lengths = {"cu_seqlens": document_bounds_of(None, cu_seq_lens, batch_size, q_length)}
    return builders.sliding_window(left=left, right=right, **lengths)


def _dense_mask(attention_mask: Tensor, shape: tuple[int, int, int]) -> AttnMask:
    """The mask of a tensor of four dimensions, bool or added to logits."""
    batch_size, q_length, kv_length = shape
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        kind = type(attention_mask).__name__
        raise ValueError(f"attention_mask: expected what {NAME} made of it, or four dimensions, got a {kind}")
    if attention_mask.shape[2] not in (q_length, 1) or attention_mask.shape[3] != kv_length:
        raise ValueError(
            f"attention_mask: expected [{batch_size} or 1, heads or 1, {q_length} or 1, {kv_length}], "
            f"got {list(attention_mask.shape)}"
        )
    seen = attention_mask
    if seen.dtype != torch.bool:
        seen = seen == 0
        lowest = torch.finfo(attention_mask.dtype).min
        if not (seen | (attention_mask <= lowest)).all():
            raise ValueError(
                "attention_mask: a bias was given; only 0 (seen) and the smallest number (hidden) are masks"
            )
    if not (seen == seen[:, :1]).all():
        raise ValueError("attention_mask: heads must have the same mask")
    parts = [Intervals.of_dense(to_numpy(one)) for one in seen[:, 0].expand(batch_size, q_length, -1)]
    return LayerMask(parts, kv_length).mask
