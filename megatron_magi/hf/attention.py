"""``attn_implementation="magi"``: the mask that layers are given, and the attention that they call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from megatron_magi.api import calc_attn
from megatron_magi.eager import outside_graphs
from megatron_magi.hf.intervals import Intervals, side_by_side
from megatron_magi.hf.mask_functions import (
    Places,
    Rows,
    Unknown,
    bounds_by_positions,
    dense_of_documents,
    intervals_of,
    of_documents,
    padding_before,
    parts_of,
    places_of,
    positions_in,
    to_numpy,
)
from megatron_magi.hf.numbering import check_counting, is_tuned, reaches_a_higher_temperature, renumbered
from megatron_magi.mask import AttnMask, builders
from megatron_magi.ops.slice_attention import slice_attention

if TYPE_CHECKING:
    from megatron_magi.compat.runtime import DistAttnRuntimeKey
    from megatron_magi.hf.shard import Shard, ShardMask

NAME = "magi"
"""What ``attn_implementation`` is set to."""

CP_GROUP = "magi_cp_group"
"""Attribute of the modules of a context-parallel model: the group's name."""

MAX_DENSE = 16384
"""Tokens up to which a mask function of a user's is evaluated for each pair: the matrix has 256 MiB a sequence then."""

WINDOWS = {"sliding_window_overlay", "sliding_window_bidirectional_overlay", "chunked_overlay"}
"""Mask functions that make a layer see less than others of the model."""

_ALIEN = (
    "attention_mask: this model computes attention by code of its own, not by transformers' interface of attention "
    f"functions, so attn_implementation='{NAME}' cannot be used"
)
"""Said where a model takes a mask for a tensor."""

REFUSED = ("head_mask", "position_bias", "alibi", "indices", "block_indices", "sinks", "output_attentions")
"""Arguments that change or ask for the attention matrix: biases, keys that a layer selects, a sink for each row."""


def register() -> None:
    """Makes ``attn_implementation="magi"`` known to transformers. Importing `megatron_magi.hf` does it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, layer_mask)


class NoTensor:
    """Given to layers as their mask. What uses it as a tensor is a model's own attention, and raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_ALIEN} (it asks the mask for {name!r})")

    @classmethod
    def __torch_function__(cls, *_: Any, **_options: Any) -> Any:
        raise ValueError(_ALIEN)

    def _refuse_use(self, *_: Any) -> Any:
        raise ValueError(_ALIEN)

    __getitem__ = __add__ = __sub__ = __mul__ = __and__ = __or__ = __invert__ = __rsub__ = __rmul__ = _refuse_use


def rows_from(index: Any) -> int:
    """Where the rows begin in ``[:, :, start:, :]``.

    Raises:
        ValueError: another index, as for a tensor.
    """
    if isinstance(index, tuple) and len(index) == 4 and all(isinstance(x, slice) for x in index):
        batch, heads, rows, keys = index
        if batch == heads == keys == slice(None) and rows.stop is None and rows.step is None:
            return rows.start or 0
    raise ValueError(_ALIEN)


