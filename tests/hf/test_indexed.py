"""Models whose layers choose keys by an indexer (DeepSeek-V3.2, GLM-MoE-DSA): as their own eager attention."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from transformers import DeepseekV32Config, GlmMoeDsaConfig

from megatron_magi.hf import context_parallel, indexed
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import SIZES, VOCABULARY, loss_and_gradients, make_model, packed_batch, padded_batch

LATENT = {
    **{name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "index_topk": 5,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "deepseek_v32": DeepseekV32Config(**LATENT, mlp_layer_types=["dense"] * 2),
    "glm_moe_dsa": GlmMoeDsaConfig(
        **{**LATENT, "num_hidden_layers": 3}, mlp_layer_types=["dense"] * 3, indexer_types=["full", "shared", "full"]
    ),
}
BATCHES = {"packed": packed_batch, "padded": padded_batch}


def compare(rank, num_ranks):
    """Largest differences of loss and gradients to eager attention on one rank, by model and batch."""
    indexed.SCORES = 16 * 60 * 7  # rows in several chunks
    found = {}
    for name, config in CONFIGS.items():
        for kind, make_batch in BATCHES.items():
            want_loss, want = loss_and_gradients(make_model(config, "eager").train(), make_batch())
            model = context_parallel(make_model(config).train(), dist.group.WORLD)
            if kind == "packed":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            loss, gradients = loss_and_gradients(model, make_batch())
            for gradient in gradients.values():
                dist.all_reduce(gradient)
            assert gradients.keys() == want.keys()
            found[name, kind] = {"loss": float((loss - want_loss).abs())} | {
                key: float((gradients[key] / num_ranks - want[key]).abs().max() / want[key].abs().max()) for key in want
            }
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_losses_and_gradients_are_those_of_eager_attention(num_ranks):
    found = run_ranks(compare, num_ranks)[0]
    assert len(found) == len(CONFIGS) * len(BATCHES)
    for case, differences in found.items():
        for name, difference in differences.items():
            assert difference < 1e-5, (case, name)


def test_generation_with_a_cache_chooses_the_tokens_of_eager_attention():
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    got, want = (
        make_model(CONFIGS["deepseek_v32"], kind).eval().generate(tokens, **options) for kind in ("magi", "eager")
    )
    assert got.tolist() == want.tolist()


def test_other_ways_to_choose_keys_and_masks_that_an_indexer_does_not_know_are_refused_by_name():
    model = make_model(CONFIGS["deepseek_v32"]).eval()
    batch = packed_batch((20,))
    bounds = torch.tensor([0, 9, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: the indexers"):
        model(**batch, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=False)
