"""TRL's GRPO trainer over trees: completions of a microbatch that share a prompt are one sequence with one prompt.

    trainer = TreeGRPOTrainer(model=model, args=GRPOConfig(...), reward_funcs=..., train_dataset=...)

The model has ``attn_implementation="magi"`` and full attention in all layers. Generation, rewards, advantages and
losses are TRL's. Completions share a prompt that are in the same microbatch: ``per_device_train_batch_size`` should be
a multiple of ``num_generations``, and ``steps_per_generation`` 1, as TRL shuffles over the steps of a generation.
With ``parallelism_config=MagiParallelismConfig(cp_size=n)`` n ranks share each tree; a model over several ranks does
not generate, so completions then come from vLLM or a ``rollout_func``. For TRL 1.16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trl import GRPOTrainer

from megatron_magi.hf import MagiParallelismConfig, shard_batch
from megatron_magi.packing import make_prefix_tree


class TreeGRPOTrainer(GRPOTrainer):
    """Computes each prompt of a microbatch once, forward and backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, model in {"model": self.model, "ref_model": self.ref_model}.items():
            if model is not None and self.accelerator.unwrap_model(model).config._attn_implementation != "magi":
                raise ValueError(
                    f'{name}: its attention cannot take trees; give model_init_kwargs={{"attn_implementation": "magi"}}'
                )
        if self.aux_loss_enabled:
            raise ValueError("router_aux_loss_coef: expected 0, as the rows of a shared prompt would count once")
        self._cp_group = None
        parallel = self.accelerator.parallelism_config
        if parallel is not None and parallel.cp_size > 1:
            if not isinstance(parallel, MagiParallelismConfig):
                raise ValueError("parallelism_config: expected a MagiParallelismConfig for cp_size above 1")
            self._cp_group = parallel.get_device_mesh()["cp"].get_group()
            if self.top_entropy_quantile < 1:
                raise ValueError(
                    "top_entropy_quantile: expected 1 on several ranks of a sequence, whose tokens TRL would take for "
                    "other ones"
                )
            if self.args.per_device_train_batch_size * self.args.steps_per_generation % self.num_generations:
                raise ValueError(
                    "num_generations: on several ranks of a sequence it must divide per_device_train_batch_size * "
                    "steps_per_generation, so that a rank has whole groups"
                )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's; it takes each rank for one that reads prompts of its own."""
        sampler = super()._get_train_sampler(dataset)
        if self._cp_group is not None:
            sampler.batch_size //= self._cp_group.size()
        return sampler

    def _generate(self, prompts: list) -> tuple:
        """TRL's; ranks of a sequence take the completions of the first, as each draws its own."""
        made = [super()._generate(prompts)]
        if self._cp_group is not None:
            dist.broadcast_object_list(made, group=self._cp_group, group_src=0)
        return made[0]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's; ranks of a sequence take the order of the first, as each shuffles by its own seed."""
        inputs = super()._prepare_inputs(generation_batch)
        if self._cp_group is not None:
            for value in inputs.values():
                if isinstance(value, Tensor):
                    dist.broadcast(value, group=self._cp_group, group_src=0)
        return inputs

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **media: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """TRL's log-probabilities and entropies of completions, ``[batch_size, logits_to_keep]``; 0 for padding.

        Raises:
            ValueError: there are images.
        """
        given = [name for name, value in media.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: trees are of text")
        parts = [
            self._of_tree(model, ids, seen, logits_to_keep)
            for ids, seen in zip(
                input_ids.split(batch_size or len(input_ids)),
                attention_mask.bool().split(batch_size or len(input_ids)),
                strict=True,
            )
        ]
        log_probs, entropies = (torch.cat(own) for own in zip(*parts, strict=True))
        return log_probs, entropies if compute_entropy else None, None

    def _of_tree(
        self, model: torch.nn.Module, input_ids: Tensor, seen: Tensor, logits_to_keep: int
    ) -> tuple[Tensor, Tensor]:
        """Of rows that are computed together."""
        tree = make_prefix_tree([ids[mask] for ids, mask in zip(input_ids.cpu(), seen.cpu(), strict=True)]).with_a_row()
        rows = {"input_ids": tree.tokens, "position_ids": tree.position_ids, "shift_labels": tree.labels}
        batch: dict[str, Any] = {name: torch.from_numpy(x).to(input_ids.device)[None] for name, x in rows.items()}
        batch |= {"magi_mask": tree.mask, "use_cache": False}
        shard = None
        if self._cp_group is not None:
            batch, shard = shard_batch(batch, self._cp_group, self.accelerator.unwrap_model(model).config)
        with self.accelerator.autocast():
            output = model(**batch, fused_lm_head=True)  # TRL's head: temperature and soft caps are in it
        lengths = seen[:, -logits_to_keep:].sum(1).tolist()
        found = []
        for values in (output.log_probs, output.entropy):
            # The reference model's head computes no entropies.
            values = torch.zeros_like(output.log_probs) if values is None else values
            if shard is not None:
                # Ranks of a sequence compute the same loss, and gradients are averaged over them.
                values = shard.undispatch(values, is_partial_grad=True)
            each = zip(tree.gather(values[0]), lengths, strict=True)
            padded = [torch.nn.functional.pad(own[len(own) - n :], (0, logits_to_keep - n)) for own, n in each]
            found.append(torch.stack(padded))
        return found[0], found[1]
