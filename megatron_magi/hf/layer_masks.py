"""The masks that layers are given, with the documents that are found in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.hf.intervals import Intervals, side_by_side
from megatron_magi.hf.mask_functions import (
    Places,
    Rows,
    Unknown,
    bounds_by_positions,
    dense_of_documents,
    of_documents,
    padding_before,
    places_of,
    to_numpy,
)
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


def is_of_one_head(index: Any) -> bool:
    """Is it ``[:, 0, :, :]``, as models take the mask of their indexers?"""
    whole = slice(None)
    return isinstance(index, tuple) and len(index) == 4 and type(index[1]) is int and index == (whole, 0, whole, whole)


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
        """The last rows, for which alone Gemma 4 computes its layers that have the keys of others; or of one head."""
        if is_of_one_head(index):
            return self
        num_rows = self._parts[0].lo.shape[1] if self._last_rows is None else self._last_rows
        last_rows = num_rows - slice(rows_from(index), None).indices(num_rows)[0]
        options = {"has_window": self.has_window, "documents": self._documents}
        return LayerMask(self._parts, self._kv_length, **options, last_rows=last_rows)

    @property
    def ndim(self) -> int:
        """Asked of masks that generation with a cache of fixed size makes before it calls a model."""
        return 4

    def contiguous(self) -> LayerMask:
        """Called there too."""
        return self

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
