"""verl's Megatron engine with rollouts as trees and this package's context parallelism.

    actor_rollout_ref.model.external_lib=megatron_engine     # this folder on PYTHONPATH

Only rollouts in the same microbatch share a prompt: ``use_dynamic_bsz=False``, and
``ppo_micro_batch_size_per_gpu`` a multiple of ``rollout.n``. Tested with verl 0.9.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from rollout_trees import by_sample, temperature_of, tree_of, wants_entropy
from torch import Tensor
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
from verl.workers.engine import EngineRegistry, MegatronEngineWithLMHead

from megatron_magi.attention import AttnShape
from megatron_magi.comm.dispatch import UndispatchArgs, undispatch
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask.source import LayerMasks, MaskSource
from megatron_magi.mcore.batch import BatchDispatcher, LocalBatch
from megatron_magi.mcore.groups import make_agreement_group
from megatron_magi.mcore.model import MagiGPTModel
from megatron_magi.mcore.planner import Planner
from megatron_magi.packing import PrefixTree

_BUILDERS = {"mbridge.core.llm_bridge": "GPTModel", "megatron.bridge.models.gpt_provider": "MCoreGPTModel"}
"""What verl builds models with, and how these name the model's class."""


class MagiMegatronEngine(MegatronEngineWithLMHead):
    """Computes shared prompts once, each rank its part. Losses, data and optimizer are verl's."""

    def initialize(self) -> None:
        """As verl's; the model attends by plan."""
        with _building_magi_models():
            super().initialize()
        for chunk in self.module:
            _magi_model(chunk)
        self._dispatcher = make_dispatcher(_magi_model(self.module[0]).config)

    def forward_step(
        self,
        batch_iter: Iterator[Any],
        model: torch.nn.Module,
        logits_processor_func: Callable | None = None,
        postprocess_micro_batch_func: Callable | None = None,
    ) -> tuple[Any, Callable]:
        """As Megatron's schedules call it; ``logits_processor_func`` is for distillation, which `tree_of` refuses."""
        batch = next(batch_iter)
        if torch.cuda.is_available():
            batch = batch.to(torch.cuda.current_device())
        chunk, tree = _magi_model(model), tree_of(batch)
        fields = tree.item(tree.num_rows, len(tree.node_lengths))
        local = self._dispatcher.dispatch({name: torch.as_tensor(x)[None] for name, x in fields.items()})
        with chunk.given(local):
            output = model(input_ids=local.tokens, position_ids=local.position_ids, attention_mask=None)
        if chunk.post_process:
            output = _of_samples(output, local, tree, batch)
        return output, partial(postprocess_micro_batch_func, data=batch)


def make_dispatcher(config: Any) -> BatchDispatcher:
    """For a model's `TransformerConfig`; collective over all ranks."""
    heads, groups = (
        n // config.tensor_model_parallel_size for n in (config.num_attention_heads, config.num_query_groups)
    )
    shape = AttnShape(heads, groups, config.kv_channels, config.kv_channels, config.params_dtype)
    if torch.cuda.is_available():
        shape = shape.kernels_for(torch.device("cuda", torch.cuda.current_device()))
    alignment = config.tensor_model_parallel_size if config.sequence_parallel else 1
    cost = CostModel(num_heads_q=heads, num_heads_kv=groups, head_dim=config.kv_channels)
    magi = MagiConfig(dispatch=DispatchConfig(alignment=alignment), overlap=OverlapConfig(cost=cost))
    cp_group = parallel_state.get_context_parallel_group()
    masks = LayerMasks(MaskSource.parse("prefix_tree"))
    planner = Planner(magi, cp_group.rank(), cp_group.size(), shape, masks=masks, own_positions=True)
    return BatchDispatcher(planner, make_agreement_group(parallel_state.get_tensor_and_context_parallel_group()))


def _of_samples(logits: Tensor, local: LocalBatch, tree: PrefixTree, batch: Any) -> dict[str, Tensor]:
    """Of logits ``[1, num_rows, vocabulary / tp]``: log-probabilities and entropies sample by sample."""
    logits = logits.float() / temperature_of(batch)
    rows = {"log_probs": vocab_parallel_log_probs_from_logits(logits.clone(), local.labels)}
    if wants_entropy(batch):
        rows["entropy"] = vocab_parallel_entropy(logits)
    dispatch, group = local.params.plans.dispatch, parallel_state.get_context_parallel_group()
    args = UndispatchArgs.build(dispatch.global_indices(), dispatch.total_seqlen, group.rank(), logits.device)
    # Ranks of a sequence compute the same loss, of which each takes its own rows' gradient: Megatron adds them up.
    return {name: by_sample(tree, undispatch(x[0], args, group), batch) for name, x in rows.items()}


def _magi_model(model: torch.nn.Module) -> MagiGPTModel:
    try:
        return get_attr_wrapped_model(model, "given", return_model_obj=True)
    except RuntimeError:
        raise ValueError(f"model: {type(model).__name__} was not built by one of {', '.join(_BUILDERS)}") from None


@contextmanager
def _building_magi_models() -> Iterator[None]:
    found = []
    for module, name in _BUILDERS.items():
        try:
            found.append((importlib.import_module(module), name))
        except ImportError:
            continue
    before = [getattr(module, name) for module, name in found]
    for module, name in found:
        setattr(module, name, MagiGPTModel)
    try:
        yield
    finally:
        for (module, name), stock in zip(found, before, strict=True):
            setattr(module, name, stock)


for _device in EngineRegistry._engines["language_model"]["megatron"]:  # the first to register keeps the name
    EngineRegistry._engines["language_model"]["megatron"][_device] = MagiMegatronEngine
