"""Known silent errors of Megatron's parallelism: each is absent with `--attention-backend magi`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from megatron_magi.testing.megatron_launch import RunResult
from tests.e2e.parity import LOSS_TOLERANCE, NORM_TOLERANCE, NUM_ITERATIONS, Case, Runs, assert_same_curve
from tests.e2e.test_loss_parity import MLA, NO_GROUPS, ODD_LENGTH, SINK_TP2, SPLIT_HEADS, TENSOR

FEW_TOKENS = "tests.e2e.hooks:few_loss_tokens"
LOW_RANK_QUERIES = ("--q-lora-rank", "24", "--qk-layernorm")
MTP = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "1.0")


@pytest.mark.parametrize("mode", ["mean_of_microbatches", "per_token"])
def test_losses_of_few_tokens_weigh_the_same_on_whatever_rank_they_are(mode: str, runs: Runs) -> None:
    """Also those that multi-token prediction shifts to a rank where no token counted before."""
    model = (*MTP, "--log-interval", "1", *(["--calculate-per-token-loss"] if mode == "per_token" else []))
    case = Case(model, ("--magi-chunk-size", "4"), before=FEW_TOKENS)
    expected, got = runs.stock(case), runs.magi(case)
    assert_same_curve(got, expected)
    want = printed_mtp_losses(expected)
    assert len(want) == 2 * NUM_ITERATIONS and max(want.values()) > 0
    assert printed_mtp_losses(got) == pytest.approx(want, rel=LOSS_TOLERANCE)


def printed_mtp_losses(run: RunResult) -> dict[tuple[int, str], float]:
    """By iteration and depth, as Megatron prints them; the loss log has none."""
    return {
        (int(line[1]), depth): float(loss)
        for line in re.finditer(r"^.* iteration +(\d+)/.*$", run.stdout, re.MULTILINE)
        for depth, loss in re.findall(r"(mtp_\d+ loss): (\S+)", line[0])
    }


@pytest.mark.parametrize("mode", ["mean_of_microbatches", "per_token"])
def test_losses_with_weights_are_those_of_one_rank(mode: str, runs: Runs) -> None:
    """Their sum is cut to an integer once, not on each rank."""
    model = ("--calculate-per-token-loss",) if mode == "per_token" else ()
    case = Case(model, num_ranks=3, cp_size=3, before="tests.e2e.hooks:weighted_loss_tokens")
    assert_same_curve(runs.magi(case), runs.stock(case))


def test_evaluations_of_conversations_are_means_over_tokens_not_over_ranks(runs: Runs) -> None:
    model = ("--sft", "--attention-backend", "magi", "--eval-iters", "3", "--split", "80,20,0", "--eval-interval", "5")
    found = []
    for size in (1, 2):
        run = runs.magi(
            Case(model, num_ranks=size, cp_size=size, before="tests.e2e.hooks:few_loss_tokens_of_conversations")
        )
        (line,) = [line for line in run.stdout.splitlines() if "validation loss at iteration 5" in line]
        found.append(float(line.split("lm loss value:")[1].split()[0]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("mode", ["mean_of_microbatches", "per_token"])
def test_padding_is_no_token_to_any_loss_of_the_router(mode: str, runs: Runs) -> None:
    """Neither in losses and what is printed of them, nor in the bias, nor in layers of multi-token prediction."""
    losses = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    balancing = ("--moe-router-load-balancing-type", *losses, "--moe-aux-loss-coeff", *["1e-2"] * 3)
    bias = ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    router = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-z-loss-coeff", "1e-2", *balancing, *bias)
    per_token = ("--calculate-per-token-loss",) if mode == "per_token" else ()
    case = Case(
        (*router, *ODD_LENGTH, "--mtp-num-layers", "1", "--log-interval", "1", *per_token),
        (*TENSOR, "--expert-model-parallel-size", "2"),
        num_ranks=4,
        same_weights=True,
    )
    expected, got = runs.stock(case), runs.magi(case)
    assert_same_curve(got, expected)
    want, printed = (_printed_losses(run.stdout) for run in (expected, got))
    names = {f"{kind}load_balancing_loss" for kind in ("", "seq_", "global_")} | {"z_loss", "mtp_1 loss"}
    assert names <= want.keys() and len(want["z_loss"]) == len(expected.losses)
    for name in names:
        assert printed[name] == pytest.approx(want[name], rel=1e-5), name


def _printed_losses(text: str) -> dict[str, list[float]]:
    """All that Megatron prints of each iteration, by name."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if re.search(r"iteration +\d+/", line):
            for name, value in re.findall(r"\| (\w[\w ]*): ([-+.\dEe]+) ", line):
                found.setdefault(name, []).append(float(value))
    return found


@pytest.mark.parametrize("parallel", [TENSOR, TENSOR[:2]], ids=["sequence_parallel", "without"])
def test_norms_of_queries_and_keys_get_the_gradient_of_all_heads(parallel: tuple[str, ...], runs: Runs) -> None:
    case = Case(("--qk-layernorm",), parallel, num_ranks=4)
    assert_same_curve(runs.magi(case), runs.stock(case))


@pytest.mark.parametrize("parallel", [TENSOR, TENSOR[:2]], ids=["sequence_parallel", "without"])
@pytest.mark.parametrize("model", [(), LOW_RANK_QUERIES], ids=["queries", "low_rank_queries"])
def test_rotary_key_of_latent_attention_gets_the_gradient_of_all_heads(
    model: tuple[str, ...], parallel: tuple[str, ...], runs: Runs
) -> None:
    model = (*MLA, "--rope-type", "yarn", *model)
    case = Case(
        model, (*parallel, "--attention-backend", "magi"), cp_size=1, without=NO_GROUPS, before_stock=SPLIT_HEADS
    )
    assert_same_curve(runs.magi(case), runs.stock(case))


def test_gradient_norm_has_the_sinks_of_all_heads(runs: Runs) -> None:
    case = replace(SINK_TP2, before="tests.e2e.hooks:sinks_alone")
    expected, got = runs.stock(case), runs.magi(case)
    assert_same_curve(got, expected)
    parts = [torch.load(got.workdir / f"sink_grads{rank}.pt") for rank in range(2)]
    norms = [sum(float(grad.square().sum()) for grad in part.values()) ** 0.5 for part in parts]
    assert got.grad_norms[1] == pytest.approx((norms[0] ** 2 + norms[1] ** 2) ** 0.5, rel=NORM_TOLERANCE)
    assert min(norms) > 0.1 * max(norms), "without one of them the norm would be the same"


def test_multi_token_prediction_in_packed_documents_is_that_of_one_rank(runs: Runs) -> None:
    options = ("--dataloader-inter-document-masking", *MTP, "--attention-backend", "magi", "--magi-chunk-size", "4")
    without = ("--reset-attention-mask",)
    one = runs.magi(Case(parallel=options, num_ranks=1, cp_size=1, without=without))
    assert_same_curve(runs.magi(Case(parallel=options, num_ranks=3, cp_size=3, without=without)), one)
    # Documents by eod confine attention alike, but Megatron predicts from one document into the next.
    across = runs.stock(Case(MTP))
    assert one.losses[1] == pytest.approx(across.losses[1], rel=LOSS_TOLERANCE)
    assert one.grad_norms[1] != pytest.approx(across.grad_norms[1], rel=10 * NORM_TOLERANCE)
