"""Samples that share prefixes, stored once: a tree of token runs, flattened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    parents = _parents(paths, len(offsets) - 1)
    slices = _merge_rows(_node_slices(offsets, parents))
    table = np.array(slices, dtype=np.int64).reshape(-1, 5)
    starts, ends = offsets[:-1].tolist(), offsets[1:].tolist()
    ranges = [AttnRanges(AttnRange(starts[n], ends[n]) for n in path) for path in paths]
    return AttnMask(table, int(offsets[-1])), ranges


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


def _node_slices(offsets: IntArray, parents: dict[int, int]) -> list[list[int]]:
    """For each node in layout order: FULL slices to its ancestors, one CAUSAL slice that reaches
    back over those ancestors that touch it."""
    bounds = offsets.tolist()
    # Spans of a node's path, sorted, touching ones joined: parents are resolved before children.
    spans: dict[int, list[Span]] = {-1: []}
    slices = []
    for node in sorted(parents):
        chain = []
        while node not in spans:
            chain.append(node)
            node = parents[node]
        for member in reversed(chain):
            spans[member] = _with_span(spans[parents[member]], (bounds[member], bounds[member + 1]))
    for node in sorted(parents):
        start, end = bounds[node], bounds[node + 1]
        if start == end:
            continue
        own_start = start
        for lo, hi in spans[parents[node]]:
            if hi == start:
                own_start = lo
            else:
                slices.append([start, end, lo, hi, int(MaskType.FULL)])
        slices.append([start, end, own_start, end, int(MaskType.CAUSAL)])
    return slices


def _with_span(spans: list[Span], new: Span) -> list[Span]:
    if new[0] == new[1]:
        return spans
    joined: list[Span] = []
    for lo, hi in sorted([*spans, new]):
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return joined


def _merge_rows(slices: list[list[int]]) -> list[list[int]]:
    """Joins slices of touching rows that see the same keys, or continue one causal triangle."""
    merged: list[list[int]] = []
    open_full: dict[tuple[int, int], list[int]] = {}  # by key range
    open_causal: dict[int, list[int]] = {}  # by first key
    for row in slices:
        q0, q1, k0, k1, kind = row
        last = open_full.get((k0, k1)) if kind == MaskType.FULL else open_causal.get(k0)
        if last is not None and last[1] == q0:
            # A causal slice ends at its own last row, so that the next node's keys go on from there.
            last[1], last[3] = q1, k1
            continue
        merged.append(row)
        if kind == MaskType.FULL:
            open_full[k0, k1] = row
        else:
            open_causal[k0] = row
    return merged
