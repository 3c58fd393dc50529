"""The loss curve of stock Megatron on one rank, reproduced under every kind of parallelism."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.parity import Case, Runs, assert_same_curve

DEEP = ("--num-layers", "4")
PIPELINE = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
FULL_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE_RECOMPUTE = ("--recompute-granularity", "selective")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
ODD_LENGTH = ("--seq-length", "125", "--max-position-embeddings", "125")
MICRO_BATCH_2 = ("--micro-batch-size", "2")
DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2")
YARN = (
    "--position-embedding-type",
    "yarn",
    "--rotary-scaling-factor",
    "4",
    "--yarn-original-max-position-embeddings",
    "32",
)

PARALLELISM = {
    "cp2": Case(),
    "cp4": Case(num_ranks=4, cp_size=4),
    "cp3_length_that_does_not_divide": Case(ODD_LENGTH, num_ranks=3, cp_size=3),
    "cp2_two_sequences_a_microbatch": Case(MICRO_BATCH_2),
    "cp3_two_sequences_that_do_not_divide": Case((*ODD_LENGTH, *MICRO_BATCH_2), num_ranks=3, cp_size=3),
    "tp2_sp_cp2": Case((), TENSOR, 4),
    "pp2_cp2": Case(DEEP, PIPELINE, 4, same_weights=True),
    "interleaved_pp2_cp2_full_recompute": Case(DEEP, (*INTERLEAVED, *FULL_RECOMPUTE), 4, same_weights=True),
    "interleaved_pp2_cp2_selective_recompute": Case(DEEP, (*INTERLEAVED, *SELECTIVE_RECOMPUTE), 4, same_weights=True),
    "dp2_cp2_distributed_optimizer_overlapped": Case((), DISTRIBUTED_OPTIMIZER, 4),
    "cp2_per_token_loss": Case(("--calculate-per-token-loss",)),
}


@pytest.mark.parametrize("name", PARALLELISM)
def test_loss_curve_equals_stock_on_one_rank(name: str, runs: Runs) -> None:
    case = PARALLELISM[name]
    assert_same_curve(runs.magi(case), runs.stock(case))


MLA = (
    "--multi-latent-attention",
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", "--kv-lora-rank", "16"),
)
NO_GROUPS = ("--group-query-attention",)
SPLIT_HEADS = "tests.e2e.hooks:split_head_dims"
# Stock local attention forgets the documents' mask in layers with a window.
WINDOW = ("--window-size", "16,0", "--window-attn-skip-freq", "2")

FEATURES = {
    "no_grouped_queries": Case(without=NO_GROUPS),
    "windows_in_every_other_layer": Case(WINDOW, without=("--reset-attention-mask",)),
    "multi_token_prediction": Case(("--mtp-num-layers", "2")),
    "multi_token_prediction_per_token_loss": Case(("--mtp-num-layers", "1", "--calculate-per-token-loss")),
    "mla": Case((*MLA, "--rope-type", "rope"), without=NO_GROUPS, before_stock=SPLIT_HEADS),
    "mla_yarn_two_sequences": Case(
        (*MLA, "--rope-type", "yarn", "--rotary-scaling-factor", "4", *MICRO_BATCH_2),
        without=NO_GROUPS,
        before_stock=SPLIT_HEADS,
    ),
    "experts_ep2": Case(EXPERTS, ("--expert-model-parallel-size", "2"), same_weights=True),
    "experts_length_that_does_not_divide": Case(
        (*ODD_LENGTH, *EXPERTS), ("--expert-model-parallel-size", "2"), same_weights=True
    ),
    "yarn": Case(YARN),
    "learned_positions": Case(("--position-embedding-type", "learned_absolute")),
    "sink_off_by_one": Case(("--softmax-type", "off-by-one")),
    "eod_does_not_confine": Case(without=("--reset-attention-mask",)),
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature_at_cp2_equals_stock_on_one_rank(name: str, runs: Runs) -> None:
    case = FEATURES[name]
    assert_same_curve(runs.magi(case), runs.stock(case))


def test_padding_is_no_load_for_experts_on_later_stages(runs: Runs) -> None:
    parallel = (*TENSOR, *PIPELINE, "--attention-backend", "magi")
    case = Case((*ODD_LENGTH, *EXPERTS), parallel, 4, cp_size=1, same_weights=True)
    assert_same_curve(runs.magi(case), runs.stock(case))


def test_overlapped_communication_of_experts_changes_nothing(runs: Runs) -> None:
    experts = (*EXPERTS, "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--bf16")
    case = Case(parallel=experts, before="tests.e2e.hooks:no_streams")
    assert_same_curve(runs.magi(case, "--overlap-moe-expert-parallel-comm"), runs.magi(case))


SINK = Case(("--softmax-type", "learnable"), before="tests.e2e.hooks:large_sinks", same_weights=True)
SINK_TP2 = Case(SINK.model, TENSOR, 4, before=SINK.before, same_weights=True)


@pytest.mark.parametrize("case", [SINK, SINK_TP2], ids=["cp2", "tp2_cp2"])
def test_large_sink_trains_as_on_one_rank(case: Case, runs: Runs) -> None:
    expected, got = runs.stock(case), runs.magi(case)
    assert_same_curve(got, expected)
    want = torch.load(expected.workdir / "sink_grads0.pt")
    assert len(want) == 2
    tp_size = case.num_ranks // case.cp_size
    parts = [torch.load(got.workdir / f"sink_grads{rank}.pt") for rank in range(tp_size)]
    for name, grad in want.items():
        assert grad.abs().min() > 1e-6, "a gradient of zero would prove nothing"
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), grad, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("backend", ["magi", "auto"])
def test_multi_token_prediction_on_a_stage_in_the_middle_shares_its_embedding(backend: str, runs: Runs) -> None:
    layout = ("--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Ett|ttm|L")
    model, parallel = (*DEEP, "--mtp-num-layers", "1"), (*layout, "--attention-backend", backend)
    # Stages in the middle get no mask from Megatron, so documents cannot confine there.
    without = () if backend == "magi" else ("--reset-attention-mask",)
    case = Case(model, parallel, 3, 1, without=without, same_weights=True)
    assert_same_curve(runs.magi(case), runs.stock(case))
