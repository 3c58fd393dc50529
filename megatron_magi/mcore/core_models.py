"""Models of megatron-core without Megatron's command line, as Megatron Bridge and loops of one's own build them."""

from __future__ import annotations

import functools
import inspect
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_magi import envs
from megatron_magi.mcore import rotary
from megatron_magi.mcore.argv import PACKING_FIELD, add_arguments
from megatron_magi.mcore.batch import BatchDispatcher
from megatron_magi.mcore.forward_step import make_dispatcher
from megatron_magi.mcore.layer_spec import replace_core_attention
from megatron_magi.mcore.model import MagiGPTModel

_NOT_IN_CONFIG = {
    "group_query_attention": True,
    "reset_attention_mask": False,
    "multi_latent_attention": False,
    # Microbatches of any length.
    PACKING_FIELD: "",
}


def with_magi(layer_spec: Any) -> Any:
    """A layer spec with this package's core attention, or a function that returns one, as Bridge's providers take it.

    Args:
        layer_spec: a `ModuleSpec`, a dataclass of submodules, or a function of a configuration that returns one.
    """
    if not inspect.isfunction(layer_spec):
        return replace_core_attention(layer_spec)

    @functools.wraps(layer_spec)
    def make(*args: Any, **kwargs: Any) -> Any:
        return replace_core_attention(layer_spec(*args, **kwargs))

    return make


def attend_by_plan(chunks: list[nn.Module]) -> list[nn.Module]:
    """Makes `GPTModel` chunks, built of a spec of `with_magi`, take dispatched microbatches; a hook before they are
    wrapped.

    Each chunk is then a `MagiGPTModel`: called inside ``with chunk.given(batch)``, it runs a `LocalBatch`.

    Returns:
        ``chunks``.

    Raises:
        ValueError: a chunk is of another class, or has another core attention.
    """
    for chunk in chunks:
        if type(chunk) is not GPTModel:
            raise ValueError(f"chunks: expected Megatron's GPTModel, got {type(chunk).__name__}")
    rotary.install()
    for chunk in chunks:
        chunk.__class__ = MagiGPTModel
        chunk._take_positions()
    return chunks


def dispatcher_of(
    config: TransformerConfig, *, micro_batch_size: int = 1, mask: str | None = None, own_positions: bool = False
) -> BatchDispatcher:
    """What makes this rank's shard of a microbatch; collective over all ranks, once process groups exist.

    Args:
        config: of the model.
        micro_batch_size: sequences of a microbatch.
        mask: as ``--magi-mask`` takes it; None for documents.
        own_positions: rotary positions are those of the data, as with every mask that is given; else they count from
            the start of a document.

    Returns:
        Its ``dispatch(fields)`` takes ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``
        ``[micro_batch_size, seqlen]`` on the CPU, of any length, and ``cu_seqlens``, if there are documents. The same
        on all ranks that hold the sequences together. Losses that Megatron attaches by itself (multi-token prediction,
        router, indexer) are then parts of a rank, as the loss is: gradients are to be summed over these ranks.

    Raises:
        ValueError: the mask does not exist, or the configuration asks for what is not supported.
    """
    if mask is None and own_positions:
        mask = "documents"
    known = {f.name: getattr(config, f.name) for f in fields(config)}
    more = {"micro_batch_size": micro_batch_size, "magi_mask": mask, "local_rank": envs.local_rank()}
    own = vars(add_arguments(ArgumentParser()).parse_args([]))
    dispatcher = make_dispatcher(Namespace(**{**own, **_NOT_IN_CONFIG, **known, **more}))
    dispatcher.sums_gradients = True
    return dispatcher