class LayerMask(NoTensor):
    """The mask of a layer, over the sequences of a batch one after another.

    Attributes:
        intervals: the keys of each of ``batch_size * q_length`` rows, of ``batch_size * kv_length``.
        has_window: it is a window's or a chunked one.
    """

    def __init__(
        self,
        parts: list[Intervals],
        kv_length: int,
        *,
        has_window: bool = False,
        documents: Documents | None = None,
        last_rows: int | None = None,
    ) -> None:
        self._parts, self._kv_length, self._documents, self._last_rows = parts, kv_length, documents, last_rows
        self.has_window = has_window
        self._last: tuple[Any, Any, AttnMask, np.ndarray | None] | None = None

    @cached_property
    def intervals(self) -> Intervals:
        return side_by_side([self._kept(part) for part in self._parts], self._kv_length)

    @cached_property
    def mask(self) -> AttnMask:
        """The mask without further documents."""
        return self.intervals.mask(self._kv_length * len(self._parts))

    def __getitem__(self, index: Any) -> LayerMask:
        """The last rows, for which alone Gemma 4 computes its layers that have the keys of others."""
        num_rows = self._parts[0].lo.shape[1] if self._last_rows is None else self._last_rows
        last_rows = num_rows - slice(rows_from(index), None).indices(num_rows)[0]
        options = {"has_window": self.has_window, "documents": self._documents}
        return LayerMask(self._parts, self._kv_length, **options, last_rows=last_rows)

    def contiguous(self) -> LayerMask:
        """Called by transformers' generation alone, where the cache has a fixed size: masks are then tensors.

        Raises:
            ValueError: always.
        """
        raise ValueError("cache_implementation: a cache of fixed size is not supported with attn_implementation='magi'")

    def of_layer(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> AttnMask:
        """The mask with the documents of ``cu_seq_lens`` and, where it knows of none yet, of the layer's positions.

        Raises:
            ValueError: ``cu_seq_lens`` are wrong, or there are other keys than the rows'.
        """
        return self._of_layer(position_ids, cu_seq_lens)[0]

    def positions(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> np.ndarray | None:
        """The places of ``batch_size * q_length`` rows in their documents; None where there are no documents."""
        return self._of_layer(position_ids, cu_seq_lens)[1]

    def _of_layer(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> tuple[AttnMask, np.ndarray | None]:
        if position_ids is not None and position_ids.ndim != 2:
            position_ids = None
        if self._last is None or self._last[0] is not position_ids or self._last[1] is not cu_seq_lens:
            found = self._found(position_ids, cu_seq_lens)  # layers are given the same tensors
            self._last = position_ids, cu_seq_lens, *found
        return self._last[2:]

    def _found(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> tuple[AttnMask, np.ndarray | None]:
        batch_size, seqlen = len(self._parts), self._kv_length
        if self._parts[0].lo.shape[1] != seqlen or self._documents is None:
            if cu_seq_lens is not None:
                raise ValueError("cu_seq_lens_q: documents are not supported with a cache that has tokens already")
            return self.mask, None
        own = self._documents.position_ids
        if own is None and position_ids is not None and self._documents.padding is None:
            own = np.broadcast_to(to_numpy(position_ids), (batch_size, seqlen))
        bounds = None if cu_seq_lens is None else document_bounds_of(None, cu_seq_lens, batch_size, seqlen)
        if own is None and bounds is None:
            return self.mask, None
        places = places_of(own, bounds, (batch_size, seqlen))
        numbers = np.concatenate([self._last_of(place.positions) for place in places])
        if bounds is None and (self._documents.position_ids is not None or all(len(p.bounds) == 2 for p in places)):
            return self.mask, numbers  # which has them already
        parts = [self._kept(part) for part in self._documents.parts(places)]
        return side_by_side(parts, seqlen).mask(seqlen * batch_size), numbers

    def _kept(self, part: Intervals) -> Intervals:
        return Intervals(*(self._last_of(bound) for bound in part))

    def _last_of(self, x: np.ndarray) -> np.ndarray:
        return x if self._last_rows is None else x[..., x.shape[-1] - self._last_rows :]


@dataclass
class Documents:
    """What the mask of a layer is made of, if more documents are found in its sequences.

    Attributes:
        function: transformers' mask function.
        padding: bool ``[batch_size, seqlen]``, tokens; None where all are.
        dense: evaluates a function for all pairs of tokens, where it has parts that are a user's.
        position_ids: those of documents that the function has already.
        device: of the function's tensors.
    """

    function: Callable
    padding: np.ndarray | None
    dense: Callable[[Callable, Unknown], list[Intervals]]
    position_ids: np.ndarray | None
    device: torch.device | str

    def parts(self, places: list[Places]) -> list[Intervals]:
        """The keys that each row of each sequence sees."""
        index = np.arange(len(places[0].positions))
        try:
            parts = []
            for i, place in enumerate(places):
                first = None if self.padding is None else padding_before(self.padding[i], place.bounds)
                parts.append(of_documents(self.function, Rows(i, index, left_padding=first), place))
        except Unknown as unknown:
            if self.padding is not None and not self.padding.all():
                raise ValueError(
                    "cu_seq_lens_q: packed documents with padding are not supported in a mask function of one's own"
                ) from None
            return self.dense(dense_of_documents(self.function, places, self.device), unknown)
        if self.padding is not None:
            parts = [part & Intervals.of_runs(row, len(index)) for part, row in zip(parts, self.padding, strict=True)]
        return parts


def document_bounds_of(
    position_ids: Tensor | None, cu_seq_lens: Tensor | None, batch_size: int, seqlen: int
) -> np.ndarray:
    """Bounds of documents in a batch's tokens, one sequence after another.

    Args:
        position_ids: ``[batch_size or 1, seqlen]``, rising by one inside a document.
        cu_seq_lens: ``[num_documents + 1]`` over all tokens, in place of positions.

    Raises:
        ValueError: ``cu_seq_lens`` does not rise from 0 to the number of tokens.
    """
    sequences = np.arange(batch_size + 1) * seqlen
    if cu_seq_lens is None:
        assert position_ids is not None
        rows = np.broadcast_to(to_numpy(position_ids), (batch_size, seqlen))
        own = [bounds_by_positions(row) + first for row, first in zip(rows, sequences, strict=False)]
        return np.unique(np.concatenate(own))
    bounds = to_numpy(cu_seq_lens).reshape(-1).astype(np.int64)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != batch_size * seqlen or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"cu_seq_lens_q: expected numbers that rise from 0 to {batch_size * seqlen}, the tokens, "
            f"got {bounds.tolist()[:20]}"
        )
    return np.unique(np.concatenate([bounds, sequences]))


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
        attention_mask.shard.num_calls += 1
        _check_sink(sink, module, attention_mask.key)
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
            mask = _explicit(magi_mask, attention_mask, batch_size * q_length)
        elif isinstance(attention_mask, LayerMask):
            mask = attention_mask.of_layer(position_ids, cu_seq_lens_q)
        elif attention_mask is None:
            mask = _unsaid(shape, causal, sliding_window, cu_seq_lens_q)
        else:
            mask = _dense(attention_mask, shape)
        _check_keys(mask, len(k))
        out, _ = slice_attention(q, k, v, mask, **logits)
    return out.view(batch_size, q_length, num_heads, -1), None


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


def _explicit(mask: AttnMask, own: Any, num_rows: int) -> AttnMask:
    check_mask(mask, num_rows)
    check_no_window(isinstance(own, LayerMask) and own.has_window)
    return mask


def check_implementation(model_config: Any) -> None:
    """Raises ValueError for a model that attends otherwise, and would pass over our masks without a word."""
    found = model_config.get_text_config()._attn_implementation
    if found != NAME:
        raise ValueError(f"attn_implementation: expected {NAME!r}, got {found!r}")


def check_mask(mask: AttnMask, num_tokens: int) -> None:
    """Raises ValueError for a ``magi_mask`` that is none, or over another number of tokens."""
    if not isinstance(mask, AttnMask):
        raise ValueError(f"magi_mask: expected an AttnMask over {num_tokens} tokens, got {type(mask).__name__}")
    if (mask.total_seqlen_q, mask.total_seqlen_k) != (num_tokens, num_tokens):
        raise ValueError(f"magi_mask: expected a mask over {num_tokens} tokens, got {mask!r}")


def check_no_window(has_window: bool) -> None:
    """Raises ValueError for a layer with a window, which ``magi_mask`` knows nothing of."""
    if has_window:
        raise ValueError("magi_mask: the model has layers with a window or chunks, whose masks it would replace")


def _unsaid(shape: tuple[int, int, int], causal: bool, window: int | None, cu_seq_lens: Tensor | None) -> AttnMask:
    batch_size, q_length, kv_length = shape
    left = -1 if window is None else window - 1
    right = 0 if causal else left
    if cu_seq_lens is None:
        lengths = {"doc_lengths": [q_length] * batch_size, "doc_lengths_k": [kv_length] * batch_size}
    else:
        lengths = {"cu_seqlens": document_bounds_of(None, cu_seq_lens, batch_size, q_length)}
    return builders.sliding_window(left=left, right=right, **lengths)


def _dense(attention_mask: Tensor, shape: tuple[int, int, int]) -> AttnMask:
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
