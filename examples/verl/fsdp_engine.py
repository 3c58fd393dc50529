"""verl's FSDP engine with rollouts as trees, and its sequence-parallel ranks as context parallelism.

    actor_rollout_ref.model.external_lib=fsdp_engine     # this folder on PYTHONPATH
    +actor_rollout_ref.model.override_config.attn_implementation=magi

``ulysses_sequence_parallel_size`` is then the number of ranks of a sequence; verl checks that it divides the heads.
Only rollouts in the same microbatch share a prompt: ``use_dynamic_bsz=False``, and
``ppo_micro_batch_size_per_gpu`` a multiple of ``rollout.n``. For verl 0.9.1.
"""

from __future__ import annotations

from typing import Any

import torch
from rollout_trees import by_sample, temperature_of, tree_of, wants_entropy
from torch import Tensor
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from megatron_magi.hf import shard_batch


class MagiFSDPEngine(FSDPEngineWithLMHead):
    """Computes shared prompts once. Losses, data and optimizer are verl's."""

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the model, and what its outputs need."""
        tree, device = tree_of(micro_batch), micro_batch["input_ids"].device
        rows = {"input_ids": tree.tokens, "position_ids": tree.position_ids, "labels": tree.labels}
        batch: dict[str, Any] = {name: torch.from_numpy(x).to(device)[None] for name, x in rows.items()}
        labels, shard = batch.pop("labels"), None
        batch["magi_mask"] = tree.mask
        if self.use_ulysses_sp:
            config = getattr(self.module, "module", self.module).config
            batch, shard = shard_batch(batch, self.ulysses_device_mesh["sp"], config)
            labels = shard.dispatch(labels)
        return batch, {"tree": tree, "labels": labels[0], "shard": shard}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any = None
    ) -> dict[str, Tensor]:
        """Log-probabilities, and entropies where they are asked for, sample by sample.

        ``logits_processor_func`` is for distillation, which `tree_of` refuses.
        """
        logits = output.logits[0].float() / temperature_of(micro_batch)
        rows = {"log_probs": -torch.nn.functional.cross_entropy(logits, output_args["labels"], reduction="none")}
        if wants_entropy(micro_batch):
            rows["entropy"] = torch.distributions.Categorical(logits=logits).entropy()
        shard = output_args["shard"]
        if shard is not None:
            # Ranks of a sequence compute the same loss, and gradients are averaged over them.
            rows = {name: shard.undispatch(x[None], is_partial_grad=True)[0] for name, x in rows.items()}
        return {name: by_sample(output_args["tree"], x, micro_batch) for name, x in rows.items()}


for _backend in ("fsdp", "fsdp2"):  # the first to register keeps the name
    for _device in EngineRegistry._engines["language_model"][_backend]:
        EngineRegistry._engines["language_model"][_backend][_device] = MagiFSDPEngine
