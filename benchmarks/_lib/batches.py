"""Masks of the batches that a context-parallel group trains on, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._lib.cases import MASKS, Case
from megatron_magi.mask import AttnMask, builders


@dataclass(frozen=True)
class PackedCase:
    """A packed batch of causal documents, lengths log-uniform over a factor of 64."""

    total_seqlen: int
    num_documents: int
    cp_size: int

    def lengths(self, seed: int) -> np.ndarray:
        """Lengths of the documents of a batch drawn with ``seed``."""
        weight = np.exp(np.random.default_rng(seed).uniform(0, np.log(64), self.num_documents))
        lengths = np.maximum(1, (weight / weight.sum() * self.total_seqlen).astype(np.int64))
        lengths[-1] += self.total_seqlen - lengths.sum()
        return lengths

    def mask(self, seed: int) -> AttnMask:
        """The mask of a batch drawn with ``seed``."""
        return builders.varlen(doc_lengths=self.lengths(seed), causal=True)


SEEDS = range(5)
WARM_UP = 8
"""Masks at the begin of a turn of steps that are not counted."""


def _packed(count: int) -> Callable[[int], Case]:
    def make(total: int) -> Case:
        lengths = tuple(int(n) for n in PackedCase(total, count, 1).lengths(0))
        return Case(f"documents_{count}", builders.varlen(doc_lengths=lengths, causal=True), True, doc_lengths=lengths)

    return make


DISTRIBUTED: dict[str, Callable[[int], Case]] = {
    "full": MASKS["full"],
    "causal": MASKS["causal"],
    "documents_8": _packed(8),
    "documents_64": _packed(64),
    "short_documents": lambda total: replace(MASKS["short_causal"](total), name="short_documents"),
    "window": MASKS["window"],
    "block_causal": MASKS["block_causal"],
    "documents_full": lambda total: replace(MASKS["varlen_full"](total), name="documents_full"),
    "documents_causal": lambda total: replace(MASKS["varlen_causal"](total), name="documents_causal"),
}
"""By name, a function from the number of tokens of all GPUs to the case that methods are compared on."""
ONE_LAUNCH = {"magi_stages": False, "magi_one_launch": True, "magi_zigzag_stages": False}
"""Of ways that set it: `OverlapConfig.one_launch`."""


def short_documents(total: int, seed: int) -> AttnMask:
    """Documents of 64 to 1,024 tokens."""
    lengths = np.random.default_rng(seed).integers(64, 1025, -(-total // 64))
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), total)) + 1]
    lengths[-1] -= lengths.sum() - total
    return builders.varlen(doc_lengths=lengths.tolist())


def make_mask(name: str, total: int, num_ranks: int, seed: int = 0) -> AttnMask:
    """A mask of a kind; of documents with another ``seed`` another one."""
    if name == "causal":
        return builders.causal(total)
    if name == "window":
        return builders.sliding_window(total, 1023, 0)
    if name == "short":
        return short_documents(total, seed)
    return PackedCase(total, int(name), num_ranks).mask(seed)


def predicted_mask(name: str, total: int, num_ranks: int) -> AttnMask:
    """A mask over ``total`` tokens that dispatches are measured and predicted on."""
    if name == "causal":
        return builders.causal(total)
    if name == "full":
        return builders.full(total)
    if name == "short_documents":
        return short_documents(total, 0)
    if name == "window":
        return builders.sliding_window(left=1024, right=0, doc_lengths=[total])
    if name == "block_causal":
        return builders.block_causal(total, block_size=1024)
    return PackedCase(total, int(name.removeprefix("documents_")), num_ranks).mask(0)
