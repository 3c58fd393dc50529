"""Masks that attention is measured on, and the work they take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_magi.mask import AttnMask, builders

WINDOW = 1024
BLOCK = 1024
NUM_SLICES = 1000


@dataclass(frozen=True)
class Case:
    """A mask of one length, and what is needed to ask other libraries for it.

    Attributes:
        name: key of `MASKS`.
        mask: over ``length`` queries and keys.
        causal: no query sees a later key.
        window: keys that a query sees at most, its own the last; None where there is no window.
        doc_lengths: lengths of packed documents, None where the mask is not one of documents.
        plain: full or causal inside each document (or the whole), and nothing else: what variable-length
            interfaces express.
        tree_ends: for a prefix tree, past the last token of the subtree of each token's node, int64 ``[length]``.
    """

    name: str
    mask: AttnMask
    causal: bool = False
    window: int | None = None
    doc_lengths: tuple[int, ...] | None = None
    plain: bool = True
    tree_ends: np.ndarray | None = None

    @property
    def length(self) -> int:
        return self.mask.total_seqlen_q


def log_uniform_lengths(total: int, low: int, high: int, seed: int = 0) -> tuple[int, ...]:
    """Document lengths that add up to ``total``, log-uniform in ``[low, high]``; the last is cut to fit."""
    rng, lengths, left = np.random.default_rng(seed), [], total
    while left > 0:
        lengths.append(int(np.exp(rng.uniform(np.log(low), np.log(high)))))
        left -= lengths[-1]
    lengths[-1] += left
    return tuple(n for n in lengths if n)


def documents(length: int) -> tuple[int, ...]:
    """Documents of a 64th to a quarter of the whole."""
    return log_uniform_lengths(length, max(1, length // 64), length // 4)


def short_documents(length: int) -> tuple[int, ...]:
    """Documents of 64 to 640 tokens, 250 on average."""
    return log_uniform_lengths(length, 64, 640)


def equal_documents(length: int, count: int = NUM_SLICES) -> tuple[int, ...]:
    """``count`` documents of equal length, the last takes what is left."""
    return (*[length // count] * (count - 1), length - (count - 1) * (length // count))


def _varlen(name: str, lengths: Callable[[int], tuple[int, ...]], causal: bool) -> Callable[[int], Case]:
    def make(length: int) -> Case:
        doc_lengths = lengths(length)
        return Case(name, builders.varlen(doc_lengths=doc_lengths, causal=causal), causal, doc_lengths=doc_lengths)

    return make


def _block_causal(length: int) -> Case:
    doc_lengths = documents(length)
    mask = builders.block_causal(block_size=BLOCK, doc_lengths=doc_lengths)
    return Case("block_causal", mask, doc_lengths=doc_lengths, plain=False)


def _prefix_tree(length: int) -> Case:
    """One prompt of an eighth of the tokens, four branches of a 16th each, four answers to each branch."""
    root, branch = length // 8, length // 16
    rest = length - root - 4 * branch
    nodes, paths, ends = [root], [], [length]
    for i in range(4):
        inner = len(nodes)
        answers = [(rest * (4 * i + j + 1)) // 16 - (rest * (4 * i + j)) // 16 for j in range(4)]
        start = sum(nodes)
        nodes += [branch, *answers]
        ends += [start + branch + sum(answers), *(start + branch + np.cumsum(answers)).tolist()]
        paths += [[0, inner, inner + 1 + j] for j in range(4)]
    mask, _ = builders.prefix_tree(nodes, paths)
    return Case("prefix_tree", mask, causal=True, plain=False, tree_ends=np.repeat(ends, nodes))


def _distant_ranges(length: int) -> Case:
    """Groups of rows that see four key ranges each, one in each quarter of the keys: 1,000 slices."""
    rng, num_groups = np.random.default_rng(0), NUM_SLICES // 4
    rows, width, quarter = np.linspace(0, length, num_groups + 1).astype(int), length // 64, length // 4
    first = np.arange(4) * quarter + rng.integers(0, quarter - width, (num_groups, 4))
    table = np.zeros((NUM_SLICES, 5), np.int64)
    table[:, 0], table[:, 1] = np.repeat(rows[:-1], 4), np.repeat(rows[1:], 4)
    table[:, 2], table[:, 3] = first.ravel(), first.ravel() + width
    return Case("distant_ranges", AttnMask(table, length), plain=False)


MASKS: dict[str, Callable[[int], Case]] = {
    "full": lambda n: Case("full", builders.full(n)),
    "causal": lambda n: Case("causal", builders.causal(n), causal=True),
    "varlen_full": _varlen("varlen_full", documents, causal=False),
    "varlen_causal": _varlen("varlen_causal", documents, causal=True),
    "window": lambda n: Case("window", builders.sliding_window(n, WINDOW - 1, 0), causal=True, window=WINDOW),
    "block_causal": _block_causal,
    "prefix_tree": _prefix_tree,
    "short_causal": _varlen("short_causal", short_documents, causal=True),
    "short_full": _varlen("short_full", short_documents, causal=False),
    "many_ranges": _varlen("many_ranges", equal_documents, causal=True),
    "distant_ranges": _distant_ranges,
}
"""By name, a function from the number of tokens to the case."""


@dataclass(frozen=True)
class Shape:
    """Heads and head dims, ``head_dim`` of queries and keys, ``head_dim_v`` of values."""

    num_heads_q: int = 64
    num_heads_kv: int = 8
    head_dim: int = 128
    head_dim_v: int = 128

    def flops(self, area: int) -> tuple[float, float]:
        """Floating-point operations of a forward and of a backward pass over ``area`` pairs.

        Two products forward, five backward: two operations a pair, head and dimension each. With equal head
        dims that is ``4 * area * num_heads_q * head_dim``, and 2.5 times that.
        """
        once = 2.0 * area * self.num_heads_q
        forward = once * (self.head_dim + self.head_dim_v)
        return forward, once * (3 * self.head_dim + 2 * self.head_dim_v)


@dataclass(frozen=True)
class Cell:
    """One mask of one length and shape."""

    shape: Shape
    mask: str
    length: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Of ``HEAD_DIM:HEADS_Q:HEADS_KV:MASK:LENGTH``.

        Raises:
            ArgumentTypeError: it is not of that form, or names no mask.
        """
        try:
            head_dim, num_heads_q, num_heads_kv, mask, length = text.split(":")
            cell = cls(parse_shape(f"{num_heads_q}:{num_heads_kv}", head_dim), mask, int(length))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: not HEAD_DIM:HEADS_Q:HEADS_KV:MASK:LENGTH") from error
        if mask not in MASKS:
            raise argparse.ArgumentTypeError(f"{text}: no mask {mask!r} among {', '.join(MASKS)}")
        return cell

    @property
    def columns(self) -> dict:
        """Columns of a table that say its shape."""
        dims = dict.fromkeys((self.shape.head_dim, self.shape.head_dim_v))
        return {
            "head_dim": "/".join(map(str, dims)), "heads": f"{self.shape.num_heads_q}:{self.shape.num_heads_kv}"
        }  # fmt: skip


def parse_shape(heads: str, head_dims: str) -> Shape:
    """Of ``QUERY_HEADS:KEY_HEADS`` and one head dim for all, or that of queries and keys ``/`` that of values."""
    num_heads_q, num_heads_kv = map(int, heads.split(":"))
    dims = [int(d) for d in head_dims.split("/")]
    return Shape(num_heads_q, num_heads_kv, dims[0], dims[-1])
