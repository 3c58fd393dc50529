import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    destroy_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_magi.mcore.planner import SEQUENCES
from megatron_magi.mcore.sample_packing import SamplePacking, divide, pack


def sample(length, start=0, **more):
    return {name: torch.arange(start, start + length).unsqueeze(0) for name in SEQUENCES} | more


@given(st.data(), st.lists(st.integers(1, 10), min_size=1, max_size=12))
def test_division_keeps_the_order_and_the_limit(data, lengths):
    at_least = data.draw(st.integers(1, len(lengths)))
    parts = divide(lengths, 10, at_least)
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    assert len(parts) >= at_least and all(part and sum(lengths[i] for i in part) <= 10 for part in parts)
    # What does not fit behind the microbatch before begins another.
    fewest = divide(lengths, 10)
    for before, after in itertools.pairwise(fewest):
        assert sum(lengths[i] for i in before) + lengths[after[0]] > 10
    assert len(parts) == max(at_least, len(fewest))


def test_microbatches_with_most_tokens_are_divided_where_they_are_halved_best():
    assert divide([3, 3, 3, 9], 10, 3) == [[0], [1, 2], [3]]
    assert divide([1, 1, 1], 10, 3) == [[0], [1], [2]]


def test_packed_samples_follow_one_another_with_the_bounds_of_all_documents():
    found = pack([sample(3), sample(5, 10, cu_seqlens=torch.tensor([[0, 2, 5, 5]])), sample(2, 20)])
    assert found.keys() == {*SEQUENCES, "cu_seqlens"}
    assert found["tokens"].tolist() == [[0, 1, 2, 10, 11, 12, 13, 14, 20, 21]]
    assert found["cu_seqlens"].tolist() == [[0, 3, 5, 8, 10]]


def run_schedule(samples, num_microbatches, most_tokens=8, multiple=1):
    ran = []

    def schedule(*, data_iterator, num_microbatches, seq_length):
        ran.append((num_microbatches, seq_length))
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        return [[next(each)["tokens"].shape[1] for _ in range(num_microbatches)] for each in iterators]

    lengths = SamplePacking(most_tokens, None, multiple)(schedule)(
        data_iterator=samples, num_microbatches=num_microbatches, seq_length=8
    )
    return ran, lengths


def test_a_schedule_runs_packed_microbatches_of_as_many_samples_as_it_was_called_with():
    samples = iter([sample(3), sample(5), sample(6), sample(1), sample(7)])
    assert run_schedule(samples, 4) == ([(2, 8)], [[8, 7]])
    assert next(samples)["tokens"].shape == (1, 7)


def test_losses_that_layers_log_are_means_over_the_microbatches_that_were_run(monkeypatch):
    """Megatron's trainer divides them by the number of samples."""
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {"loss_values": torch.ones(1), "total_values": torch.zeros(1)})
    monkeypatch.setattr(DSAIndexerLossLoggingHelper, "tracker", {})
    experts = MoEMetricsTracker()
    set_moe_metrics_tracker(experts)
    logged = MTPLossLoggingHelper.tracker

    def schedule(*, data_iterator, num_microbatches):
        for _ in data_iterator:
            logged["loss_values"] += 5.0
            logged["total_values"] += 1.0
            DSAIndexerLossLoggingHelper.tracker.setdefault("values", torch.zeros(2)).add_(3.0)  # a sum over tokens
            experts.record("load_balancing_loss", torch.tensor(7.0), 1, 2)

    try:
        SamplePacking(8, None)(schedule)(data_iterator=iter([sample(2)] * 6), num_microbatches=6)
    finally:
        destroy_moe_metrics_tracker()
    # Two microbatches were run; what was there before is no part of them, nor are numbers of tokens means.
    assert (logged["loss_values"] - 1.0).tolist() == [6 * 5.0] and logged["total_values"].tolist() == [2.0]
    assert DSAIndexerLossLoggingHelper.tracker["values"].tolist() == [2 * 3.0] * 2
    assert experts.metrics["load_balancing_loss"].values.tolist() == [6 * 7.0, 0.0]


def test_each_model_chunk_packs_its_own_samples_alike():
    assert run_schedule([iter([sample(3), sample(6)]), iter([sample(3), sample(6)])], 2) == ([(2, 8)], [[3, 6]] * 2)


def test_the_number_of_microbatches_is_a_multiple_where_stages_are_interleaved():
    assert run_schedule(iter([sample(3), sample(5), sample(6), sample(1)]), 4, multiple=2)[1] == [[8, 7]]
    assert run_schedule(iter([sample(3), sample(5), sample(6), sample(1)]), 4, multiple=4)[1] == [[3, 5, 6, 1]]
    with pytest.raises(ValueError, match=r"^sequence_packing_scheduler: 2 samples .* cannot be 4 microbatches"):
        run_schedule(iter([sample(3), sample(5)]), 2, multiple=4)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([sample(9)], r"^tokens: expected one sample of 1 to 8 tokens .*got shape \[1, 9\]"),
        ([{**sample(4), "labels": torch.zeros(1, 3)}], r"^labels: expected shape \[1, 4\]"),
        ([{"tokens": torch.zeros(1, 3)}], "^dataset_provider: its items have no labels"),
        (
            [sample(4, attention_mask=torch.ones(1, 1, 4, 4))],
            "^attention_mask: .* packing leaves out: .*cu_seqlens",
        ),
        ([], "^data: has ended"),
    ],
)
def test_samples_that_cannot_be_packed_are_named(samples, message):
    with pytest.raises(ValueError, match=message):
        run_schedule(iter(samples), 1)


def _packed_by_ranks(rank, num_ranks, lengths):
    ran = []
    schedule = SamplePacking(8, dist.group.WORLD)(lambda *, data_iterator, num_microbatches: ran.extend(data_iterator))
    try:
        schedule(data_iterator=iter([sample(length) for length in lengths[rank]]), num_microbatches=3)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return [batch["tokens"].shape[1] for batch in ran]


def test_all_ranks_run_as_many_microbatches_as_the_one_that_needs_most(ranks):
    assert ranks(2, _packed_by_ranks, [[1, 2, 3], [8, 7, 6]]) == [[1, 2, 3], [8, 7, 6]]
    assert ranks(2, _packed_by_ranks, [[1, 2, 3], [4, 4, 6]]) == [[3, 3], [8, 6]]


def test_a_sample_that_one_rank_cannot_pack_is_an_error_on_all_ranks(ranks):
    other, own = ranks(2, _packed_by_ranks, [[1, 2, 3], [1, 9, 3]])
    assert own.startswith("tokens: expected one sample of 1 to 8 tokens")
    assert other == f"{own} (on global rank 1)"
