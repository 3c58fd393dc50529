"""Core attention is replaced wherever it is in a spec, and a layer that was missed is found."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules, get_mtp_layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_magi.mcore import layer_spec
from megatron_magi.mcore.core_attention import MagiCoreAttention, MagiTECoreAttention
from megatron_magi.mcore.hybrid_spec import local_stack_spec
from megatron_magi.mcore.layer_spec import check_attention, replace_core_attention
from megatron_magi.mcore.linear_layers import MagiGatedDeltaNet, MagiMambaMixer


def _core(layer: ModuleSpec) -> object:
    return layer.submodules.self_attention.submodules.core_attention


def test_local_attention_is_replaced_in_a_copy() -> None:
    spec = get_gpt_layer_local_spec()
    out = replace_core_attention(spec)
    assert _core(out) is MagiCoreAttention
    assert _core(spec) is DotProductAttention
    assert out.submodules.self_attention.params == spec.submodules.self_attention.params != {}


@pytest.mark.parametrize(
    "options",
    [{"num_experts": 4}, {"multi_latent_attention": True}, {"qk_layernorm": True}],
    ids=lambda o: next(iter(o)),
)
def test_local_attention_is_replaced_in_layers_of_every_kind(options: dict) -> None:
    assert _core(replace_core_attention(get_gpt_layer_local_spec(**options))) is MagiCoreAttention


def test_every_layer_of_a_block_is_replaced() -> None:
    block = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec() for _ in range(3)])
    assert [_core(layer) for layer in replace_core_attention(block).layer_specs] == [MagiCoreAttention] * 3


def test_multi_token_prediction_is_replaced() -> None:
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[get_mtp_layer_spec(get_gpt_layer_local_spec(), False)])
    out = replace_core_attention(ModuleSpec(module=nn.Module, submodules=block))
    assert _core(out.submodules.layer_specs[0].submodules.mtp_model_layer) is MagiCoreAttention


def test_attention_inside_a_partial_is_replaced() -> None:
    out = replace_core_attention(functools.partial(print, layer=get_gpt_layer_local_spec()))
    assert _core(out.keywords["layer"]) is MagiCoreAttention


def test_attention_as_a_spec_or_a_partial_is_replaced() -> None:
    for core in (ModuleSpec(module=DotProductAttention), functools.partial(DotProductAttention)):
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = core
        assert _core(replace_core_attention(spec)) is MagiCoreAttention


def test_attention_of_te_is_replaced_by_the_variant_that_saves_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.extensions import transformer_engine

    class Attention(nn.Module):
        """Stands for TE's, which this machine may lack."""

    monkeypatch.setattr(layer_spec, "HAVE_TE", True)
    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", Attention)
    spec = get_gpt_layer_local_spec()
    assert _core(replace_core_attention(spec)) is MagiCoreAttention
    spec.submodules.self_attention.submodules.core_attention = Attention
    assert _core(replace_core_attention(spec)) is MagiTECoreAttention


def test_no_spec_stays_no_spec() -> None:
    assert replace_core_attention(None) is None


class _Attention(SelfAttention):
    """An attention layer of which only the core matters."""

    def __init__(self, core: nn.Module) -> None:
        nn.Module.__init__(self)
        self.core_attention = core


class _Mixer(MambaMixer):
    def __init__(self) -> None:
        nn.Module.__init__(self)


def test_attention_that_was_not_replaced_is_named() -> None:
    model = nn.ModuleDict({"odd": _Attention(nn.Identity())})
    with pytest.raises(ValueError, match=r"transformer_layer_spec: odd .* core attention Identity"):
        check_attention(model)


class _DeltaNet(GatedDeltaNet):
    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize("layer", [_Mixer, _DeltaNet])
def test_linear_layers_that_are_not_known_are_named(layer: type[nn.Module]) -> None:
    """One derived from Megatron's, and one that comes from elsewhere than a spec; they would mix documents."""
    with pytest.raises(ValueError, match=rf"transformer_layer_spec: mixer \({layer.__name__}\) needs the tokens in"):
        check_attention(nn.ModuleDict({"mixer": layer()}))


def test_a_gated_delta_net_needs_sequence_parallelism_under_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that no command line was checked for."""

    def init(self: nn.Module, tp_size: int, *, is_split: bool) -> None:
        nn.Module.__init__(self)
        self.tp_size, self.cp_size, self.num_key_heads, self.num_value_heads = tp_size, 1, 4, 4
        self.config = SimpleNamespace(sequence_parallel=is_split)

    monkeypatch.setattr(GatedDeltaNet, "__init__", init)
    MagiGatedDeltaNet(1, is_split=False)
    MagiGatedDeltaNet(2, is_split=True)
    with pytest.raises(ValueError, match=r"^sequence_parallel: "):
        MagiGatedDeltaNet(2, is_split=False)


def test_linear_layers_are_replaced_in_a_copy() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    spec = local_stack_spec(config)
    out = replace_core_attention(spec)
    for stack, mixers in ((spec, (MambaMixer, GatedDeltaNet)), (out, (MagiMambaMixer, MagiGatedDeltaNet))):
        layers = stack.submodules
        assert layers.mamba_layer.submodules.mixer.module is mixers[0]
        assert layers.gdn_layer.submodules.self_attention.module is mixers[1]


def test_cross_attention_and_dropout_are_refused() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0)
    group = SimpleNamespace(size=lambda: 1)
    groups = SimpleNamespace(tp=group, cp=group)
    with pytest.raises(ValueError, match="attention_type"):
        MagiCoreAttention(config, 1, AttnMaskType.causal, "cross", pg_collection=groups)
    with pytest.raises(ValueError, match="attn_mask_type"):
        MagiCoreAttention(config, 1, AttnMaskType.no_mask, "self", pg_collection=groups)
    config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        MagiCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
