"""Models for trainers that are given a function that builds a chunk: megatron-core before 0.19.

Its wheel has a builder of hybrid models, and none of GPTs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models import gpt
from megatron.core.models.gpt import gpt_layer_specs as layers
from megatron.core.transformer.spec_utils import import_module

from megatron_magi.mcore.wheel_repairs import notice_rope_scaling


class GPTProvider:
    """Builds the chunks of a GPT as the command line says, called by Megatron's ``pretrain``.

    Args:
        args: a validated command line.
        config: Megatron's ``TransformerConfig`` of it.
        hooks: called in order with a list of the one chunk, before it is wrapped for data parallelism; each returns
            the list.

    Raises:
        ValueError: the command line asks for layers that only Megatron's own builder makes.
    """

    def __init__(self, args: Namespace, config: Any, hooks: Sequence[Callable]) -> None:
        for name in ("experimental_attention_variant", "heterogeneous_layers_config_path"):
            if getattr(args, name, None) is not None:
                raise ValueError(
                    f"{name}: not built by pretrain_scripts/pretrain_gpt.py with megatron-core before 0.19; call "
                    "megatron_magi.mcore.install() at the top of Megatron's own script"
                )
        if args.use_rope_scaling:
            notice_rope_scaling(args)
        self._args, self._config, self._hooks = args, config, hooks
        self._has_te = args.transformer_impl == "transformer_engine"

    def __call__(
        self, pre_process: bool, post_process: bool, vp_stage: int | None = None, config: Any = None, **options: Any
    ) -> torch.nn.Module:
        """One chunk; ``config`` and ``pg_collection`` are Megatron's, the other arguments say which chunk."""
        args, config = self._args, config or self._config
        spec = self._layer_spec(config, vp_stage)
        model = gpt.GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            mtp_block_spec=self._mtp_spec(config, vp_stage),
            vp_stage=vp_stage,
            **options,
        )
        return _hooked(model, self._hooks)

    def _layer_spec(self, config: Any, vp_stage: int | None) -> Any:
        if self._args.spec is not None:
            return import_module(self._args.spec)
        if config.num_moe_experts is not None:
            return layers.get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **self._kind(config))
        return self._layers_of(config, vp_stage)[-1]

    def _mtp_spec(self, config: Any, vp_stage: int | None) -> Any:
        """Its layers are as the last of the decoder."""
        if self._args.mtp_num_layers is None:
            return None
        last = self._layers_of(config, vp_stage)[-1]
        return layers.get_gpt_mtp_block_spec(config, last, self._has_te, vp_stage=vp_stage)

    def _layers_of(self, config: Any, vp_stage: int | None) -> Sequence[Any]:
        return layers.get_gpt_decoder_layer_specs(config, vp_stage=vp_stage, **self._kind(config))

    def _kind(self, config: Any) -> dict[str, Any]:
        return {
            "use_transformer_engine": self._has_te,
            "normalization": config.normalization,
            "qk_l2_norm": config.qk_l2_norm,
        }


class HybridProvider:
    """Builds the chunks of a hybrid model with Megatron's own builder, called by Megatron's ``pretrain``.

    Args:
        config: Megatron's ``HybridModelConfig``.
        hooks: as of `GPTProvider`.
    """

    def __init__(self, config: Any, hooks: Sequence[Callable]) -> None:
        from megatron.training.models.hybrid import HybridModelBuilder

        self._builder, self._hooks = HybridModelBuilder(config), hooks

    def __call__(
        self,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> torch.nn.Module:
        """One chunk; ``pg_collection`` is Megatron's, and ``config``, which the builder has already, is not read."""
        return _hooked(self._builder.build_model(pg_collection, pre_process, post_process, vp_stage), self._hooks)


def _hooked(model: torch.nn.Module, hooks: Sequence[Callable]) -> torch.nn.Module:
    chunks = [model]
    for hook in hooks:
        chunks = hook(chunks)
    return chunks[0]
