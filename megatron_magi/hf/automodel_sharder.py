"""This package as a context-parallel backend of NeMo Automodel: models of transformers, their windows, sinks and packs.

Automodel's own module for ``attn_implementation="magi"`` passes on neither windows nor documents. `own_sharding` gives
a model this package's attention and a `ContextParallelSharder` over `shard_batch`, by the hook that Automodel has for
models that shard their batches themselves. Docs: docs/hugging_face.md.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_magi.api.functions import padded_position_ids
from megatron_magi.config import MagiConfig
from megatron_magi.hf.attention import OWN_NAME
from megatron_magi.hf.mask_spec import AttnMaskSpec
from megatron_magi.hf.shard import shard_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_PACKS = ("seq_lens", "seq_lens_padded", "qkv_format", "padding_mask", "cu_seqlens", "max_seqlen", "loss_mask")
"""What Automodel's collators say besides positions and document numbers, which say it all."""


def own_sharding(model: PreTrainedModel, config: MagiConfig | None = None) -> PreTrainedModel:
    """Makes a model attend by this package in Automodel's recipes, on one rank and over its dimension "cp".

    Call it when the recipe has been set up: ``own_sharding(recipe.model_parts[0])``. Packs ("neat" and "thd"), windows,
    chunks and sinks are the model's own; ``prefix_tree`` of a batch, node lengths and sample paths, is its mask. The
    verbs of the sharder take and return ``[1, seqlen]`` of the caller's tokens with ``trim=True``, and ``[batch_size,
    seqlen]`` where the ranks divide all tokens evenly.

    Args:
        model: of transformers (``force_hf=True``), wrapped by FSDP2 or not.
        config: how masks are planned and attention runs; None for the defaults.

    Returns:
        ``model``, with hooks.

    Raises:
        ValueError: the model is none of transformers. In a step: as `shard_batch`, and for a ``prefix_tree`` that is no
            pair.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"model: expected a model of transformers (force_hf=True), got {type(model).__name__}")
    model.set_attn_implementation(OWN_NAME)

    def prepare_model_inputs_for_cp(batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder

        return {"cp_sharder": ContextParallelSharder(shard_batch=_Sharding(model.config, config))}

    model.prepare_model_inputs_for_cp = prepare_model_inputs_for_cp
    model.register_forward_pre_hook(_whole_batch, with_kwargs=True)
    for module in model.modules():
        _keep_mask(module)
    return model


class _Sharding:
    """Automodel's ``shard_batch``."""

    def __init__(self, model_config: Any, config: MagiConfig | None) -> None:
        self._model_config, self._config = model_config, config

    def __call__(
        self,
        cp_mesh: Any,
        tp_mesh: Any,
        batch: dict[str, Any],
        *,
        loss_mask: Tensor | None = None,
        padding_token_id: int = 0,
    ) -> tuple[Any, dict[str, Any], Any]:
        from nemo_automodel.components.distributed.context_parallel.sharder import ShardLayout

        if loss_mask is not None:
            raise ValueError("loss_mask: give labels of -100 instead")
        local, shard = shard_batch(_arguments(batch), cp_mesh, self._model_config, self._config)
        for name in ("shift_labels", "num_items_in_batch"):  # the recipe's losses do not shift
            local.pop(name, None)
        positions = padded_position_ids(shard.key)
        padded, rows = len(positions) * cp_mesh.size(), (shard.batch_size, shard.seqlen)
        layout = ShardLayout(
            local_token_global_indices=positions,
            original_seq_len=shard.seqlen if shard.batch_size == 1 else None,
            padded_seq_len=padded,
            input_row_shape=rows if shard.batch_size > 1 and padded == rows[0] * rows[1] else None,
        )
        return contextlib.nullcontext, local, layout


def _arguments(batch: dict[str, Any]) -> dict[str, Any]:
    """What `shard_batch` and the model take, of what Automodel's collators make."""
    out = {name: x for name, x in batch.items() if name not in _OF_PACKS and x is not None}
    tree, numbers = out.pop("prefix_tree", None), out.pop("_packed_seq_ids", None)
    if tree is not None:
        if not (isinstance(tree, tuple | list) and len(tree) == 2):
            raise ValueError(f"prefix_tree: expected a pair of node lengths and sample paths, got {tree!r}")
        out["magi_mask"] = AttnMaskSpec.prefix_tree(*tree)[0].mask
        out.pop("attention_mask", None)
    elif numbers is not None or batch.get("qkv_format") == "thd":
        out.pop("attention_mask", None)
        if numbers is not None:  # of documents, 0 for padding, which is one more
            begins = torch.ones_like(numbers, dtype=torch.bool)
            begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
            bounds = torch.nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=numbers.numel())
            out["cu_seq_lens_q"] = out["cu_seq_lens_k"] = bounds.to(torch.int32)
    out["use_cache"] = False
    return out


def _whole_batch(_module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """On one rank Automodel gives the model the batch as it is."""
    return args, kwargs if hasattr(kwargs.get("attention_mask"), "magi_shard") else _arguments(kwargs)


def _keep_mask(module: torch.nn.Module) -> None:
    """Without the hook by which Automodel's own context parallelism takes masks away from attention."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if "attach_context_parallel_hooks" in getattr(hook, "__qualname__", ""):
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
