"""Samples that share prefixes, stored once: a tree of token runs, flattened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_magi.checks import IntArrayLike, int_array
from megatron_magi.mask.bands import IntArray
from megatron_magi.mask.documents import lengths_to_cumulative
from megatron_magi.mask.slices import AttnMask, AttnRange, AttnRanges, MaskType

Span = tuple[int, int]


def prefix_tree(node_lengths: IntArrayLike, sample_paths: Sequence[Sequence[int]]) -> tuple[AttnMask, list[AttnRanges]]:
    """Makes the mask of samples that share prefixes, causal, each shared run of tokens stored once.

    The tokens are laid out node after node, in the order of ``node_lengths``. A token sees its
    node's ancestors and, causally, its own node: what it would see in its sample alone.

    Args:
        node_lengths: int ``[num_nodes]``, tokens of each node; 0 is allowed.
        sample_paths: for each sample its nodes from the root to the leaf. A node that is in no
            path sees nothing.

    Returns:
        ``(mask, sample_token_ranges)``: the ranges of sample i, one a node of its path, in the
        flat layout; their tokens in that order are the sample.

    Raises:
        ValueError: ``sample_paths`` are no lists of integers, a path names an unknown node or one node twice, or two
            paths reach a node from different parents.
    """
    offsets = lengths_to_cumulative(node_lengths, "node_lengths")
    if isinstance(sample_paths, str) or not isinstance(sample_paths, Iterable):
        raise ValueError(f"sample_paths: expected lists of nodes, got {sample_paths!r}")
    paths = [int_array(path, f"sample_paths[{i}]").tolist() for i, path in enumerate(sample_paths)]
    mask = _mask(offsets, _parents(paths, len(offsets) - 1))
    starts, ends = offsets[:-1].tolist(), offsets[1:].tolist()
    return mask, [AttnRanges(AttnRange(starts[n], ends[n]) for n in path) for path in paths]


def mask_of_parents(node_lengths: IntArrayLike, parents: Mapping[int, int]) -> AttnMask:
    """Makes the mask of `prefix_tree` from the parent of each node, -1 for a root. Other nodes are in no path.

    Raises:
        ValueError: a parent is none of these nodes, or a node its own ancestor.
    """
    offsets = lengths_to_cumulative(node_lengths, "node_lengths")
    if not is_forest(parents):
        raise ValueError("node_parents: a parent is no node, or a node is its own ancestor")
    return _mask(offsets, parents)


def is_forest(parents: Mapping[int, int]) -> bool:
    """Whether each parent is one of the nodes or -1, and no node its own ancestor."""
    rooted = {-1}
    for start in parents:
        node, walked = start, set()
        while node not in rooted:
            if node in walked or node not in parents:
                return False
            walked.add(node)
            node = parents[node]
        rooted |= walked
    return True


def _parents(sample_paths: Sequence[Sequence[int]], num_nodes: int) -> dict[int, int]:
    """The parent of each node that is in a path, -1 for a root."""
    parents: dict[int, int] = {}
    for i, path in enumerate(sample_paths):
        above = -1
        for node in path:
            if not 0 <= node < num_nodes:
                raise ValueError(f"sample_paths: sample {i} names node {node}, there are {num_nodes} nodes")
            if parents.setdefault(node, above) != above:
                raise ValueError(
                    f"sample_paths: sample {i} reaches node {node} from {_node_name(above)}, "
                    f"an earlier step from {_node_name(parents[node])}"
                )
            above = node
    return parents


def _node_name(node: int) -> str:
    return f"node {node}" if node >= 0 else "no parent"


class _Spans(NamedTuple):
    """Rows of a node and its ancestors as spans, sorted and touching ones joined: the last, and those before it.

    What is before is shared with other nodes.
    """

    last: Span
    before: _Spans | None
    count: int


def _spans_of(bounds: Sequence[int], parents: Mapping[int, int]) -> dict[int, _Spans | None]:
    """The spans of each node that has a parent or is a root."""
    spans: dict[int, _Spans | None] = {-1: None}
    for node in parents:
        chain = []
        while node not in spans:
            chain.append(node)
            node = parents[node]
        for member in reversed(chain):
            spans[member] = _with_span(spans[parents[member]], (bounds[member], bounds[member + 1]))
    return spans


def _with_span(spans: _Spans | None, new: Span) -> _Spans | None:
    if new[0] == new[1]:
        return spans
    behind = []
    while spans is not None and spans.last[0] > new[0]:
        behind.append(spans.last)
        spans = spans.before
    for lo, hi in [new, *reversed(behind)]:
        if spans is not None and spans.last[1] == lo:
            lo, spans = spans.last[0], spans.before
        spans = _Spans((lo, hi), spans, 1 if spans is None else spans.count + 1)
    return spans


def _touching(spans: _Spans | None, row: int) -> Span | None:
    """The span that ends before ``row``."""
    while spans is not None and spans.last[1] > row:
        spans = spans.before
    return spans.last if spans is not None and spans.last[1] == row else None


def _not_shared(one: _Spans | None, other: _Spans | None) -> tuple[set[Span], set[Span]]:
    """The spans of each down to where both go on as one."""
    of_one, of_other = set(), set()
    while one is not other:
        if other is None or (one is not None and one.count >= other.count):
            of_one.add(one.last)
            one = one.before
        else:
            of_other.add(other.last)
            other = other.before
    return of_one, of_other


class _Seen(NamedTuple):
    """What the rows of a node see in full: its ancestors' spans but the one that touches it."""

    spans: _Spans | None
    touching: Span | None

    def change(self, after: _Seen) -> tuple[set[Span], set[Span]]:
        """Spans that end here, and spans that begin with ``after``."""
        ended, begun = _not_shared(self.spans, after.spans)
        # A span that touches one node and is seen by the other may be in the part that they share.
        if self.touching != after.touching:
            if after.touching is not None and after.touching not in begun:
                ended.add(after.touching)
            if self.touching is not None and self.touching not in ended:
                begun.add(self.touching)
        ended.discard(self.touching)
        begun.discard(after.touching)
        return ended - begun, begun - ended


