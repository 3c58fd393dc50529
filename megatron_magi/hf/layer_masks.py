"""The masks that layers are given, with the documents that are found in a batch."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from megatron_magi.hf.intervals import Intervals, side_by_side
from megatron_magi.hf.mask_functions import bounds_by_positions, to_numpy
from megatron_magi.mask import AttnMask

_ALIEN = (
    "attention_mask: this model computes attention by code of its own, not by transformers' interface of attention "
    "functions, so attn_implementation='magi' cannot be used"
)
"""Said where a model takes a mask for a tensor."""

WINDOWS = {"sliding_window_overlay", "sliding_window_bidirectional_overlay", "chunked_overlay"}
"""Mask functions that make a layer see less than others of the model."""


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


class LayerMask(NoTensor):
    """The mask of a layer, over the sequences of a batch one after another.

    Attributes:
        intervals: the keys of each of ``batch_size * q_length`` rows, of ``batch_size * kv_length``.
        has_documents: documents or padding are in it.
        has_window: it is a window's or a chunked one.
    """

    def __init__(
        self, parts: list[Intervals], kv_length: int, *, has_documents: bool = False, has_window: bool = False
    ) -> None:
        self._parts, self._kv_length = parts, kv_length
        self.has_documents, self.has_window = has_documents, has_window
        self._last: tuple[Any, AttnMask] | None = None

    @cached_property
    def intervals(self) -> Intervals:
        return side_by_side(self._parts, self._kv_length)

    @cached_property
    def mask(self) -> AttnMask:
        """The mask without further documents."""
        return self.intervals.mask(self._kv_length * len(self._parts))

    def contiguous(self) -> LayerMask:
        """Called by transformers' generation alone, where the cache has a fixed size: masks are then tensors.

        Raises:
            ValueError: always.
        """
        raise ValueError("cache_implementation: a cache of fixed size is not supported with attn_implementation='magi'")

    def of_layer(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> AttnMask:
        """The mask with the documents of ``cu_seq_lens`` or, where it knows of none yet, of the layer's positions."""
        said = cu_seq_lens
        if said is None and not self.has_documents and position_ids is not None and position_ids.ndim == 2:
            said = position_ids
        if said is None or self.intervals.lo.shape[1] != len(self._parts) * self._kv_length:
            return self.mask
        if self._last is None or self._last[0] is not said:  # layers are given the same tensor
            bounds = document_bounds_of(position_ids, cu_seq_lens, len(self._parts), self._kv_length)
            self._last = said, self.intervals.within(bounds).mask(self._kv_length * len(self._parts))
        return self._last[1]


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
