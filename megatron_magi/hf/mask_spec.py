"""A mask as lists of ranges, as NeMo Automodel passes it around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_magi.api.masks import mask_from_ranges
from megatron_magi.mask import AttnMask, MaskType, builders


@dataclass
class AttnMaskSpec:
    """Queries ``q_ranges[i]`` see keys ``k_ranges[i]`` as ``mask_types[i]``, "full" or "causal".

    Attributes:
        q_ranges, k_ranges: pairs ``[start, end)`` of tokens.
        mask_types: one for each pair of ranges.
        total_seqlen: tokens of the sequence.
    """

    q_ranges: list
    k_ranges: list
    mask_types: list
    total_seqlen: int

    @classmethod
    def causal(cls, seqlen: int) -> AttnMaskSpec:
        """One causal sequence."""
        return cls.of(builders.causal(seqlen))

    @classmethod
    def varlen(cls, seqlens: Sequence[int], causal: bool = True) -> AttnMaskSpec:
        """Packed documents, which do not see each other."""
        return cls.of(builders.varlen(doc_lengths=seqlens, causal=causal))

    @classmethod
    def prefix_tree(
        cls, node_lengths: Sequence[int], sample_paths: Sequence[Sequence[int]]
    ) -> tuple[AttnMaskSpec, list[list[list[int]]]]:
        """Samples with shared prefixes, each stored once; see `megatron_magi.mask.builders.prefix_tree`.

        Returns:
            ``(spec, sample_token_ranges)``: for each sample the ranges ``[start, end]`` of its nodes.
        """
        mask, ranges = builders.prefix_tree(node_lengths, sample_paths)
        return cls.of(mask), [[[r.start, r.end] for r in own] for own in ranges]

    @classmethod
    def of(cls, mask: AttnMask) -> AttnMaskSpec:
        """The ranges of a mask that has as many queries as keys."""
        table = mask.table
        types = [MaskType(kind).name.lower() for kind in table[:, 4].tolist()]
        return cls(table[:, :2].tolist(), table[:, 2:4].tolist(), types, mask.total_seqlen_q)

    @property
    def mask(self) -> AttnMask:
        """The mask of these ranges.

        Raises:
            ValueError: a range or a type is wrong, or two slices overlap.
        """
        total = self.total_seqlen
        return mask_from_ranges(self.q_ranges, self.k_ranges, self.mask_types, total, total)

    def fingerprint(self) -> tuple[Any, ...]:
        """Hashable; equal for equal lists."""
        ranges = (tuple(map(tuple, ranges)) for ranges in (self.q_ranges, self.k_ranges))
        return self.total_seqlen, *ranges, tuple(self.mask_types)
