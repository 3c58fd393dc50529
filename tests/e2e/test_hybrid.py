"""Hybrid models of attention, MLPs and experts: the loss curve of stock Megatron on one rank."""

from __future__ import annotations

import pytest

from megatron_magi.testing.megatron_launch import PRETRAIN_HYBRID
from tests.e2e.parity import Case, Runs, assert_same_curve

TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
ODD_LENGTH = ("--seq-length", "125", "--max-position-embeddings", "125")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2")
WINDOW = ("--window-size", "16,0", "--window-attn-skip-freq", "3")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
INTERLEAVED = (*PIPELINE, "--hybrid-layer-pattern", "*-|*-|*-|*-")
DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")

LATENT = (
    "--multi-latent-attention",
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", "--kv-lora-rank", "16"),
)


def hybrid(pattern: str, model: tuple[str, ...] = (), *args: object, **kwargs: object) -> Case:
    return Case(("--hybrid-layer-pattern", pattern, *model), *args, script=PRETRAIN_HYBRID, **kwargs)


MAGI = ("--attention-backend", "magi")
CASES = {
    "cp1": hybrid("*-*-", (), MAGI, num_ranks=1, cp_size=1),
    "cp2": hybrid("*-*-"),
    "cp4": hybrid("*-*-", (), (), 4, 4),
    "cp2_length_that_does_not_divide": hybrid("*-*-", ODD_LENGTH),
    "cp2_full_recompute": hybrid("*-*-", (), RECOMPUTE),
    "cp2_per_token_loss": hybrid("*-*-", ("--calculate-per-token-loss",)),
    "cp1_experts": hybrid("*E*E", EXPERTS, MAGI, num_ranks=1, cp_size=1, same_weights=True),
    "cp2_experts": hybrid("*E*E", EXPERTS, same_weights=True),
    "cp4_experts": hybrid("*E*E", EXPERTS, (), 4, 4, same_weights=True),
    "cp2_experts_length_that_does_not_divide": hybrid("*E*E", (*ODD_LENGTH, *EXPERTS), same_weights=True),
    "tp2_sp_cp2": hybrid("*-*-", (), TENSOR, 4, same_weights=True),
    "tp2_sp_cp2_experts_length_that_does_not_divide": hybrid(
        "*E*E", (*ODD_LENGTH, *EXPERTS), TENSOR, 4, same_weights=True
    ),
    "pp2_cp2": hybrid("*-*-", (), (*PIPELINE, "--hybrid-layer-pattern", "*-|*-"), 4, same_weights=True),
    "interleaved_pp2_cp2_full_recompute": hybrid("*-*-*-*-", (), (*INTERLEAVED, *RECOMPUTE), 4, same_weights=True),
    "interleaved_pp2_cp2_multi_token_prediction": hybrid(
        "*-*-*-*-/*-", (), (*INTERLEAVED[:-1], "*-|*-|*-|*-/*-"), 4, same_weights=True
    ),
    "dp2_cp2_distributed_optimizer_overlapped": hybrid("*-*-", (), DISTRIBUTED_OPTIMIZER, 4),
    "cp2_two_sequences_a_microbatch": hybrid("*-*-", ("--micro-batch-size", "2")),
    "cp2_selective_recompute": hybrid("*-*-", (), (*SELECTIVE, "core_attn", "mlp")),
    "ep2_cp2_experts_selective_recompute": hybrid(
        "*E*E", EXPERTS, ("--expert-model-parallel-size", "2", *SELECTIVE, "core_attn", "moe"), 2, same_weights=True
    ),
    "multi_token_prediction": hybrid("*-*-/*-"),
    "packed_params_made_anew": hybrid("*-*-/*-", before="tests.e2e.hooks:packed_params_made_anew"),
    "multi_token_prediction_full_recompute": hybrid("*-*-/*-", (), RECOMPUTE),
    "multi_token_prediction_per_token_loss": hybrid("*-*-/*-", ("--calculate-per-token-loss",)),
    "windows": hybrid("*-*-", WINDOW, without=("--reset-attention-mask",)),
    "sink": hybrid("*-*-", ("--softmax-type", "off-by-one")),
    "learnable_sinks": hybrid(
        "*-*-", ("--softmax-type", "learnable"), before="tests.e2e.hooks:large_sinks", same_weights=True
    ),
    "latent_attention": hybrid(
        "+-+-",
        (*LATENT, "--rope-type", "rope"),
        without=("--group-query-attention",),
        before_stock="tests.e2e.hooks:split_head_dims",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_curve_equals_stock_on_one_rank(name: str, runs: Runs) -> None:
    case = CASES[name]
    assert_same_curve(runs.magi(case), runs.stock(case))


def test_hybrid_of_attention_and_mlps_trains_as_a_gpt(runs: Runs) -> None:
    # Layers are made in the same order, so both start from the same weights.
    assert_same_curve(runs.magi(CASES["cp2"]), runs.stock(Case()))
