"""Models with layers that need all tokens in their order are refused by name, wherever a batch is sharded."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING

from megatron_magi.hf import context_parallel, log_probs, shard_batch
from megatron_magi.hf.automodel import magi_prepare_batch
from megatron_magi.hf.layer_kinds import other_kinds
from megatron_magi.mask import builders
from megatron_magi.packing import make_prefix_tree
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import make_model, packed_batch
from tests.hf.packed_models import REFUSED
from tests.refusals import refusal

TREE = make_prefix_tree([[5, 6, 7, 8, 1], [5, 6, 7, 9, 9, 2]])
OTHERS = {
    "bamba", "bailing_hybrid", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen4_exp_text",
    "recurrent_gemma", "zamba", "zamba2", "zaya",
}  # fmt: skip
"""Types of transformers' whose layers, as they are by default, are of other kinds."""


def on_two_ranks(_rank, num_ranks):
    mesh, batch, out = init_device_mesh("cpu", (num_ranks,)), packed_batch(), {}
    for name, config in REFUSED.items():
        model = make_model(config)
        out[name] = {
            "context_parallel": refusal(context_parallel, model, mesh),
            "shard_batch": refusal(shard_batch, batch, mesh, model.config),
            "log_probs": refusal(log_probs, model, TREE, mesh),
            "automodel": refusal(magi_prepare_batch, model, batch, mesh.get_group()),
        }
    return out


@pytest.mark.ranks(2)
def test_all_that_shards_a_batch_refuses_layers_that_do_not_attend():
    for result in run_ranks(on_two_ranks, 2):
        assert result.keys() == REFUSED.keys()
        for messages in result.values():
            for name, message in messages.items():
                assert str(message).startswith("tree: the model has" if name == "log_probs" else "model: layers"), name


@pytest.mark.parametrize("name", REFUSED)
def test_masks_of_ones_own_are_refused_on_one_rank_by_models_with_layers_that_take_none(name):
    model = make_model(REFUSED[name])
    tokens = packed_batch()["input_ids"]
    with pytest.raises(ValueError, match=r"^tree: the model has layers that take no mask: \['linear_attention'\]"):
        log_probs(model, TREE)
    with pytest.raises(ValueError, match=r"^magi_mask: the model has layers that take no mask"):
        model(tokens, magi_mask=builders.causal(tokens.shape[1]), use_cache=False)


def test_every_type_is_known_whose_layers_are_of_other_kinds():
    found = {name for name in OTHERS if other_kinds(CONFIG_MAPPING[name]().get_text_config())}
    assert found == OTHERS
    for name in ("llama", "gpt_oss", "gemma3_text", "llama4_text", "deepseek_v32", "glm_moe_dsa"):
        assert other_kinds(CONFIG_MAPPING[name]()) == []


@pytest.mark.parametrize("name", REFUSED)
def test_on_one_rank_without_a_mask_of_ones_own_they_compute_as_with_eager_attention(name):
    tokens = packed_batch()["input_ids"]
    with torch.no_grad():
        one, other = (make_model(REFUSED[name], x)(tokens, use_cache=False).logits for x in ("magi", "eager"))
    assert (one - other).abs().max() < 1e-4
