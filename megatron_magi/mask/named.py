"""Masks of microbatches that have a name: the builders, applied to the documents and fields of a data set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_magi.mask import builders
from megatron_magi.mask.microbatch import Microbatch, sequence_bounds
from megatron_magi.mask.prefix_tree import is_forest, mask_of_parents
from megatron_magi.mask.slices import AttnMask


def documents(batch: Microbatch, causal: bool = True) -> AttnMask:
    """Causal (or full) attention inside each document."""
    return builders.varlen(batch.cu_seqlens, causal=causal)


def causal(batch: Microbatch) -> AttnMask:
    """Causal attention inside each sequence, whatever its documents."""
    return builders.varlen(sequence_bounds(batch.batch_size, batch.seqlen))


def sliding_window(batch: Microbatch, left: int, right: int = 0, global_tokens: int = 0) -> AttnMask:
    """A window around each query inside its document, and the first ``global_tokens`` keys of it."""
    return builders.sliding_window(left=left, right=right, global_tokens=global_tokens, cu_seqlens=batch.cu_seqlens)


def block_causal(batch: Microbatch, block_size: int) -> AttnMask:
    """Blocks (frames) that see themselves and all earlier ones of their document."""
    return builders.block_causal(block_size=block_size, cu_seqlens=batch.cu_seqlens)


def prefix_lm(batch: Microbatch, length: int | None = None) -> AttnMask:
    """Full attention inside each document's prefix, causal after it.

    A prefix has ``length`` tokens, or all of a shorter document; without ``length`` what the field ``prefix_lengths``
    says, int ``[batch_size, n]``: in the order of a sequence's documents, 0 after the last of them.
    """
    lengths = np.diff(batch.cu_seqlens)
    if length is not None:
        return builders.prefix_lm(np.minimum(length, lengths), lengths)
    rows = batch.integers("prefix_lengths", 2)
    sequence = batch.cu_seqlens[:-1] // batch.seqlen
    place = np.arange(len(lengths)) - np.searchsorted(sequence, sequence)
    has_entry = place < rows.shape[1]
    prefixes = np.where(has_entry, rows[sequence, np.minimum(place, rows.shape[1] - 1)], 0)
    used = np.bincount(sequence, minlength=batch.batch_size)
    for i, row in enumerate(rows):
        if row[used[i] :].any():
            raise ValueError(f"prefix_lengths: sequence {i} has {used[i]} documents, got {row.tolist()}")
    return builders.prefix_lm(prefixes, lengths)


def prefix_tree(batch: Microbatch) -> AttnMask:
    """Samples that share prefixes, each shared run of tokens stored once.

    Fields: ``node_lengths``, int ``[batch_size, n]``, the tokens of each node in the order in which nodes lie in the
    sequence; ``node_parents``, likewise, each node's parent in its sequence, -1 for a root. Nodes of length
    0 fill up rows. Tokens after the last node see nothing.
    """
    lengths = batch.integers("node_lengths", 2)
    parents = batch.integers("node_parents", 2)
    if lengths.shape != parents.shape:
        raise ValueError(f"node_parents: expected shape {list(lengths.shape)}, got {list(parents.shape)}")
    rest = batch.seqlen - lengths.sum(axis=1)
    if lengths.min(initial=0) < 0 or (rest < 0).any():
        raise ValueError(f"node_lengths: expected at most {batch.seqlen} tokens a sequence, got {lengths.tolist()}")
    num_nodes, of_all = lengths.shape[1], {}
    for i, row in enumerate(parents.tolist()):
        if not is_forest(dict(enumerate(row))):
            raise ValueError(
                f"node_parents: sequence {i} needs parents in [-1, {num_nodes}) without a cycle, got {row}"
            )
        first = i * (num_nodes + 1)  # The tokens that are left are a node of their own, in no path.
        of_all |= {first + node: above if above < 0 else first + above for node, above in enumerate(row)}
    return mask_of_parents(np.column_stack([lengths, rest]).reshape(-1), of_all)


NAMED: dict[str, Callable[..., AttnMask]] = {
    function.__name__: function
    for function in (documents, causal, sliding_window, block_causal, prefix_lm, prefix_tree)
}
"""Makers of masks by name."""
