"""What a function that makes masks is given: the tokens of a microbatch, its documents, and what its data set adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_magi.checks import IntArrayLike, int_array
from megatron_magi.mask.bands import IntArray
from megatron_magi.mask.documents import cu_seqlens_from_eod


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The sequences of a microbatch, one after another, as a mask function gets them.

    Attributes:
        tokens: int ``[batch_size, seqlen]``, on the CPU; token t of sequence i is token ``i * seqlen + t`` of
            the mask.
        cu_seqlens: int64 ``[num_documents + 1]``, bounds of the documents in the tokens of the mask. Each
            sequence is one document where nothing says otherwise.
        fields: all that the data set returned, by name, with a first dimension of ``batch_size``;
            ``tokens`` among them.
    """

    tokens: Any
    cu_seqlens: IntArray
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return int(self.tokens.shape[0])

    @property
    def seqlen(self) -> int:
        """Tokens of a sequence."""
        return int(self.tokens.shape[1])

    @property
    def total_seqlen(self) -> int:
        """Tokens of the mask, ``batch_size * seqlen``."""
        return self.batch_size * self.seqlen

    def integers(self, name: str, ndim: int) -> IntArray:
        """The field ``name`` as int64.

        Raises:
            ValueError: there is no such field, or it does not hold ``batch_size`` rows of integers of ``ndim``
                dimensions, that of the rows included.
        """
        if name not in self.fields:
            raise ValueError(f"{name}: the data set has no such field, it has {', '.join(sorted(self.fields))}")
        values = int_array(self.fields[name], name, ndim)
        if len(values) != self.batch_size:
            raise ValueError(f"{name}: expected {self.batch_size} rows, got {len(values)}")
        return values


def sequence_bounds(batch_size: int, seqlen: int) -> IntArray:
    """Bounds of the sequences of a microbatch, int64 ``[batch_size + 1]``."""
    return np.arange(batch_size + 1, dtype=np.int64) * seqlen


def document_bounds(tokens: IntArrayLike, cu_seqlens: IntArrayLike | None = None, eod: int | None = None) -> IntArray:
    """Bounds of the documents in the tokens of a microbatch, int64 ``[num_documents + 1]``; no document is empty.

    Args:
        tokens: int ``[batch_size, seqlen]``, the sequences one after another.
        cu_seqlens: int ``[batch_size, n]``, each row the bounds of one sequence's documents from 0 on. Rows have
            one length because the last bound is repeated; what follows it is a document of its own.
        eod: token that ends a document, where there is no ``cu_seqlens``. Without both, sequences are documents.

    Raises:
        ValueError: bounds that do not begin with 0, decrease, or lie outside of the sequence.
    """
    batch_size, seqlen = (int(n) for n in tokens.shape)
    sequences = sequence_bounds(batch_size, seqlen)
    if cu_seqlens is None:
        return sequences if eod is None else cu_seqlens_from_eod(tokens=tokens, eod=eod)
    rows = int_array(cu_seqlens, "cu_seqlens", ndim=2)
    if len(rows) != batch_size or not rows.shape[1]:
        raise ValueError(f"cu_seqlens: expected {batch_size} rows of bounds, got shape {list(rows.shape)}")
    bad = (rows[:, 0] != 0) | (rows[:, -1] > seqlen) | (np.diff(rows, axis=1) < 0).any(axis=1)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"cu_seqlens: the bounds of sequence {i} must rise from 0 to at most {seqlen}, got {rows[i].tolist()}"
        )
    return np.unique(np.concatenate([sequences, (rows + sequences[:-1, None]).reshape(-1)]))
