"""What transformers' mask functions mean, read off their closures: no matrix is made of those it composes itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import masking_utils

from megatron_magi.hf.intervals import Intervals

FAR = 1 << 40
"""Beyond all positions."""


class Unknown(Exception):
    """A mask function that is none of transformers' own."""


@dataclass(frozen=True)
class Rows:
    """The queries of one sequence for which a mask function is asked.

    Attributes:
        sequence: its index in the batch.
        index: int64 ``[num_rows]``, what the function takes for its ``q_idx``.
        left_padding: in place of what a chunked mask was made with: where chunks begin to count, for all rows or each.
        is_shard: the tensors in the function are those of a shard: only what has none can be asked.
    """

    sequence: int
    index: np.ndarray
    left_padding: int | np.ndarray | None = None
    is_shard: bool = False


def name_of(function: Callable) -> str:
    """The name of a function of transformers', or of the function that made it; empty for other functions."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return ""
    return function.__qualname__.partition(".")[0]


def parts_of(function: Callable) -> Iterator[str]:
    """Names of all functions that it is composed of."""
    yield name_of(function)
    inside = _captured(function) if name_of(function) else {}
    for inner in inside.get("mask_functions", [inside[name] for name in ("mask_function",) if name in inside]):
        yield from parts_of(inner)


def intervals_of(function: Callable, rows: Rows) -> Intervals:
    """The keys that each row sees, in the function's own coordinates.

    Raises:
        Unknown: it, or what it is composed of, is not transformers' own, or is composed in another way than there.
    """
    name, q, num_rows = name_of(function), rows.index, len(rows.index)
    if name in _SIMPLE:
        captured = _captured(function)
        lo, hi = _SIMPLE[name](q, captured, rows)
        return Intervals.of(lo, hi, num_rows)
    if name in ("and_masks", "or_masks"):
        parts = _captured(function)["mask_functions"]
        names = [name_of(part) for part in parts]
        if name == "and_masks" and _PACKED in names:
            packed = packed_parts(function)
            if packed is None:
                raise Unknown(", ".join(names))
            return _in_documents(packed, rows)
        out = intervals_of(parts[0], rows)
        for part in parts[1:]:
            other = intervals_of(part, rows)
            out = out & other if name == "and_masks" else out | other
        return out
    if name == _BLOCKS and not rows.is_shard:
        return _blocks(_captured(function)["block_sequence_ids"], rows)
    raise Unknown(name or getattr(function, "__qualname__", repr(function)))


_PACKED = "packed_sequence_mask_function"
_REMAPPED = "remap_positions_for_packed_sequence"
_BLOCKS = "blockwise_overlay"


class PackedParts(NamedTuple):
    """What a mask of packed documents is composed of.

    Attributes:
        inner: the function of positions in documents.
        position_ids, numbers: int64 ``[batch_size, seqlen]``, of tokens in their documents, and of documents.
        blocks: parts that number tokens by their place in a row, inside documents.
    """

    inner: Callable
    position_ids: torch.Tensor
    numbers: torch.Tensor
    blocks: list[Callable]


def packed_parts(function: Callable) -> PackedParts | None:
    """Of packed documents as transformers composes them: a mask of documents, and a function of positions in them.

    Up to transformers 5.23 the former comes first; since 5.24 last, after blocks of tokens that are seen besides.
    """
    parts = _captured(function)["mask_functions"] if name_of(function) == "and_masks" else ()
    by_name = {name_of(part): part for part in parts}
    if len(parts) != 2 or len(by_name) != 2 or _PACKED not in by_name:
        return None
    (other,) = (part for name, part in by_name.items() if name != _PACKED)
    blocks: list[Callable] = []
    if name_of(other) == "or_masks":
        other, *blocks = _captured(other)["mask_functions"]
    if name_of(other) != _REMAPPED or any(name_of(block) != _BLOCKS for block in blocks):
        return None
    inside = _captured(other)
    numbers = _captured(by_name[_PACKED])["packed_sequence_mask"]
    return PackedParts(inside["mask_function"], inside["position_ids"], numbers, blocks)


def document_bounds(numbers: np.ndarray) -> np.ndarray:
    """Bounds of runs of equal numbers, int64 ``[num_runs + 1]``."""
    changes = np.flatnonzero(np.diff(numbers)) + 1
    return np.concatenate([[0], changes, [len(numbers)]])


def bounds_by_positions(position_ids: np.ndarray) -> np.ndarray:
    """Bounds of the documents of a sequence: a document's positions rise by one."""
    return np.concatenate([[0], np.flatnonzero(np.diff(position_ids) != 1) + 1, [len(position_ids)]])


