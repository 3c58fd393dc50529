"""A microbatch of verl as a tree: prompts that rollouts share are stored once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from megatron_magi.packing import PrefixTree, make_prefix_tree


def tree_of(micro_batch: Any) -> PrefixTree:
    """The tree of ``input_ids``, a jagged tensor ``[batch_size, seqlens]``; it has a row for the model to compute.

    Raises:
        ValueError: what verl offers besides packed text is asked for, or there are no rollouts.
    """
    others = "use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"
    for key, wanted, default in (("use_remove_padding", True, True), *((key, False, False) for key in others)):
        if tu.get_non_tensor_data(data=micro_batch, key=key, default=default) != wanted:
            raise ValueError(f"{key}: expected {wanted} with rollouts as trees")
    if micro_batch.get("multi_modal_inputs", None) is not None or micro_batch["position_ids"].dim() == 3:
        raise ValueError("multi_modal_inputs: rollouts as trees are of text")
    samples = [sample.cpu() for sample in micro_batch["input_ids"].unbind()]
    if not samples:
        raise ValueError("input_ids: the microbatch has no rollouts")
    return make_prefix_tree(samples).with_a_row()


def temperature_of(micro_batch: Any) -> float:
    """The temperature of all rollouts.

    Raises:
        ValueError: they have different ones, so that a shared token would have several.
    """
    values = torch.as_tensor(micro_batch["temperature"], dtype=torch.float32).reshape(-1).unique()
    if len(values) != 1:
        raise ValueError(f"temperature: rollouts of a microbatch need the same, got {values.tolist()}")
    return max(values.item(), 1e-8)


def wants_entropy(micro_batch: Any) -> bool:
    """Whether entropies are to be returned besides log-probabilities."""
    return tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)


def by_sample(tree: PrefixTree, values: Tensor, micro_batch: Any) -> Tensor:
    """Values of rows as verl has them: jagged like ``input_ids``, of the token that follows; 0 at a sample's end."""
    parts = [torch.nn.functional.pad(own, (0, 1)) for own in tree.gather(values)]
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), micro_batch["input_ids"].offsets())
