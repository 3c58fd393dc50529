"""Ranks of one sequence that hold different batches of equal masks hear which ranks and which argument differ."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from megatron_magi.api import calc_attn, clear_cache, dispatch, magi_attn_varlen_key
from megatron_magi.config import CommConfig, MagiConfig
from megatron_magi.hf import context_parallel, log_probs, shard_batch
from megatron_magi.hf.automodel import MagiState, make_magi_attn_func
from megatron_magi.packing import make_prefix_tree
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import make_model, packed_batch

pytestmark = pytest.mark.ranks(2)


def raised(function, *args, **kwargs):
    clear_cache()  # plans of a batch that was refused are refused again
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def changed(rank, name, by):
    """A batch of which rank 1 holds another argument."""
    batch = packed_batch()
    return {**batch, name: batch[name] + by} if rank == 1 else batch


def of_models(rank):
    model = context_parallel(make_model("llama"), dist.group.WORLD)
    found = {name: raised(model, **changed(rank, name, 1)) for name in ("input_ids", "labels", "position_ids")}
    other = {"shift_labels": packed_batch()["labels"].roll(rank)}
    found["shift_labels"] = raised(model, **packed_batch(), **other)
    with torch.no_grad():
        found["without a gradient"] = raised(model, **changed(rank, "input_ids", 1))
        found["labels of one rank"] = raised(model, **{**packed_batch(), **({} if rank else {"labels": None})})
    found["alike"] = raised(model, **packed_batch())
    return found


def of_rows_that_are_dispatched_before(rank):
    """`shard_batch`, and a model that is not context-parallel."""
    model = make_model("llama")

    def step(**batch):
        local, _ = shard_batch(batch, dist.group.WORLD, model.config)
        model(**local)

    not_compared = MagiConfig(comm=CommConfig(verify=False))
    return {
        "input_ids": raised(step, **changed(rank, "input_ids", 1)),
        "not compared": raised(
            lambda **batch: shard_batch(batch, dist.group.WORLD, model.config, not_compared),
            **changed(rank, "input_ids", 1),
        ),
    }


def of_rollouts(rank):
    """Of trees of the same mask: with another token, another last token, and in another order."""
    model = make_model("llama")
    rollouts = [[5, 6, 7, 8, 1], [5, 6, 7, 8, 9], [5, 3, 3]]
    trees = {
        "input_ids": [[5, 6, 4 if rank else 7, 8, 1], [5, 6, 4 if rank else 7, 8, 9], [5, 3, 3]],
        "labels": [[5, 6, 7, 8, 2 if rank else 1], [5, 6, 7, 8, 9], [5, 3, 3]],
        "tree": rollouts if rank else [rollouts[1], rollouts[0], rollouts[2]],
        "alike": rollouts,
    }
    return {name: raised(log_probs, model, make_prefix_tree(own), dist.group.WORLD) for name, own in trees.items()}


def of_a_loop_of_ones_own(rank):
    tokens = torch.arange(40)
    found = {}
    for name, more in {"tokens": {"tokens": tokens + rank}, "step": {"tokens": tokens, "step": 7 + rank}}.items():

        def attend(more=more):
            key = magi_attn_varlen_key([0, 40], [0, 40], causal=True, cp_group_or_mesh=dist.group.WORLD, compare=more)
            x = dispatch(tokens[:, None, None].expand(-1, 1, 8).float(), key)
            calc_attn(x, x, x, key)

        found[name] = raised(attend)
    return found


def of_an_error(rank):
    """Of one rank, before it takes part in a comparison. The group cannot be used after it."""
    model = context_parallel(make_model("llama"), dist.group.WORLD)
    return raised(model, **{**packed_batch(), **({} if rank else {"attention_mask": torch.ones(3)})})


def of_errors_before(rank):
    """Of one rank, before anything is planned or attends, each on a group of its own."""
    model, tree = make_model("llama"), make_prefix_tree([[5, 6, 7], [5, 3]])
    tokens = torch.arange(40)
    packed = {"input_ids": tokens, "labels": tokens, "cu_seqlens": torch.tensor([0, 40])}

    def prepare(group, custom, more, **options):
        """A packed batch, and attention to it by a function."""
        state = MagiState(enabled=True, custom=True, cp_group=group, cp_size=2)
        attend = make_magi_attn_func(state=state)
        state.prepare_llm_batch(custom, {**packed, **more}, is_thd=True)
        x = torch.randn(20, 4, 8)
        attend(x, x, x, **options)

    custom = torch.nn.Module()
    custom.config = model.config
    cases = {
        "no rollouts": lambda group: log_probs(model, make_prefix_tree([]) if rank else tree, group),
        "no tree": lambda group: log_probs(model, None if rank else tree, group),
        "bounds": lambda group: prepare(group, custom, {"cu_seqlens": torch.tensor([0, 39 if rank else 40])}),
        "labels": lambda group: prepare(group, custom, {"labels": tokens[:3] if rank else tokens}),
        "tree": lambda group: prepare(group, custom, {"prefix_tree": 1} if rank else {}),
        "option": lambda group: prepare(group, custom, {}, bias=1 if rank else None),
    }
    return {name: raised(case, dist.new_group([0, 1])) for name, case in cases.items()}


def on_two_ranks(rank, _num_ranks):
    cases = {"models": of_models, "rows": of_rows_that_are_dispatched_before}
    cases |= {"rollouts": of_rollouts, "own loop": of_a_loop_of_ones_own, "before": of_errors_before}
    cases["error"] = of_an_error
    return {name: case(rank) for name, case in cases.items()}


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_two_ranks, 2)


DIFFERENT = [("models", name, name) for name in ("input_ids", "position_ids", "labels", "shift_labels")]
DIFFERENT += [("models", "without a gradient", "input_ids"), ("models", "labels of one rank", "labels")]
DIFFERENT += [("rows", "input_ids", "input_ids"), ("own loop", "tokens", "tokens"), ("own loop", "step", "step")]
DIFFERENT += [("rollouts", name, name) for name in ("input_ids", "labels", "tree")]


@pytest.mark.parametrize("where, case, name", DIFFERENT)
def test_another_batch_of_one_rank_is_a_message_that_names_it_on_all(results, where, case, name):
    messages = {result[where][case] for result in results}
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith(f"RuntimeError: {name}: ranks disagree: rank 1 of the group (global rank 1) has 0x")


def test_ranks_that_hold_the_same_batch_hear_nothing(results):
    for result in results:
        assert result["models"]["alike"] is None and result["rollouts"]["alike"] is None
        assert result["rows"]["not compared"] is None


def test_a_batch_that_one_rank_cannot_read_is_a_message_on_all(results):
    one, other = (result["error"] for result in results)
    assert one.startswith("ValueError: attention_mask: expected [1, 53]")
    assert other.startswith("RuntimeError: plan: rank 0 of the group (global rank 0) raised ValueError: attention_mask")


@pytest.mark.parametrize(
    "case, message",
    [
        ("no rollouts", "tree: it has no rollouts"),
        ("no tree", "tree: expected a PrefixTree"),
        ("bounds", "cu_seqlens: expected documents of 40 tokens"),
        ("labels", "labels: expected 40, one a token"),
        ("tree", "prefix_tree: expected a pair"),
        ("option", "bias: not supported"),
    ],
)
def test_an_error_of_one_rank_before_it_plans_or_attends_is_a_message_on_all(results, case, message):
    other, one = (result["before"][case] for result in results)
    assert one.startswith(f"ValueError: {message}")
    assert "rank 1 of the group (global rank 1) raised ValueError: " + message in other
