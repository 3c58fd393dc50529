"""Layers of hybrid models without Transformer Engine: Megatron's own local ones."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_magi.mcore import seams


def local_stack_spec(config: Any) -> ModuleSpec:
    """The counterpart of Megatron's ``hybrid_stack_spec`` for all its layers but sparse attention.

    In checkpoints norms have the names that they have in those of a GPT's local layers, which are those of
    Transformer Engine, so that either can be read as the other.

    Args:
        config: the model's `TransformerConfig`.
    """
    options = {"normalization": config.normalization, "qk_layernorm": config.qk_layernorm}
    dense = get_gpt_layer_local_submodules(**options)
    latent = get_gpt_layer_local_submodules(**options, multi_latent_attention=True)
    experts = get_gpt_layer_local_submodules(
        **options, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=config.moe_grouped_gemm
    )
    layers = seams.named(
        "core.models.hybrid.hybrid_block:HybridStackSubmodules",
        mamba_layer=_mamba(dense.input_layernorm),
        gdn_layer=_gated_delta_net(dense.input_layernorm),
        attention_layer=_attention(dense),
        mla_layer=_attention(latent),
        mlp_layer=_mlp(MLPLayer, dense),
        moe_layer=_mlp(MoETransformerLayer, experts),
        mtp_block_spec=_multi_token_prediction(dense.input_layernorm),
    )
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers))


def _mamba(norm: Any) -> ModuleSpec:
    products = LocalSpecProvider()
    mixer = MambaMixerSubmodules(in_proj=products.column_parallel_linear(), out_proj=products.row_parallel_linear())
    submodules = MambaLayerSubmodules(
        norm=norm,
        mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},  # as Transformer Engine names it
    )
    return ModuleSpec(module=MambaLayer, submodules=submodules)


def _gated_delta_net(norm: Any) -> ModuleSpec:
    products = LocalSpecProvider()
    mixer = GatedDeltaNetSubmodules(
        in_proj=products.column_parallel_linear(), out_norm=norm, out_proj=products.row_parallel_linear()
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(module=GatedDeltaNet, submodules=mixer),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.in_proj.layer_norm_"},
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _attention(of: TransformerLayerSubmodules) -> ModuleSpec:
    submodules = TransformerLayerSubmodules(
        input_layernorm=of.input_layernorm,
        self_attention=of.self_attention,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=of.sharded_state_dict_keys_map,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _mlp(layer: type, of: TransformerLayerSubmodules) -> ModuleSpec:
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=of.pre_mlp_layernorm,
        mlp=of.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=of.sharded_state_dict_keys_map,
    )
    return ModuleSpec(module=layer, submodules=submodules)


def _multi_token_prediction(norm: Any) -> ModuleSpec:
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=LocalSpecProvider().column_parallel_linear(),
        mtp_model_layer=None,
        layer_norm=norm,
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    )