class Places(NamedTuple):
    """The documents of a sequence.

    Attributes:
        positions: int64 ``[seqlen]``, of each token in its document.
        bounds: int64 ``[num_documents + 1]``.
    """

    positions: np.ndarray
    bounds: np.ndarray


def places_of(position_ids: np.ndarray | None, others: np.ndarray | None, shape: tuple[int, int]) -> list[Places]:
    """Documents that are given by positions, by bounds, or by both, each of which begins some.

    Args:
        position_ids: ``[batch_size, seqlen]``. Where they are those of one document in each sequence they say nothing:
            it counts from 0, as transformers has it.
        others: bounds in the tokens of all sequences, those of sequences among them. A document that begins at one of
            them alone counts from 0.
        shape: ``(batch_size, seqlen)``.
    """
    batch_size, seqlen = shape
    own = [np.array([0, seqlen])] * batch_size
    if position_ids is not None:
        own = [bounds_by_positions(row) for row in position_ids]
    is_packed = max(map(len, own)) > 2
    out = []
    for i, bounds in enumerate(own):
        firsts = np.zeros(seqlen, dtype=np.int64)
        if is_packed and position_ids is not None:
            firsts[bounds[:-1]] = position_ids[i, bounds[:-1]]
        if others is not None:
            there = others - i * seqlen
            bounds = np.union1d(bounds, there[(there >= 0) & (there <= seqlen)])
        starts = bounds[:-1]
        positions = np.arange(seqlen) - np.repeat(starts - firsts[starts], np.diff(bounds))
        out.append(Places(positions, bounds))
    return out