def _mask(offsets: IntArray, parents: Mapping[int, int]) -> AttnMask:
    """FULL slices of rows that see the same span, CAUSAL ones that reach back over the span that touches them.

    Each goes on over the nodes that follow as long as these see its keys. Work is done where two nodes see different
    spans: of a tree laid out depth first that is a few times a node, however deep it is.
    """
    bounds = offsets.tolist()
    spans, slices = _spans_of(bounds, parents), []
    full: dict[Span, list[int]] = {}  # slices that go on, by their keys
    causal: dict[int, list[int]] = {}  # by their first key
    end, before = 0, _Seen(None, None)
    for node in sorted(parents):
        start, next_end = bounds[node], bounds[node + 1]
        if start == next_end:
            continue
        if start != end:  # the rows in between see nothing
            for row in full.values():
                row[1] = end
            full, before = {}, _Seen(None, None)
        seen = _Seen(spans[parents[node]], _touching(spans[parents[node]], start))
        ended, begun = before.change(seen)
        for span in ended:
            full.pop(span)[1] = start
        for span in sorted(begun):
            full[span] = [start, start, *span, int(MaskType.FULL)]
            slices.append(full[span])
        first = start if seen.touching is None else seen.touching[0]
        if first not in causal or causal[first][1] != start:
            causal[first] = [start, start, first, start, int(MaskType.CAUSAL)]
            slices.append(causal[first])
        # It ends at its own last row, so that the next node's keys go on from there.
        causal[first][1] = causal[first][3] = next_end
        end, before = next_end, seen
    for row in full.values():
        row[1] = end
    return AttnMask(np.array(slices, dtype=np.int64).reshape(-1, 5), int(offsets[-1]))
