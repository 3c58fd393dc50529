"""Lists of ranges, with the methods that users of MagiAttention know."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Self, SupportsIndex, overload

import numpy as np
import torch

from megatron_magi.checks import int_at_least
from megatron_magi.mask import AttnRange
from megatron_magi.mask import AttnRanges as _AttnRanges
from megatron_magi.mask.bands import merge_ranges
from megatron_magi.mask.documents import cumulative


class SliceableList[Item](list[Item]):
    """A list whose slices are of its own type."""

    @overload
    def __getitem__(self, idx: SupportsIndex) -> Item: ...
    @overload
    def __getitem__(self, idx: slice) -> Self: ...
    def __getitem__(self, idx: SupportsIndex | slice) -> Item | Self:
        item = super().__getitem__(idx)
        return type(self)(item) if isinstance(idx, slice) else item


class AttnRanges(SliceableList[AttnRange], _AttnRanges):
    """A list of `AttnRange`, in any order; they may overlap, touch and be empty.

    *Merged* means sorted, with neither empty, nor overlapping, nor touching ranges: one range for each run of tokens.
    Methods that return ranges return new lists; only `append`, `insert`, `extend`, `pop` and assignment change a list.
    ``check`` arguments have no effect where nothing is said of them: a range is checked when it is made. Bounds may be
    negative, as of shifted ranges; that tokens count from 0 is checked where a mask or a key is made of ranges.
    """

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int], seq_len: int) -> Self:
        """The documents between cumulative lengths.

        Raises:
            ValueError: they decrease, or do not go from 0 to ``seq_len``.
        """
        check_valid_cu_seqlens(cu_seqlens, seq_len)
        return cls(AttnRange(a, b) for a, b in pairwise(cumulative(cu_seqlens, "cu_seqlens").tolist()))

    def is_cu_seqlens(self, seqlen: int) -> bool:
        """Whether the ranges follow one another from 0 to ``seqlen``, in order and without gaps."""
        ends = [0, *(r.end for r in self)]
        return ends[-1] == seqlen and [r.start for r in self] == ends[:-1]

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """Cumulative lengths, from 0 to ``seq_len``.

        Raises:
            ValueError: `is_cu_seqlens` is False.
        """
        if not self.is_cu_seqlens(seq_len):
            raise ValueError(f"ranges: expected documents one after the other from 0 to {seq_len}, got {self}")
        return [0, *(r.end for r in self)]

    def to_tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int32 ``[n, 2]``, as `flex_flash_attn_func` takes them."""
        return torch.tensor(self.to_naive_ranges(), dtype=torch.int32, device=device).reshape(-1, 2)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self)

    @property
    def start(self) -> int:
        """Smallest start, 0 when there is no range."""
        return min((r.start for r in self), default=0)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest range, 0 when there is no range."""
        return max((len(r) for r in self), default=0)

    @property
    def points(self) -> list[int]:
        """All starts and ends, sorted, each once."""
        return sorted({bound for r in self for bound in (r.start, r.end)})

    def is_empty(self) -> bool:
        """No range at all."""
        return not self

    def is_valid(self) -> bool:
        """Always True: no range can end before it starts."""
        return all(r.is_valid_close() for r in self)

    def check_valid(self) -> None:
        """Does nothing: no range can end before it starts."""

    def is_sorted(self) -> bool:
        """Whether no range starts before the one that precedes it."""
        return all(a.start <= b.start for a, b in pairwise(self))

    def is_merged(self) -> bool:
        """Whether `merge` would change nothing."""
        return self == self.merge()

    def is_non_overlap(self) -> bool:
        """Whether no token is in two ranges."""
        return self.total_seqlen == self.merge().total_seqlen

    # As in a list, but for ``check``.
    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        """Puts a range at the end."""
        super().append(attn_range)

    def insert(self, idx: int, attn_range: AttnRange, check: bool = False) -> None:
        """Puts a range before the one at ``idx``."""
        super().insert(idx, attn_range)

    def extend(self, attn_ranges: Iterable[AttnRange], check: bool = False) -> None:
        """Puts ranges at the end."""
        super().extend(attn_ranges)

    def pop(self, idx: int = -1) -> AttnRange:
        """Takes a range out of the list and returns it.

        Raises:
            IndexError: there is none at ``idx``.
        """
        return super().pop(idx)

    def clone(self) -> AttnRanges:
        """A list of the same ranges."""
        return AttnRanges(self)

    def clear_empty(self) -> AttnRanges:
        """The ranges that have tokens."""
        return AttnRanges(r for r in self if not r.is_empty())

    def sort(self) -> AttnRanges:
        """The ranges by start; those with the same start stay in order. Other than in a list, a new one."""
        return AttnRanges(sorted(self, key=lambda r: r.start))

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRanges:
        """What is left of each range from ``start`` on and before ``end``, without those of which nothing is."""
        return AttnRanges(r.truncate(start, end) for r in self).clear_empty()

    def merge(self) -> AttnRanges:
        """The tokens of all ranges, merged."""
        return _of_table(merge_ranges(self._table())[0])

    def merge_with_split_alignment(self, split_alignment: int = 1) -> AttnRanges:
        """`merge` of the ranges made larger, so that all bounds are multiples of ``split_alignment``.

        Raises:
            ValueError: ``split_alignment`` is no positive integer.
        """
        step = int_at_least(split_alignment, "split_alignment", 1)
        table = self.clear_empty()._table()
        return _of_table(merge_ranges(np.stack([table[:, 0] // step, -(-table[:, 1] // step)], axis=1) * step)[0])

    def chunk(self, chunk_size: int, check: bool = True) -> list[AttnRanges]:
        """The tokens in the order of the ranges, cut into pieces of ``chunk_size``; the last may be shorter.

        Args:
            chunk_size: tokens a piece.
            check: refuse ranges that overlap.

        Raises:
            ValueError: ``chunk_size`` is no positive integer, or, with ``check``, ranges overlap.
        """
        chunk_size = int_at_least(chunk_size, "chunk_size", 1)
        if check and not self.is_non_overlap():
            raise ValueError(f"ranges: ranges that are cut into chunks must not overlap, got {self}")
        chunks: list[AttnRanges] = []
        room = 0
        for r in self.clear_empty():
            start = r.start
            while start < r.end:
                if not room:
                    chunks.append(AttnRanges())
                    room = chunk_size
                end = min(start + room, r.end)
                chunks[-1].append(AttnRange(start, end))
                room -= end - start
                start = end
        return chunks

    def make_range_local(
        self,
        other_attn_range: AttnRange,
        is_self_merged: bool = False,
        prefix_offset: Sequence[int] | None = None,
    ) -> tuple[AttnRange, AttnRange]:
        """Locates a range in a buffer that holds these ranges' tokens, each once and in order, and no others.

        Args:
            other_attn_range: a range of tokens, all of which are in one range of the merged list.
            is_self_merged: the list is merged already. Touching ranges are then not joined.
            prefix_offset: where each range of the (merged) list begins in the buffer; computed when None.

        Returns:
            ``(local_range, target_range)``: the place in the buffer, and the range of the merged list around it.

        Raises:
            ValueError: there is no such range.
        """
        merged = self if is_self_merged else self.merge()
        if prefix_offset is None:
            prefix_offset = merged._offsets()
        if len(prefix_offset) != len(merged):
            raise ValueError(f"prefix_offset: {len(prefix_offset)} offsets for {len(merged)} ranges")
        at = bisect_right(merged, other_attn_range.start, key=lambda r: r.start) - 1
        if at < 0 or not other_attn_range.is_subrange_of(merged[at]):
            raise ValueError(f"other_attn_range: {other_attn_range} lies in no range of {merged}")
        return other_attn_range.offset(prefix_offset[at] - merged[at].start), merged[at]

    def make_ranges_local(self, other_attn_ranges: Iterable[AttnRange], is_self_merged: bool = False) -> AttnRanges:
        """`make_range_local` of each range, the places alone.

        Raises:
            ValueError: one of them is not within one range of the merged list.
        """
        merged = self if is_self_merged else self.merge()
        offsets = merged._offsets()
        return AttnRanges(merged.make_range_local(r, True, offsets)[0] for r in other_attn_ranges)

    def find_hole_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """The tokens of this list that are in no range of the other, merged.

        ``is_self_merged`` and ``is_other_merged`` have no effect.
        """
        holes = (AttnRange(a, b) for a, b, mine, others in self._pieces(other_attn_ranges) if mine and not others)
        return AttnRanges(holes).merge()

    def find_overlap_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """The tokens that are in ranges of both lists, merged.

        ``is_self_merged`` and ``is_other_merged`` have no effect.
        """
        common = (AttnRange(a, b) for a, b, mine, others in self._pieces(other_attn_ranges) if mine and others)
        return AttnRanges(common).merge()

    def intersect_size(self) -> int:
        """How many tokens are there again: a token in n ranges counts n - 1 times."""
        return self.total_seqlen - self.merge().total_seqlen

    def intersect_size_with(self, other: AttnRanges) -> int:
        """`intersect_size` of both lists together, of the tokens that are in both alone."""
        return sum((mine + others - 1) * (b - a) for a, b, mine, others in self._pieces(other) if mine and others)

    def union_size(self) -> int:
        """Sum of the lengths; tokens in two ranges count twice."""
        return self.total_seqlen

    def union_size_with(self, other: AttnRanges) -> int:
        """Sum of the lengths of both lists; tokens in two ranges count twice."""
        return self.total_seqlen + other.total_seqlen

    def _table(self) -> np.ndarray:
        return np.array(self.to_naive_ranges(), dtype=np.int64).reshape(-1, 2)

    def _offsets(self) -> list[int]:
        """Where each range begins when their tokens lie one after the other."""
        return list(accumulate((len(r) for r in self), initial=0))[:-1]

    def _pieces(self, other: AttnRanges) -> Iterator[tuple[int, int, int, int]]:
        """The line cut at all bounds of both lists: start, end, number of ranges of each list that cover the piece."""
        change: dict[int, list[int]] = {}
        for column, ranges in enumerate((self, other)):
            for r in ranges:
                change.setdefault(r.start, [0, 0])[column] += 1
                change.setdefault(r.end, [0, 0])[column] -= 1
        mine = others = 0
        for (point, (opened, opened_others)), (end, _) in pairwise(sorted(change.items())):
            mine, others = mine + opened, others + opened_others
            yield point, end, mine, others


def _of_table(table: np.ndarray) -> AttnRanges:
    return AttnRanges(AttnRange(a, b) for a, b in table.tolist())


def is_valid_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> bool:
    """Whether these are cumulative lengths of documents: from 0 to ``seq_len``, never falling.

    Documents may have no tokens, so a number may repeat.
    """
    try:
        check_valid_cu_seqlens(cu_seqlens, seq_len)
    except ValueError:
        return False
    return True


def check_valid_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> None:
    """Checks what `is_valid_cu_seqlens` says.

    Raises:
        ValueError: it is False; the message says why.
    """
    last = cumulative(cu_seqlens, "cu_seqlens").tolist()[-1]
    if last != seq_len:
        raise ValueError(f"cu_seqlens: ends with {last}, seq_len is {seq_len}")
