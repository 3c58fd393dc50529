"""torchtitan with this package's attention: packed documents under context parallelism, with its own command line.

    PYTHONPATH=examples/torchtitan torchrun --nproc-per-node 8 -m torchtitan.train \
        --module magi_titan --config llama3_8b --parallelism.context_parallel_degree 8 ...

Two of torchtitan's extension points are used, and its model, FSDP, losses and data loaders as they are: an override of
the configuration of flex attention puts `MagiAttention` into each layer, and `MagiTrainer` distributes a batch by
this package's plan instead of torchtitan's load balancer. Documents begin where a data loader's positions are 0, as for
torchtitan's flex and varlen attention, the latter of which has no context parallelism of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import FlexAttention, create_varlen_metadata_for_document
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from megatron_magi.api import DistAttnRuntimeKey, calc_attn, dispatch, magi_attn_varlen_key


class MagiAttention(Module):
    """Attention of this rank's rows over the keys of all ranks; in place of torchtitan's ``FlexAttention``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: DistAttnRuntimeKey,
        scale: float | None = None,
        score_mod: Callable | None = None,
        out_transform: Callable | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attends.

        Args:
            q_BLNH: ``[1, num_rows, num_heads_q, head_dim]``, as `MagiTrainer` gives one flat row of tokens.
            k_BLNH, v_BLNH: the same of the key heads.
            attention_masks: the batch's key.
            scale: of the softmax, ``head_dim ** -0.5`` when None.
            score_mod, out_transform: None; functions of torchtitan's for flex attention.

        Raises:
            ValueError: there is no key, or one of these functions.
        """
        if not isinstance(attention_masks, DistAttnRuntimeKey):
            raise ValueError(f"attention_masks: expected a key of MagiTrainer, got {type(attention_masks).__name__}")
        if score_mod is not None or out_transform is not None:
            raise ValueError("score_mod, out_transform: MagiAttention has neither")
        out, _ = calc_attn(q_BLNH[0], k_BLNH[0], v_BLNH[0], attention_masks, softmax_scale=scale)
        return out[None]


@override(target=FlexAttention.Config, description="megatron_magi's attention, which sends keys itself")
def magi_attention(config: FlexAttention.Config) -> MagiAttention.Config:
    """torchtitan gathers all keys before flex attention; here keys stay sharded, like queries."""
    sharding = config.sharding_config
    if sharding is not None:
        queries = sharding.in_dst_shardings["q_BLNH"]
        sharding = dataclasses.replace(
            sharding,
            in_dst_shardings=dict.fromkeys(sharding.in_dst_shardings, queries),
            local_map=dataclasses.replace(sharding.local_map, in_grad_placements=(queries,) * 3),
        )
    return derive(config, MagiAttention.Config, sharding_config=sharding)


class SelectiveMagiAC(SelectiveAC):
    """torchtitan's choice of what to keep for the backward; attention is recomputed, with its communication."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        # Attention written in torch, as on CPUs, changes these products in place.
        return super().get_save_ops() - {torch.ops.aten.bmm.default}


class MagiTrainer(Trainer):
    """torchtitan's trainer; each batch is one row of documents, distributed over the context-parallel ranks.

    Raises:
        ValueError: the configuration has what this does not serve, by name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        wrong = {
            "parallelism.spmd_backend": config.parallelism.spmd_backend != "spmd_types",
            "parallelism.pipeline_parallel_degree": config.parallelism.pipeline_parallel_degree > 1,
            "validator.enable": config.validator.enable,  # it shards its batches itself
            "training.disable_cuda_graphs": not config.training.disable_cuda_graphs,
            "compile.enable": config.compile.enable,
        }
        if any(wrong.values()):
            raise ValueError(f"{', '.join(n for n, is_so in wrong.items() if is_so)}: not served by MagiTrainer")
        config.override.imports.append(f"{magi_attention.__module__}.{magi_attention.__name__}")
        super().__init__(config)
        model = self.model_parts[0]
        if type(model).get_attention_masks is not Decoder.get_attention_masks:
            raise ValueError(f"model_spec: {type(model).__name__} has masks of its own, MagiTrainer knows documents")
        if any(isinstance(module, FlexAttention) for module in model.modules()):
            raise ValueError("model_spec: a layer has flex attention still")

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Distributes a batch; the key of its documents goes to the layers in place of their mask.

        Args:
            input_dict: ``input`` and ``positions``, ``[batch_size, seqlen]``; positions are 0 where documents begin.
            labels: ``[batch_size, seqlen]``.

        Returns:
            tokens and labels, ``[1, num_rows]`` of this rank, and the model's other arguments.
        """
        dims, attention = self.parallel_dims, self.model_config.first_attention
        tokens, positions = input_dict["input"], input_dict["positions"]
        bounds = create_varlen_metadata_for_document(positions).cu_seq_q.cpu()
        num_heads_q, num_heads_kv = attention.n_heads, attention.n_kv_heads or attention.n_heads
        key = magi_attn_varlen_key(
            bounds,
            bounds,
            num_heads_q // dims.tp,
            num_heads_kv // dims.tp,
            attention.head_dim or attention.dim // attention.n_heads,
            cp_group_or_mesh=dims.get_optional_mesh("cp"),
            causal=True,
        )
        self.ntokens_seen += labels.numel() // dims.cp
        tokens, positions = (dispatch(x.flatten(), key)[None] for x in (tokens, positions))
        labels = dispatch(labels.flatten(), key, pad_value=IGNORE_INDEX)[None]
        more = {"positions": positions, "attention_masks": key}
        return annotate_input_spmd_types(dims, tokens, labels, more)


def with_magi(config: Trainer.Config) -> MagiTrainer.Config:
    """A configuration of torchtitan's for flex attention, with `MagiTrainer`."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    made = MagiTrainer.Config(**fields)
    made.training.disable_cuda_graphs = True
    made.validator.enable = False
    if isinstance(made.activation_checkpoint, SelectiveAC.Config):
        made.activation_checkpoint = derive(made.activation_checkpoint, SelectiveMagiAC.Config)
    return made


def llama3_debugmodel() -> MagiTrainer.Config:
    return with_magi(llama3.llama3_debugmodel())


def llama3_8b() -> MagiTrainer.Config:
    return with_magi(llama3.llama3_8b())