def padding_before(seen: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """For each token the padding at the start of its document; ``seen`` bool ``[seqlen]``, tokens that are none."""
    lengths = [int((np.cumsum(seen[a:b]) == 0).sum()) for a, b in itertools.pairwise(bounds.tolist())]
    return np.repeat(lengths, np.diff(bounds))


def to_numpy(x: Any) -> np.ndarray:
    """A tensor's values on the CPU."""
    return x.detach().cpu().numpy()


def _captured(function: Callable) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _window(q: np.ndarray, captured: dict, _rows: Rows) -> tuple:
    return q - captured["sliding_window"] + 1, FAR


def _two_sided_window(q: np.ndarray, captured: dict, _rows: Rows) -> tuple:
    return q - captured["sliding_window"], q + captured["sliding_window"] + 1


def _chunk(q: np.ndarray, captured: dict, rows: Rows) -> tuple:
    size, left = captured["chunk_size"], rows.left_padding
    left = int(captured["left_padding"][rows.sequence]) if left is None else left
    start = (q - left) // size * size + left
    return start, start + size


_SIMPLE: dict[str, Callable[[np.ndarray, dict, Rows], tuple]] = {
    "causal_mask_function": lambda q, _captured, _rows: (-FAR, q + 1),
    "bidirectional_mask_function": lambda _q, _captured, _rows: (-FAR, FAR),
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _two_sided_window,
    "chunked_overlay": _chunk,
}
"""Functions that show each row one interval."""


def _in_documents(packed: PackedParts, rows: Rows) -> Intervals:
    """A function of positions in documents, and blocks of tokens in them."""
    if rows.is_shard:
        raise Unknown(_PACKED)
    bounds = document_bounds(to_numpy(packed.numbers[rows.sequence]))
    seen = at_positions(packed.inner, rows, to_numpy(packed.position_ids[rows.sequence]), bounds)
    for block in packed.blocks:
        seen = seen | intervals_of(block, rows).within(bounds)
    return seen


def at_positions(function: Callable, rows: Rows, positions: np.ndarray, bounds: np.ndarray) -> Intervals:
    """A function of positions in documents, where a document's positions rise by one a token.

    ``positions`` int64 ``[num_rows]``; ``bounds`` of the documents; rows must be all tokens of the sequence.
    """
    there = Rows(rows.sequence, positions, rows.left_padding, rows.is_shard)
    return intervals_of(function, there).shifted(rows.index - positions).within(bounds)


def inner_and_blocks(function: Callable) -> tuple[Callable, list[Callable]]:
    """What a function says of a document's tokens, and those of its parts that number tokens by their place in a row.

    transformers composes a mask as ``or_masks(function of positions in documents, blocks of tokens)``, and since 5.24
    cuts blocks at the ends of documents too (`packed_parts`).
    """
    parts = _captured(function).get("mask_functions", ()) if name_of(function) in ("or_masks", "and_masks") else ()
    if name_of(function) == "or_masks" and [name_of(part) for part in parts[1:]] == [_BLOCKS]:
        return inner_and_blocks(parts[0])[0], [parts[1]]
    packed = packed_parts(function)
    return (function, []) if packed is None else (packed.inner, packed.blocks)


def positions_in(function: Callable) -> np.ndarray | None:
    """The positions ``[batch_size, seqlen]`` of documents that transformers found in them; None where it found none."""
    if name_of(function) == _REMAPPED:
        return to_numpy(_captured(function)["position_ids"])
    parts = _captured(function).get("mask_functions", ()) if name_of(function) else ()
    found = (positions_in(part) for part in parts)
    return next((positions for positions in found if positions is not None), None)


def of_documents(function: Callable, rows: Rows, places: Places) -> Intervals:
    """The keys that each row sees inside its document; rows must be all tokens of the sequence.

    Raises:
        Unknown: as `intervals_of`.
    """
    inner, blocks = inner_and_blocks(function)
    seen = at_positions(inner, rows, *places)
    for block in blocks:
        seen = seen | intervals_of(block, rows)
    return seen.within(places.bounds)


def dense_of_documents(function: Callable, places: list[Places], device: torch.device | str) -> Callable:
    """A function as transformers 5.24 would have composed it for these documents, of each sequence of the batch."""
    inner, blocks = inner_and_blocks(function)
    numbers = [np.repeat(np.arange(len(one.bounds) - 1), np.diff(one.bounds)) for one in places]
    positions = [one.positions for one in places]
    tables = [torch.from_numpy(np.stack(table)).to(device) for table in (positions, numbers)]
    seen = masking_utils.remap_positions_for_packed_sequence(inner, tables[0])
    if blocks:
        seen = masking_utils.or_masks(seen, *blocks)
    return masking_utils.and_masks(seen, masking_utils.packed_sequence_mask_function(tables[1]))


def _blocks(block_ids: Any, rows: Rows) -> Intervals:
    """Tokens of one block see each other; a negative number is no block."""
    numbers = to_numpy(block_ids[rows.sequence])
    bounds = document_bounds(numbers)
    blocks = numbers[bounds[:-1]]
    blocks = blocks[blocks >= 0]
    if len(np.unique(blocks)) != len(blocks):
        raise Unknown("blockwise_overlay of blocks in several pieces")
    run = np.searchsorted(bounds, rows.index, side="right") - 1
    in_block = numbers[rows.index] >= 0
    return Intervals.of(np.where(in_block, bounds[run], 0), np.where(in_block, bounds[run + 1], 0), len(rows.index))
