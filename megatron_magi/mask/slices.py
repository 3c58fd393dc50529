"""What attends to what, in global token coordinates: ranges, slices, masks."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Self

import numpy as np

from megatron_magi.checks import MAX_TOKENS, int_array, integer
from megatron_magi.mask import bands as bd
from megatron_magi.mask.overlap import find_overlap


class MaskType(IntEnum):
    """How the rectangle of a slice is masked. The values are shared with the kernels.

    FULL: every query sees every key. CAUSAL: the diagonal ends in the bottom-right corner.
    INV_CAUSAL: the diagonal starts in the top-left corner and keys left of it are hidden.
    BI_CAUSAL: both diagonals.
    """

    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3


class RangeError(ValueError):
    """A range that ends before it starts."""


@dataclass(frozen=True, slots=True, order=True)
class AttnRange:
    """A half-open range of integers ``[start, end)``, a value: it cannot be changed, and hashes by content.

    Ranges of tokens start at 0 or later, which is checked where a mask is made of them; other ranges (of diagonals,
    or shifted ones) may be negative.

    Raises:
        ValueError: a bound is no integer.
        RangeError: ``start`` is larger than ``end``.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        for bound in ("start", "end"):
            object.__setattr__(self, bound, integer(getattr(self, bound), f"range: {bound}"))
        self.check_valid()

    @classmethod
    def from_range(
        cls, attn_range: Sequence[int] | AttnRange, check: bool = False, name: str = "attn_range"
    ) -> AttnRange:
        """From a pair ``(start, end)``; ``name`` is what a message calls the argument.

        ``check`` has no effect: ranges are always checked.

        Raises:
            ValueError: not a pair of integers, or as in the constructor.
        """
        if isinstance(attn_range, AttnRange):
            return attn_range
        pair = int_array(attn_range, name)
        if len(pair) != 2:
            raise ValueError(f"{name}: expected (start, end), got {pair.tolist()}")
        try:
            return cls(*pair.tolist())
        except ValueError as error:
            raise type(error)(f"{name}: {str(error).removeprefix('range: ')}") from None

    @property
    def seqlen(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    def to_naive_range(self) -> tuple[int, int]:
        """The pair ``(start, end)``."""
        return self.start, self.end

    def clone(self) -> AttnRange:
        """An equal range."""
        return AttnRange(self.start, self.end)

    def offset(self, offset: int) -> AttnRange:
        """The range moved by ``offset``, which may be negative."""
        return AttnRange(self.start + offset, self.end + offset)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """The part from ``start`` on and before ``end``, None for no bound; an empty range where nothing is left."""
        start = self.start if start is None else max(self.start, start)
        end = self.end if end is None else min(self.end, end)
        return AttnRange(start, max(start, end))

    def intersect(self, other: AttnRange) -> AttnRange:
        """What both have; an empty range where that is nothing."""
        end = min(self.end, other.end)
        return AttnRange(min(max(self.start, other.start), end), end)

    def intersect_size(self, other: AttnRange) -> int:
        """Number of tokens that both have."""
        return self.intersect(other).seqlen

    def union(self, other: AttnRange) -> list[AttnRange]:
        """What either has: one range where they overlap, else ``[self, other]`` as they are."""
        if not self.is_overlap_with(other):
            return [self, other]
        return [AttnRange(min(self.start, other.start), max(self.end, other.end))]

    def union_size(self, other: AttnRange) -> int:
        """Number of tokens that either has."""
        return self.seqlen + other.seqlen - self.intersect_size(other)

    def diff_by(self, other: AttnRange) -> list[AttnRange]:
        """What ``other`` has and this range has not: at most two ranges, none of them empty."""
        parts = [other.truncate(end=self.start), other.truncate(start=self.end)]
        return [part for part in parts if not part.is_empty()]

    def is_subrange_of(self, other: AttnRange) -> bool:
        """Whether both bounds lie within those of ``other``."""
        return other.start <= self.start and self.end <= other.end

    def is_overlap_with(self, other: AttnRange) -> bool:
        """Whether a token is in both."""
        return max(self.start, other.start) < min(self.end, other.end)

    def is_empty(self) -> bool:
        """Whether no token is in it."""
        return self.start == self.end

    def is_valid_close(self, start: int | None = None, end: int | None = None) -> bool:
        """Whether ``start <= end``; the range's own bounds stand for None."""
        return (self.start if start is None else start) <= (self.end if end is None else end)

    def is_valid_open(self, start: int | None = None, end: int | None = None) -> bool:
        """Whether ``start < end``; the range's own bounds stand for None."""
        return (self.start if start is None else start) < (self.end if end is None else end)

    def check_valid(self, start: int | None = None, end: int | None = None) -> None:
        """Checks what `is_valid_close` says.

        Raises:
            RangeError: it is False.
        """
        if not self.is_valid_close(start, end):
            start, end = self.start if start is None else start, self.end if end is None else end
            raise RangeError(f"range: expected start <= end, got [{start}, {end})")

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter((self.start, self.end))

    def __repr__(self) -> str:
        return f"[{self.start}, {self.end})"


class AttnRanges(list[AttnRange]):
    """A list of `AttnRange`, kept in the order given."""

    @classmethod
    def from_ranges(
        cls, ranges: Iterable[Sequence[int] | AttnRange], check: bool = False, name: str = "ranges"
    ) -> Self:
        """From pairs ``(start, end)``: a nested list, an ``[n, 2]`` array or tensor, or ranges.

        ``name`` is what a message calls the argument; ``check`` has no effect: ranges are always checked.

        Raises:
            ValueError: not a list of pairs of integers, or a range is wrong.
        """
        if hasattr(ranges, "tolist"):
            ranges = int_array(ranges, name, ndim=2)
            if ranges.shape[1] != 2:
                raise ValueError(f"{name}: expected shape [n, 2], got {list(ranges.shape)}")
            ranges = ranges.tolist()
        elif not isinstance(ranges, Iterable):
            raise ValueError(f"{name}: expected pairs (start, end), got {ranges!r}")
        return cls(AttnRange.from_range(r, name=f"{name}[{i}]") for i, r in enumerate(ranges))

    def to_naive_ranges(self) -> list[tuple[int, int]]:
        """A list of pairs ``(start, end)``."""
        return [(r.start, r.end) for r in self]

    @property
    def total_seqlen(self) -> int:
        """Sum of the lengths; tokens in two ranges count twice."""
        return sum(len(r) for r in self)

    @property
    def end(self) -> int:
        """Largest end, 0 when there is no range."""
        return max((r.end for r in self), default=0)


@dataclass(frozen=True, slots=True)
class AttnSlice:
    """A rectangle of queries times keys with one of the four mask types."""

    q_range: AttnRange
    k_range: AttnRange
    mask_type: MaskType = MaskType.FULL

    def __repr__(self) -> str:
        return f"AttnSlice(q={self.q_range!r}, k={self.k_range!r}, {self.mask_type.name})"


class AttnMask:
    """An attention mask: a set of slices over ``total_seqlen_q`` x ``total_seqlen_k`` tokens.

    Immutable and hashable; equal when the slices are equal in the same order. Holds no
    tensor and no device. Tokens that no slice covers see nothing (output 0, lse -inf).

    Args:
        slices: int array-like or tensor ``[n, 5]`` with the columns q_start, q_end, k_start, k_end,
            mask type; or `AttnSlice` objects.
        total_seqlen_q: number of query tokens.
        total_seqlen_k: number of key tokens; that of the queries when None.

    Raises:
        ValueError: a number is no integer, a range is out of bounds or inverted, a mask type is
            unknown, or two slices cover a common (query, key) pair.
    """

    __slots__ = ("__dict__", "_digest", "_packed", "_table", "total_seqlen_k", "total_seqlen_q")

    def __init__(
        self,
        slices: Iterable[AttnSlice] | np.ndarray | Sequence[Sequence[int]],
        total_seqlen_q: int,
        total_seqlen_k: int | None = None,
    ) -> None:
        self.total_seqlen_q = integer(total_seqlen_q, "total_seqlen_q")
        self.total_seqlen_k = (
            self.total_seqlen_q if total_seqlen_k is None else integer(total_seqlen_k, "total_seqlen_k")
        )
        self._table = _slice_table(slices)
        self._validate()
        self._take(self._table)

    @classmethod
    def _of_valid(cls, table: np.ndarray, total_seqlen_q: int, total_seqlen_k: int) -> AttnMask:
        """As the constructor, of arguments that are known to be valid, which nothing checks.

        Args:
            table: int64 ``[n, 5]``, contiguous; nobody may write to it any more.
            total_seqlen_q, total_seqlen_k: as there.
        """
        made = cls.__new__(cls)
        made.total_seqlen_q, made.total_seqlen_k = total_seqlen_q, total_seqlen_k
        made._take(table)
        return made

    def _take(self, table: np.ndarray) -> None:
        table.setflags(write=False)
        self._table = table
        text = hashlib.sha256(struct.pack("=2q", self.total_seqlen_q, self.total_seqlen_k))
        text.update(table)
        self._digest = text.digest()
        self._packed = _packed(table, self._digest)  # now, as it is read inside of compiled graphs

    @classmethod
    def from_ranges(
        cls,
        q_ranges: Iterable,
        k_ranges: Iterable,
        mask_types: Iterable[MaskType | int] | MaskType | int,
        total_seqlen_q: int,
        total_seqlen_k: int | None = None,
    ) -> AttnMask:
        """Any mask, from explicit ranges: ``q_ranges[i]`` sees ``k_ranges[i]`` as ``mask_types[i]``.

        Args:
            q_ranges, k_ranges: pairs ``(start, end)`` of token positions, as in `AttnRanges.from_ranges`.
            mask_types: one for each pair, or one for all.
            total_seqlen_q, total_seqlen_k: tokens; as many keys as queries unless given.

        Raises:
            ValueError: the three lists differ in length, or as in the constructor.
        """
        q, k = (AttnRanges.from_ranges(r, name=n) for r, n in ((q_ranges, "q_ranges"), (k_ranges, "k_ranges")))
        if isinstance(mask_types, int):
            mask_types = [mask_types] * len(q)
        if not isinstance(mask_types, Iterable):
            raise ValueError(f"mask_types: expected a mask type or a list of them, got {mask_types!r}")
        types = int_array(mask_types if hasattr(mask_types, "tolist") else list(mask_types), "mask_types").tolist()
        if not len(q) == len(k) == len(types):
            raise ValueError(f"q_ranges, k_ranges, mask_types: lengths disagree: {len(q)}, {len(k)}, {len(types)}")
        table = [(a.start, a.end, b.start, b.end, t) for a, b, t in zip(q, k, types, strict=True)]
        return cls(np.array(table, dtype=np.int64).reshape(-1, 5), total_seqlen_q, total_seqlen_k)

    def to_ranges(self) -> tuple[AttnRanges, AttnRanges, list[MaskType], int, int]:
        """Returns the arguments of `from_ranges`: q_ranges, k_ranges, mask_types, total_seqlen_q, total_seqlen_k.

        They are the first five of `magi_attn_flex_key`.
        """
        q_ranges, k_ranges = (AttnRanges.from_ranges(self._table[:, i : i + 2]) for i in (0, 2))
        types = [MaskType(t) for t in self._table[:, 4].tolist()]
        return q_ranges, k_ranges, types, self.total_seqlen_q, self.total_seqlen_k

    def _validate(self) -> None:
        t = self._table
        for name, total in (("total_seqlen_q", self.total_seqlen_q), ("total_seqlen_k", self.total_seqlen_k)):
            if total < 0:
                raise ValueError(f"{name}: must not be negative, got {total}")
            if total > MAX_TOKENS:
                raise ValueError(f"{name}: expected at most {MAX_TOKENS} tokens, got {total}")
        for what, lo, hi, total in (("q_range", 0, 1, self.total_seqlen_q), ("k_range", 2, 3, self.total_seqlen_k)):
            bad = np.flatnonzero((t[:, lo] < 0) | (t[:, lo] > t[:, hi]) | (t[:, hi] > total))
            if len(bad):
                i = int(bad[0])
                raise ValueError(
                    f"slices: {what} of slice {i}: [{t[i, lo]}, {t[i, hi]}) is not a range in [0, {total})"
                )
        bad = np.flatnonzero((t[:, 4] < 0) | (t[:, 4] > 3))
        if len(bad):
            raise ValueError(f"slices: mask_type of slice {int(bad[0])}: expected 0, 1, 2 or 3, got {t[bad[0], 4]}")
        pair = find_overlap(self.bands_untightened)
        if pair is not None:
            i, j, q, k = pair
            raise ValueError(
                f"slices: slice {i} {self.slices[i]!r} and slice {j} {self.slices[j]!r} overlap: "
                f"both cover query {q}, key {k}"
            )

    @property
    def table(self) -> np.ndarray:
        """int64 ``[n, 5]``, read-only: q_start, q_end, k_start, k_end, mask type."""
        return self._table

    @property
    def packed(self) -> np.ndarray:
        """The mask as one array of few shapes, for graphs that are compiled once for many masks.

        int64 ``[1 + m, 5]``: the digest as four numbers and the number of slices; the slices; rows of zeros, so
        that m is one of 64, 512, 4096 and so on. Not to be written to.
        """
        return self._packed

    @cached_property
    def slices(self) -> tuple[AttnSlice, ...]:
        """The slices as objects, in the order given."""
        return tuple(AttnSlice(AttnRange(a, b), AttnRange(c, d), MaskType(t)) for a, b, c, d, t in self._table.tolist())

    @property
    def bands_untightened(self) -> np.ndarray:
        """One band a slice, in the slices' order, int64 ``[n, 6]``."""
        t = self._table
        out = np.empty((len(t), bd.NUM_COLUMNS), dtype=np.int64)
        out[:, :4] = t[:, :4]
        from_top_left = (t[:, 4] == MaskType.INV_CAUSAL) | (t[:, 4] == MaskType.BI_CAUSAL)
        to_bottom_right = (t[:, 4] == MaskType.CAUSAL) | (t[:, 4] == MaskType.BI_CAUSAL)
        out[:, bd.D_LO] = np.where(from_top_left, t[:, 2] - t[:, 0], -bd.NO_DIAGONAL)
        out[:, bd.D_HI] = np.where(to_bottom_right, t[:, 3] - t[:, 1] + 1, bd.NO_DIAGONAL)
        return out

    @cached_property
    def bands(self) -> np.ndarray:
        """The mask as tight bands, int64 ``[m, 6]``, m <= n (see `megatron_magi.mask.bands`)."""
        out = bd.tighten(self.bands_untightened)
        out.setflags(write=False)
        return out

    @cached_property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        return int(bd.areas(self.bands).sum())

    @property
    def digest(self) -> bytes:
        """32 bytes that identify the content, equal across processes and runs."""
        return self._digest

    def __reduce__(self) -> tuple:
        return AttnMask, (np.array(self._table), self.total_seqlen_q, self.total_seqlen_k)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnMask) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return (
            f"AttnMask({len(self._table)} slices, total_seqlen_q={self.total_seqlen_q}, "
            f"total_seqlen_k={self.total_seqlen_k})"
        )


