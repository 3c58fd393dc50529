"""Rollouts as a tree: what is the same in several of them is one row, and all of them are one flat batch.

A row stands for a token together with the token that follows it: its input is the former, its label the latter. Two
samples share a row where they agree in everything up to the label. So a row has one label, and the last token before
samples part is there once for each way on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_magi.checks import IntArrayLike, int_array, int_at_least, integer
from megatron_magi.mask import AttnMask
from megatron_magi.mask.prefix_tree import mask_of_parents


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Made by `make_prefix_tree`.

    Attributes:
        tokens: int64 ``[num_rows]``, inputs of the flat batch.
        labels: int64 ``[num_rows]``, the token that each row predicts.
        position_ids: int64 ``[num_rows]``, places in the samples.
        node_lengths: int64 ``[num_nodes]``, rows of each run without a branch, in the order of the batch.
        node_parents: int64 ``[num_nodes]``, the node before each, -1 for a root.
        rows: int64 ``[num_predicted]``, the row that predicts each token of each sample but its first, sample after
            sample.
        sample_bounds: int64 ``[num_samples + 1]``, where each sample begins in `rows`.
    """

    tokens: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    node_lengths: np.ndarray
    node_parents: np.ndarray
    rows: np.ndarray
    sample_bounds: np.ndarray

    @property
    def num_rows(self) -> int:
        """Tokens of the flat batch."""
        return len(self.tokens)

    @property
    def num_predicted(self) -> int:
        """Tokens of a batch in which each sample has its own."""
        return len(self.rows)

    @cached_property
    def mask(self) -> AttnMask:
        """A row sees the rows before it in its samples, and itself."""
        return mask_of_parents(self.node_lengths, dict(enumerate(self.node_parents.tolist())))

    def with_a_row(self) -> PrefixTree:
        """The tree itself; if it has no rows, because its samples have one token each, one with a row of no sample.

        For a model, which needs a token: the row has token, label and position 0, and nothing is gathered from it. A
        loss over what is gathered has gradients of 0, so that ranks without rows take part in a backward.
        """
        if self.num_rows:
            return self
        row = np.zeros(1, dtype=np.int64)
        node = {"node_lengths": np.ones_like(row), "node_parents": np.full_like(row, -1)}
        return replace(self, tokens=row, labels=row, position_ids=row, **node)

    def gather(self, values: Any) -> list:
        """Returns each sample's values, ``[length - 1, ...]``, of its tokens but the first.

        Of an array or a tensor ``[num_rows, ...]``, such as the log-probabilities of the labels. Where autograd goes
        through it, a shared row gets the sum of its samples' gradients: losses over the samples have the gradients that
        they have when each sample is computed by itself.
        """
        if not hasattr(values, "shape") or values.shape[:1] != (self.num_rows,):
            found = list(values.shape) if hasattr(values, "shape") else type(values).__name__
            raise ValueError(f"values: expected an array or a tensor [{self.num_rows}, ...], got {found}")
        flat = values[self.rows]
        return [flat[start:end] for start, end in pairwise(self.sample_bounds.tolist())]

    def weights(self, samples: Sequence[Any] | None = None) -> np.ndarray:
        """Returns weights of rows, float64 ``[num_rows]``, with which a loss over rows is the loss over samples.

        Args:
            samples: for each sample a number or ``[length - 1]`` of them, by which the losses of its tokens but the
                first are multiplied; 1 when None, so that weights count samples.

        Raises:
            ValueError: there are not as many as samples, or not as many for a sample as it has tokens; a weight is not
                finite.
        """
        lengths = np.diff(self.sample_bounds)
        samples = [1.0] * len(lengths) if samples is None else samples
        if not isinstance(samples, Sized) or len(samples) != len(lengths):
            raise ValueError(f"samples: expected weights of {len(lengths)} samples, got {samples!r}")
        parts = []
        for i, (sample, length) in enumerate(zip(samples, lengths.tolist(), strict=True)):
            try:
                own = np.asarray(sample)
                if own.dtype.kind not in "biuf":
                    raise TypeError
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"samples[{i}]: expected a number or [{length}] of them, got {sample!r}") from None
            if own.shape not in ((), (length,)):
                raise ValueError(f"samples[{i}]: expected a number or [{length}] of them, got {list(own.shape)}")
            own = own.astype(np.float64)
            if not np.isfinite(own).all():
                raise ValueError(f"samples[{i}]: expected finite weights, got {own.tolist()}")
            parts.append(np.broadcast_to(own, (length,)))
        return np.bincount(self.rows, np.concatenate([np.zeros(0), *parts]), self.num_rows)

    def item(self, seqlen: int, num_nodes: int, samples: Sequence[Any] | None = None) -> dict[str, np.ndarray]:
        """Makes an item of a data set for Megatron with ``--magi-mask prefix_tree``.

        Args:
            seqlen: rows of an item; what is left is padding without loss.
            num_nodes: entries of ``node_lengths`` and ``node_parents``, the same for all items.
            samples: as in `weights`, which ``loss_mask`` is. Megatron divides by their sum, so none is negative.

        Raises:
            ValueError: ``seqlen`` or ``num_nodes`` is too small, or a weight is negative.
        """
        seqlen, num_nodes = integer(seqlen, "seqlen"), integer(num_nodes, "num_nodes")
        for name, size, least in (
            ("seqlen", seqlen, self.num_rows),
            ("num_nodes", num_nodes, len(self.node_lengths)),
        ):
            if size < least:
                raise ValueError(f"{name}: the tree needs {least}, got {size}")
        weights = self.weights(samples)
        if weights.min(initial=0.0) < 0:
            raise ValueError("samples: Megatron divides by the sum of weights, none can be negative")
        rows, nodes = (0, seqlen - self.num_rows), (0, num_nodes - len(self.node_lengths))
        return {
            "tokens": np.pad(self.tokens, rows),
            "labels": np.pad(self.labels, rows),
            "loss_mask": np.pad(weights, rows).astype(np.float32),
            "position_ids": np.pad(self.position_ids, rows),
            "node_lengths": np.pad(self.node_lengths, nodes),
            "node_parents": np.pad(self.node_parents, nodes, constant_values=-1),
        }


