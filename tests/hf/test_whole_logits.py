"""Logits of the whole batch that are gathered late: what one rank may do alone, and what they are as tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from megatron_magi.hf import context_parallel
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import make_model, padded_batch


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
    run_ranks(use_as_tensors, 2, timeout_s=60)


def test_without_gradients_hidden_states_are_whole_where_layers_are_recomputed_in_training():
    assert run_ranks(recompute_layers, 2, timeout_s=60) == [{True}, {True}]


def test_ranks_that_use_them_in_other_orders_get_a_message():
    run_ranks(use_in_other_orders, 2, timeout_s=60)


def test_where_anything_is_trained_all_outputs_are_rows():
    assert run_ranks(train_the_last_layer, 2, timeout_s=60) == [{1}, {1}]
