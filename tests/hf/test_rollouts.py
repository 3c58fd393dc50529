"""Rollouts of which little or nothing is to be predicted: on one rank, on more ranks than rows, beside other ranks."""

import copy

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_magi.hf import log_probs
from megatron_magi.packing import make_prefix_tree
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import make_model

CASES = {
    "one token each": [[1], [2], [1]],
    "one row": [[1, 2], [3]],
    "prompts without answers": [[5, 6, 7], [5, 6, 7, 8, 9], [5, 6], [5]],
    "all the same": [[5, 6, 7]] * 3,
}


def loss_and_gradients(model, each):
    loss = sum((i + 1) * own.exp().sum() for i, own in enumerate(each))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def one_by_one(model, rollouts):
    for rollout in map(torch.tensor, rollouts):
        if len(rollout) > 1:
            logits = model(rollout[None, :-1], use_cache=False).logits[0]
            yield -torch.nn.functional.cross_entropy(logits, rollout[1:], reduction="none")
        else:
            yield 0 * next(model.parameters()).sum().expand(1)[:0]


def difference(ours, expected):
    (loss, gradients), (expected_loss, expected_gradients) = ours, expected
    out = [(loss - expected_loss).abs().item()]
    for name, gradient in gradients.items():  # all there are, as FSDP needs them
        own = expected_gradients[name]
        out.append((gradient if own is None else gradient - own).abs().max().item())
    return max(out)


def on_ranks(_rank, num_ranks, case):
    """The largest difference from rollouts one by one."""
    rollouts, (eager, model) = CASES[case], (make_model("llama", kind) for kind in ("eager", "magi"))
    expected = loss_and_gradients(eager, list(one_by_one(eager, rollouts)))
    found = log_probs(model, make_prefix_tree(rollouts), dist.group.WORLD if num_ranks > 1 else None)
    assert [list(own.shape) for own in found] == [[len(rollout) - 1] for rollout in rollouts]
    loss, gradients = loss_and_gradients(model, found)
    for gradient in gradients.values() if num_ranks > 1 else ():
        dist.all_reduce(gradient)
        gradient /= num_ranks
    return difference((loss, gradients), expected)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_computes_what_rollouts_one_by_one_are(case):
    assert on_ranks(0, 1, case) < 1e-5


def beside_a_rank_with_rows(rank, num_ranks):
    """Data-parallel ranks, of which one has rows alone: differences from the mean of their gradients."""
    own = CASES["one token each"] if rank else CASES["prompts without answers"]
    plain, out = make_model("llama"), []
    loss, gradients = loss_and_gradients(plain, log_probs(plain, make_prefix_tree(own)))
    assert torch.isfinite(loss) and (rank == 0 or not loss)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= num_ranks
    for wrap in (DistributedDataParallel, fully_shard):
        model = copy.deepcopy(plain)
        model.zero_grad()
        wrapped = wrap(model)
        loss_and_gradients(model, log_probs(wrapped, make_prefix_tree(own)))
        for name, parameter in model.named_parameters():
            found = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            out.append((found - gradients[name]).abs().max().item())
    return max(out)


def on_three_ranks(rank, num_ranks):
    return {case: on_ranks(rank, num_ranks, case) for case in CASES}, beside_a_rank_with_rows(rank, num_ranks)


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_three_ranks, 3)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES)
def test_more_ranks_than_rows_compute_what_rollouts_one_by_one_are(results, case):
    assert max(differences[case] for differences, _ in results) < 1e-5


@pytest.mark.ranks(3)
def test_data_parallel_ranks_that_predict_nothing_take_part(results):
    assert max(difference for _, difference in results) < 1e-5


def test_no_rollouts_are_refused():
    with pytest.raises(ValueError, match=r"^tree: it has no rollouts; .* give one of one token"):
        log_probs(make_model("llama"), make_prefix_tree([]))
