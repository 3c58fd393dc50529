"""Layers of hybrid models without Transformer Engine: Megatron's own local ones."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.identity_op import IdentityOp
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
from megatron_magi.mcore.versions import found_version, release
from megatron_magi.runtime.upload import current_device


def local_stack_spec(config: Any) -> ModuleSpec:
    """The counterpart of Megatron's ``hybrid_stack_spec`` for all its layers.

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
    if release(found_version()) >= (0, 19):  # before, it has other parts
        layers["dsa_layer"] = _sparse_attention(config, dense.input_layernorm)
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


def _layer_of(of: TransformerLayerSubmodules, layer: type, **parts: Any) -> ModuleSpec:
    """A layer of some parts of a whole one, with its names in checkpoints."""
    submodules = TransformerLayerSubmodules(sharded_state_dict_keys_map=of.sharded_state_dict_keys_map, **parts)
    return ModuleSpec(module=layer, submodules=submodules)


def _attention(of: TransformerLayerSubmodules) -> ModuleSpec:
    parts = {"input_layernorm": of.input_layernorm, "self_attention": of.self_attention}
    return _layer_of(of, TransformerLayer, self_attn_bda=get_bias_dropout_add, **parts)


def _sparse_attention(config: Any, norm: Any) -> ModuleSpec:
    products = LocalSpecProvider()
    column, own_norm = products.column_parallel_linear(), norm if config.qk_layernorm else IdentityOp
    indexer = DSAIndexerSubmodules(
        linear_wq_b=ReplicatedLinear,
        linear_wk=ReplicatedLinear,
        k_norm=products.layer_norm(rms_norm=False, for_qk=True),
        linear_weights_proj=ReplicatedLinear,
    )
    columns = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    attention = AbsorbedMLASelfAttentionSubmodules(
        **dict.fromkeys(columns, column),
        core_attention=ModuleSpec(
            module=DSAttention,
            submodules=DSAttentionSubmodules(indexer=ModuleSpec(module=DSAIndexer, submodules=indexer)),
        ),
        linear_proj=products.row_parallel_linear(),
        q_layernorm=own_norm,
        kv_layernorm=own_norm,
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(
            module=AbsorbedMLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that all tensor-parallel ranks hold, as Transformer Engine's with ``parallel_mode="duplicated"``.

    Args:
        input_size, output_size: of a row.
        config: the model's `TransformerConfig`.
        init_method: draws the weight.
        bias: must be False.
        **_options: of Transformer Engine's layer, which say the same.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool = False, **_options: Any
    ) -> None:
        assert not bias, "the layers that are replicated have no bias"
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        self._draw = init_method if config.perform_initialization else None
        super().__init__(input_size, output_size, bias=False, device=device, dtype=config.params_dtype)

    def reset_parameters(self) -> None:
        """Draws the weight as the configuration says."""
        if self._draw is not None:
            self._draw(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and no bias."""
        return super().forward(x), None


def _mlp(layer: type, of: TransformerLayerSubmodules) -> ModuleSpec:
    return _layer_of(of, layer, pre_mlp_layernorm=of.pre_mlp_layernorm, mlp=of.mlp, mlp_bda=get_bias_dropout_add)


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
