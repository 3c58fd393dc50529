"""Layers that number rows: under context parallelism, in packs, and in every type of model that transformers has."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from megatron_magi.hf import context_parallel, shard_batch
from megatron_magi.hf.numbering import check_counting, check_ropes, renumbered
from megatron_magi.mask import builders
from megatron_magi.testing.spawn import run_ranks
from tests.hf.model_types import MODEL_TYPES, NOT_MADE, RETRIES, UNMADE, make_tiny
from tests.hf.models import CONFIGS, VOCABULARY, make_model

LENGTHS = (13, 17, 18)


def documents():
    """Tokens, labels and positions of a pack that is longer than each model's thresholds, as its documents are."""
    tokens = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    labels = tokens.clone()
    labels[0, bounds[:-1]] = -100
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}, bounds.tolist()


def one_by_one(model, batch, bounds):
    """The loss of documents in forwards of their own."""
    total = 0.0
    for a, b in itertools.pairwise(bounds):
        tokens, positions = (batch[name][:, a:b] for name in ("input_ids", "position_ids"))
        total += model(tokens, position_ids=positions, labels=tokens, use_cache=False).loss.item() * (b - a - 1)
    return total / sum(b - a - 1 for a, b in itertools.pairwise(bounds))


def outcome(model, batch, expected):
    """True and False for a loss that is right or wrong, else the message."""
    try:
        return abs(model(**batch, use_cache=False).loss.item() - expected) < 1e-4
    except (ValueError, AttributeError, RuntimeError) as error:
        return str(error)


def outcomes_of(model_type, mesh):
    """What came of one sequence and of a pack on two ranks, or of the model; None of one that is not made."""
    packed, bounds = documents()
    one = {"input_ids": packed["input_ids"], "labels": packed["input_ids"]}
    for options in RETRIES:
        try:
            model = make_tiny(model_type, "magi", **options)
        except NOT_MADE as error:
            if str(error) == "'magi'":
                return [str(error)]
            continue
        try:
            context_parallel(model, mesh)
        except ValueError as error:
            return [str(error)]
        try:
            eager = make_tiny(model_type, "eager", **options)
            expected = eager(**one, use_cache=False).loss.item(), one_by_one(eager, packed, bounds)
        except NOT_MADE:
            continue
        return [outcome(model, batch, loss) for batch, loss in zip((one, packed), expected, strict=True)]
    return None


def walk(_rank, num_ranks):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (num_ranks,))
    with torch.no_grad():
        return {model_type: outcomes_of(model_type, mesh) for model_type in MODEL_TYPES if model_type not in UNMADE}


REFUSALS = (
    "model: ",
    "labels: ",
    "position_ids: ",
    "position_bias: ",
    "rope_type: ",
    "attention_mask: ",
    "'magi'",  # of models that do not use transformers' interface
)


@pytest.mark.ranks(2)
def test_two_ranks_compute_what_one_does_or_refuse_a_model_of_any_type():
    found = run_ranks(walk, 2)[0]
    assert not [model_type for model_type, outcomes in found.items() if outcomes is None]
    for model_type, outcomes in found.items():
        for one in outcomes:
            assert one is True or str(one).startswith(REFUSALS), (model_type, one)
    right = {model_type for model_type, outcomes in found.items() if outcomes == [True, True]}
    assert len(right) >= 95, (len(right), {name: x for name, x in found.items() if name not in right})
    assert right >= {"gemma3n_text", "gemma4_text", "gpt2", "llama", "llama4_text", "ministral3", "mistral"}


class CountingAttention(LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states * scales_of(hidden_states), **kwargs)


def scales_of(hidden_states):
    return torch.arange(hidden_states.shape[1])[None, :, None].clamp(min=1).log()


def test_a_layer_that_numbers_rows_by_code_of_its_own_is_refused_in_a_shard():
    model = make_model("llama")
    for layer in model.model.layers:
        check_counting(layer.self_attn)
    model.model.layers[1].self_attn = CountingAttention(model.config, 1)
    batch, _ = documents()
    local, _ = shard_batch(batch, None, model.config)
    with pytest.raises(ValueError, match=r"^model: CountingAttention numbers its rows by code of its own"):
        model(**local)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_rope_that_depends_on_the_longest_position_is_refused(rope):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    more = {"rope_theta": 1e4, "original_max_position_embeddings": 8}
    config = LlamaConfig(**sizes, rope_parameters={**rope, **more})
    with pytest.raises(ValueError, match=rf"^rope_type: {rope['rope_type']} looks at the largest position"):
        check_ropes(config)
    check_ropes(CONFIGS["gemma3"])


def test_a_temperature_by_rows_is_refused_where_a_mask_of_ones_own_hides_positions():
    config = {**CONFIGS["llama4"].to_dict(), "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]}
    model = make_model(type(CONFIGS["llama4"])(**config))
    tokens = documents()[0]["input_ids"]
    model(tokens[:, :7], magi_mask=builders.causal(7), use_cache=False)
    with pytest.raises(ValueError, match=r"^magi_mask: Llama4TextAttention scales queries by the number of their row"):
        model(tokens, magi_mask=builders.causal(48), use_cache=False)


def test_queries_in_fp64_keep_their_digits():
    layer = SimpleNamespace(floor_scale=4, attn_scale=0.1)
    query = torch.randn(1, 2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = torch.arange(16)[None]
    assert torch.equal(renumbered(layer, query, rows), query)
    later = renumbered(layer, query, rows + 100)
    factor = later / query
    assert later.dtype == torch.float64 and (factor > 1).all()
    assert (factor - factor[..., :1]).abs().max() < 1e-14