def make_prefix_tree(samples: Sequence[IntArrayLike], num_ahead: int = 0) -> PrefixTree:
    """Makes the tree of rollouts: answers to shared prompts, conversations that branch, several prompts side by side.

    Args:
        samples: token ids of each rollout, prompt and answer, from its first token on; not negative.
        num_ahead: layers of multi-token prediction of the model. Samples then share a row only where they agree in so
            many tokens after its label too (or end there together), as these are predicted from the row.

    Raises:
        ValueError: a sample is empty, or has what is no token; ``num_ahead`` is negative.
    """
    num_ahead = int_at_least(num_ahead, "num_ahead", 0)
    if isinstance(samples, str) or not isinstance(samples, Iterable):
        raise ValueError(f"samples: expected token ids of each rollout, got {samples!r}")
    arrays = [int_array(sample, f"samples[{i}]").astype(np.int64) for i, sample in enumerate(samples)]
    for i, array in enumerate(arrays):
        if not len(array) or array.min() < 0:
            raise ValueError(f"samples[{i}]: expected token ids from 0 on, got {array.tolist()[:10]}")
    # Sorted, each sample shares with the one before it all that it shares with any before it.
    order = sorted(range(len(arrays)), key=lambda i: arrays[i].astype(">i8").tobytes())
    rows_of: list[np.ndarray] = [np.zeros(0, np.int64)] * len(arrays)
    fresh, starts, parents = [], set(), {}  # tokens of new rows; first rows of nodes; the rows before chunks
    before, before_rows, num_rows = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    for i in order:
        sample = arrays[i]
        is_same = np.array_equal(before, sample)
        shared = len(sample) - 1 if is_same else max(_common(before, sample) - 1 - num_ahead, 0)
        new = np.arange(num_rows, num_rows + len(sample) - 1 - shared)
        before, before_rows = sample, np.concatenate([before_rows[:shared], new])
        rows_of[i] = before_rows
        if len(new):
            fresh.append(np.stack([sample[shared:-1], sample[shared + 1 :], np.arange(shared, len(sample) - 1)]))
            parents[num_rows] = int(before_rows[shared - 1]) if shared else -1
            starts |= {num_rows, parents[num_rows] + 1} if shared else {num_rows}
            num_rows += len(new)
    tokens, labels, positions = np.concatenate([np.zeros((3, 0), np.int64), *fresh], axis=1)
    first = np.array(sorted(starts), dtype=np.int64)
    parent_rows = np.array([parents.get(row, row - 1) for row in first.tolist()], dtype=np.int64)
    return PrefixTree(
        tokens=tokens,
        labels=labels,
        position_ids=positions,
        node_lengths=np.diff(np.append(first, num_rows)),
        node_parents=np.searchsorted(first, parent_rows, side="right") - 1,
        rows=np.concatenate([np.zeros(0, np.int64), *rows_of]),
        sample_bounds=np.cumsum([0, *(len(rows) for rows in rows_of)]),
    )


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens at the start in which both agree."""
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if len(differ) else least