def slice_table(
    q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray, mask_type: MaskType | np.ndarray
) -> np.ndarray:
    """Slices as rows, int64 ``[n, 5]``, from bounds and mask types, int64 ``[n]``; or one type for all."""
    out = np.empty((len(q0), 5), dtype=np.int64)
    for column, values in enumerate((q0, q1, k0, k1, mask_type)):
        out[:, column] = values
    return out


def _packed(table: np.ndarray, digest: bytes) -> np.ndarray:
    capacity = 64
    while capacity < len(table):
        capacity *= 8
    out = np.zeros((1 + capacity, 5), dtype=np.int64)
    out[0, :4], out[0, 4] = np.frombuffer(digest, dtype=np.int64), len(table)
    out[1 : 1 + len(table)] = table
    return out


def _slice_table(slices: Iterable[AttnSlice] | np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    if not hasattr(slices, "tolist"):
        if not isinstance(slices, Iterable):
            raise ValueError(f"slices: expected rows of five integers or AttnSlice objects, got {slices!r}")
        rows = [(*s.q_range, *s.k_range, s.mask_type) if isinstance(s, AttnSlice) else s for s in slices]
        slices = rows if rows else np.zeros((0, 5), np.int64)
    table = int_array(slices, "slices", ndim=2)
    if table.shape[1] != 5:
        raise ValueError(f"slices: expected shape [n, 5], got {list(table.shape)}")
    return np.ascontiguousarray(table)
