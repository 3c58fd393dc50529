"""The shift by one token in a prefix tree: a row is followed by the rows of its samples' next tokens, several of them.

Multi-token prediction shifts tokens and labels, of which all rows that follow must have the same, and the loss mask.
Its weights are sums over samples, so a row gets the sum of those of the rows that follow: each of its samples goes on
in one of them, or ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.mask.microbatch import Microbatch
from megatron_magi.plan import Dispatch

MASK = "prefix_tree"
"""The text of the mask whose rows are shifted so."""


class TreeRoll(NamedTuple):
    """Which rows follow a rank's rows, int64; places are those in the shards of all ranks, one after another.

    Attributes:
        next_place: ``[num_rows]``, of the first row that follows each; -1 where none does.
        from_place: ``[n]``, of all rows that follow one of this rank.
        to_row: ``[n]``, the row that each of them follows.
    """

    next_place: torch.Tensor
    from_place: torch.Tensor
    to_row: torch.Tensor

    def __call__(self, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Shifts ``[num_rows]``: of integers the first value that follows, else the sum; 0 at an end. Collective."""
        whole = rows
        if group.size() > 1:
            whole = rows.new_empty(group.size() * len(rows))
            dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
        if rows.is_floating_point():
            return torch.zeros_like(rows).index_add_(0, self.to_row, whole[self.from_place])
        return torch.where(self.next_place >= 0, whole[self.next_place.clamp(min=0)], 0)


def tree_arrays(batch: Microbatch, dispatch: Dispatch, cp_rank: int, num_depths: int) -> dict[str, np.ndarray]:
    """The fields of a rank's `TreeRoll` by name, for a microbatch of the mask ``prefix_tree``.

    Args:
        batch: with the fields of that mask, which have been checked, and ``labels``.
        dispatch: of its tokens.
        cp_rank: whose rows.
        num_depths: layers of multi-token prediction, which look that many tokens further.

    Raises:
        ValueError: rows that follow one row have other tokens or labels than each other.
    """
    parent = _parents_of_rows(batch)
    follows = np.flatnonzero(parent >= 0)
    first = np.full(dispatch.padded_seqlen, -1)
    first[parent[follows][::-1]] = follows[::-1]
    tokens, labels = (np.asarray(x).reshape(-1) for x in (batch.tokens, batch.fields["labels"]))
    _check_values(parent, first, tokens, labels, num_depths)
    indices = dispatch.global_indices()
    place, row = (np.full(dispatch.padded_seqlen, -1) for _ in range(2))
    place[np.concatenate(indices)] = np.arange(dispatch.padded_seqlen)
    row[indices[cp_rank]] = np.arange(len(indices[cp_rank]))
    mine, own_first = follows[row[parent[follows]] >= 0], first[indices[cp_rank]]
    next_place = np.where(own_first >= 0, place[own_first], -1)
    return {"next_place": next_place, "from_place": place[mine], "to_row": row[parent[mine]]}


def _parents_of_rows(batch: Microbatch) -> np.ndarray:
    """The row before each row in its samples, -1 where it is the first."""
    out = np.full(batch.total_seqlen, -1)
    nodes = zip(batch.integers("node_lengths", 2).tolist(), batch.integers("node_parents", 2).tolist(), strict=True)
    for i, (lengths, parents) in enumerate(nodes):
        ends = (i * batch.seqlen + np.cumsum(lengths)).tolist()
        for length, above, end in zip(lengths, parents, ends, strict=True):
            if not length:
                continue
            out[end - length + 1 : end] = np.arange(end - length, end - 1)
            while above >= 0 and not lengths[above]:
                above = parents[above]
            out[end - length] = ends[above] - 1 if above >= 0 else -1
    return out


def _check_values(
    parent: np.ndarray, first: np.ndarray, tokens: np.ndarray, labels: np.ndarray, num_depths: int
) -> None:
    follows = np.flatnonzero(parent >= 0)
    siblings, value = first[parent[follows]], labels
    is_wrong = tokens[follows] != tokens[siblings]
    for _ in range(num_depths):
        is_wrong |= value[follows] != value[siblings]
        value = np.where(first[: len(value)] >= 0, value[first[: len(value)]], -1)
    if is_wrong.any():
        row = int(parent[follows[np.flatnonzero(is_wrong)[0]]])
        raise ValueError(
            f"labels: row {row} is followed by rows of other tokens or labels within {num_depths} more tokens, which "
            f"multi-token prediction needs; make the tree by make_prefix_tree(samples, num_ahead={num_depths})"
        )
