"""Logits of the whole batch that are gathered late: what one rank may do alone, and what they are as tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers import BertConfig, BertForNextSentencePrediction, BertModel, ElectraConfig, ElectraForPreTraining

from megatron_magi.hf import context_parallel
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import VOCABULARY, make_model, padded_batch
from tests.refusals import refusal


@torch.no_grad()
def use_as_tensors(rank, num_ranks):
    batch = padded_batch()
    model = context_parallel(make_model("llama"), dist.group.WORLD)
    a, b = (model(**batch).logits for _ in range(2))
    if rank == 0:
        assert f"{a}" == repr(a) == f"BatchRows(shape={tuple(a.shape)}, dtype=torch.float32, not gathered)"
        assert torch.zeros_like(a).shape == a.new_ones(a.shape).shape == a.shape
    assert a._rows.whole is None
    a.detach().mul_(0)
    a.data.add_(1)
    assert (a == 1).all() and repr(a).startswith("tensor")
    assert b.data_ptr() == b.whole().data_ptr()
    del batch["labels"]
    logits, hidden = model(**batch, output_hidden_states=True, return_dict=False)
    assert all(x.shape[:2] == a.shape[:2] for x in (logits, *hidden))
    inner = context_parallel(make_model("llama").model, dist.group.WORLD)
    assert inner(**batch).last_hidden_state.shape[:2] == a.shape[:2]


@torch.no_grad()
def recompute_layers(rank, num_ranks):
    """What the Trainer's ``gradient_checkpointing=True`` does: embeddings ask for a gradient."""
    model = context_parallel(make_model("llama"), dist.group.WORLD).eval()
    model.enable_input_require_grads()
    batch = padded_batch()
    output = model(**batch, output_hidden_states=True)
    return {tuple(x.shape[:2]) == tuple(batch["input_ids"].shape) for x in (output.logits, *output.hidden_states)}


def encoder(kind, config, attn_implementation, **options):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = config(vocab_size=VOCABULARY, attn_implementation=attn_implementation, **sizes)
    return kind(config, **options).eval()


@torch.no_grad()
def outputs_of_other_names(rank, num_ranks):
    """Differences to one rank of numbers and vectors of rows, and what is said where those of no rows are used."""
    tokens, group = padded_batch()["input_ids"], dist.group.WORLD
    kinds = {
        "logits": (ElectraForPreTraining, ElectraConfig, {}),
        "last_hidden_state": (BertModel, BertConfig, {"add_pooling_layer": False}),
    }
    differences = {}
    for name, (kind, config, options) in kinds.items():
        expected = encoder(kind, config, "eager", **options)(tokens)[name]
        found = context_parallel(encoder(kind, config, "magi", **options), group)(tokens)[name]
        assert found.shape == expected.shape
        differences[name] = (found - expected).abs().max().item()
    pooled = context_parallel(encoder(BertModel, BertConfig, "magi"), group)
    of_sequences = context_parallel(encoder(BertForNextSentencePrediction, BertConfig, "magi"), group)
    wide = context_parallel(make_model("gemma3n_shared"), group)
    as_wide_as_long = torch.arange(64).view(2, 32) % VOCABULARY
    with torch.enable_grad():
        in_training = pooled(tokens)
    expected = encoder(BertModel, BertConfig, "eager")(tokens).last_hidden_state
    differences["beside a pooled output"] = (pooled(tokens).last_hidden_state - expected).abs().max().item()
    unknown = [
        ("pooler_output", pooled(tokens).pooler_output),
        ("pooler_output", in_training.pooler_output),
        ("logits", of_sequences(tokens).logits),
        ("output 1", pooled(tokens, return_dict=False)[1]),
        ("output 1", pooled(as_wide_as_long, return_dict=False)[1]),
        ("hidden_states", wide(tokens, output_hidden_states=True).hidden_states[-1]),
    ]
    uses = (lambda x: x.shape, lambda x: x[0], lambda x: torch.nn.functional.relu(x), lambda x: 2 * x)
    return differences, [(name, refusal(use, x)) for name, x in unknown for use in uses]


def use_in_other_orders(rank, num_ranks):
    model, batch = context_parallel(make_model("llama"), dist.group.WORLD), padded_batch()
    with torch.no_grad():
        both = [model(**batch).logits for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"logits of a context-parallel model .*ranks disagree"):
        both[rank].whole()


def train_the_last_layer(rank, num_ranks):
    model = context_parallel(make_model("llama"), dist.group.WORLD).requires_grad_(False).train()
    model.model.layers[-1].requires_grad_(True)
    batch = padded_batch()
    output = model(**batch, output_hidden_states=True)
    return {x.shape[0] for x in (output.logits, *output.hidden_states)}


def test_one_rank_may_print_them_and_they_can_be_changed_and_read_as_tensors():
    run_ranks(use_as_tensors, 2)


def test_without_gradients_hidden_states_are_whole_where_layers_are_recomputed_in_training():
    assert run_ranks(recompute_layers, 2) == [{True}, {True}]


def test_outputs_of_any_name_are_whole_and_those_that_are_not_of_rows_are_refused():
    for differences, said in run_ranks(outputs_of_other_names, 2):
        assert max(differences.values()) < 1e-5, differences
        for name, message in said:
            assert message.startswith((f"{name}: a rank has 26 rows", f"{name}: a rank has 32 rows")), (name, message)


def test_ranks_that_use_them_in_other_orders_get_a_message():
    run_ranks(use_in_other_orders, 2)


def test_where_anything_is_trained_all_outputs_are_rows():
    assert run_ranks(train_the_last_layer, 2) == [{1}, {1}]
