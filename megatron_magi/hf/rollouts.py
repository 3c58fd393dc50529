"""Reinforcement learning on rollouts that share prefixes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from megatron_magi.api.make_key import made_on_all_ranks
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.config import MagiConfig
from megatron_magi.hf.attention import CP_GROUP, check_implementation
from megatron_magi.hf.layer_kinds import check_kinds_of_mask
from megatron_magi.hf.shard import sharded
from megatron_magi.packing import PrefixTree


def log_probs(
    model: PreTrainedModel,
    tree: PrefixTree,
    cp_group_or_mesh: Group = None,
    config: MagiConfig | None = None,
) -> list[Tensor]:
    """Computes the log-probability of each token of each rollout but its first, each shared token computed once.

    A loss over them has the gradients that it has with a forward for each rollout. On several ranks all have all of
    them, compute the same loss, and the gradients of parameters are averaged over ranks, as with `context_parallel`.

    Args:
        model: with ``attn_implementation="magi"`` and full layers alone, as windows look at places in the flat batch;
            it may be wrapped by DDP or FSDP, and context-parallel (`context_parallel`).
        tree: the rollouts, `megatron_magi.packing.make_prefix_tree`.
        cp_group_or_mesh: the ranks, all with the same tree; one rank when None.
        config: how the mask is planned and attention runs; None for the defaults.

    Returns:
        For each rollout fp32 (or the model's dtype, if that is wider) ``[length - 1]``, on the model's device. Where
        no rollout has a second token the model computes one row for nothing, so that the rank takes part in what ranks
        do together (FSDP, DDP); gradients are then 0.

    Raises:
        ValueError: the model attends otherwise, has layers with a window, or is context-parallel over other ranks;
            ``tree`` is none, or has no rollouts; as `shard_batch`.
        RuntimeError: the ranks' trees differ.
    """
    unwrapped, group = getattr(model, "module", model), group_of(cp_group_or_mesh, "cp_group_or_mesh")
    with made_on_all_ranks(group, config):
        _check(unwrapped, tree, group)
        tree = tree.with_a_row()
    device = next(model.parameters()).device
    names = {"input_ids": tree.tokens, "position_ids": tree.position_ids}
    batch = {name: torch.from_numpy(x).to(device)[None] for name, x in names.items()}
    batch["magi_mask"] = tree.mask
    labels = torch.from_numpy(tree.labels).to(device)[None]
    if group is None or group.size() == 1:
        return tree.gather(_of_labels(model(**batch, use_cache=False).logits, labels)[0])
    # Of labels the last ones are no tokens of the batch, and rows tell the rollouts' order.
    compared = {"labels": labels, "tree": torch.from_numpy(np.concatenate([tree.sample_bounds, tree.rows]))}
    local, shard = sharded({**batch, "use_cache": False}, group, unwrapped.config, config, compared)
    rows = _of_labels(model(**local).logits, shard.dispatch(labels))
    # Each rank's loss has the whole gradient: their sum here makes up for the mean over ranks of what follows.
    return tree.gather(shard.undispatch(rows, is_partial_grad=True)[0])


def _check(model: PreTrainedModel, tree: PrefixTree, group: dist.ProcessGroup | None) -> None:
    if not isinstance(tree, PrefixTree):
        raise ValueError(f"tree: expected a PrefixTree, as make_prefix_tree returns it, got {type(tree).__name__}")
    if len(tree.sample_bounds) == 1:
        raise ValueError("tree: it has no rollouts; on a rank that has none give one of one token, whose loss is 0")
    check_implementation(model.config)
    check_kinds_of_mask(model.config, "tree")
    over = getattr(model, CP_GROUP, None)
    if over is not None and (group is None or group.group_name != over):
        raise ValueError("cp_group_or_mesh: the model is context-parallel, give its group")


def _of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """``[1, num_rows]`` of logits ``[1, num_rows, vocabulary]``."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none")[None]
