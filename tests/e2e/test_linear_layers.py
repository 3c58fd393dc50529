"""Hybrid models with linear layers (Mamba, gated delta nets): the loss curve of stock Megatron on one rank.

Their kernels are for GPUs; here they are definitions in torch (`tests.mcore.linear_kernels`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import PRETRAIN_HYBRID, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import LOSS_TOLERANCE, Case, Runs, assert_same_curve
from tests.e2e.test_hybrid import EXPERTS, MAGI, ODD_LENGTH, PIPELINE, RECOMPUTE, TENSOR

TUNE_LESS = "tests.e2e.hooks:tune_less"
KERNELS = "tests.e2e.hooks:linear_kernels"
SIZES = (
    *("--mamba-head-dim", "16", "--mamba-num-groups", "2", "--mamba-state-dim", "8"),
    *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
    *("--linear-key-head-dim", "8", "--linear-value-head-dim", "16"),
)
# Stock confines attention alone to documents that end at a token.
DOCUMENTS = ("--reset-attention-mask",)
WHOLE = {"without": DOCUMENTS}
CP1 = {"num_ranks": 1, "cp_size": 1}
CP4 = {"num_ranks": 4, "cp_size": 4}
BOUNDS = ("--dataloader-inter-document-masking",)
TWO_SEQUENCES = ("--micro-batch-size", "2")


def hybrid(pattern: str, model: tuple[str, ...] = (), *args: object, **kwargs: object) -> Case:
    model = ("--hybrid-layer-pattern", pattern, *SIZES, *model)
    return Case(model, *args, script=PRETRAIN_HYBRID, before=KERNELS, same_weights=True, **kwargs)


def layout(name: str) -> tuple[str, ...]:
    return ("--magi-layout", name)


CASES = {
    "cp1": hybrid("M*G-", (), MAGI, **CP1, **WHOLE),
    "cp2": hybrid("M*G-", **WHOLE),
    "mamba_cp2": hybrid("M*M-", **WHOLE),
    "cp2_zigzag": hybrid("M*G-", (), layout("zigzag"), **WHOLE),
    "cp2_contiguous": hybrid("M*G-", (), layout("contiguous"), **WHOLE),
    "cp4_length_that_does_not_divide": hybrid("M*G-", ODD_LENGTH, **CP4, **WHOLE),
    "cp2_two_sequences": hybrid("M*G-", (*TWO_SEQUENCES, *ODD_LENGTH), **WHOLE),
    "tp2_sp_two_sequences_that_are_padded": hybrid(
        "M*G-", (*TWO_SEQUENCES, *ODD_LENGTH), (*MAGI, *TENSOR), num_ranks=2, cp_size=1, **WHOLE
    ),
    "cp2_experts": hybrid("ME*EGE", EXPERTS, **WHOLE),
    "cp2_full_recompute": hybrid("M*G-", (), RECOMPUTE, **WHOLE),
    "tp2_sp_cp2_two_sequences": hybrid("M*G-", TWO_SEQUENCES, TENSOR, 4, **WHOLE),
    "pp2_cp2": hybrid("M*G-", (), (*PIPELINE, "--hybrid-layer-pattern", "M*|G-"), 4, **WHOLE),
    "multi_token_prediction": hybrid("M*G-/M-", **WHOLE),
    "gpt_cp2": Case(
        ("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "[1,0]", *SIZES[6:]),
        before="tests.e2e.hooks:local_gated_delta_nets",
        same_weights=True,
        **WHOLE,
    ),
    # Stock attention on CPUs takes no documents of the data loader.
    "cp2_documents": hybrid("M-G-", BOUNDS, **WHOLE),
}


def test_documents_that_end_at_a_token_are_those_of_one_rank(runs: Runs) -> None:
    """Stock Megatron would carry the states of linear layers over them."""
    case = hybrid("ME*GE", (*EXPERTS, *ODD_LENGTH))
    one_rank = hybrid("ME*GE", (*EXPERTS, *ODD_LENGTH), MAGI, **CP1)
    assert_same_curve(runs.magi(case), runs.magi(one_rank))


@pytest.mark.parametrize(("saved_at", "resumed_at"), [(2, 1), (1, 2)], ids=["cp2_to_stock", "stock_to_cp2"])
def test_training_resumes_under_another_parallelism(saved_at: int, resumed_at: int, runs: Runs, tmp_path: Path) -> None:
    def train(cp_size: int, *extra: str) -> RunResult:
        model = ("--hybrid-layer-pattern", "M*G-", *SIZES, *extra)
        args = tiny_gpt_args(runs.corpus, *model, train_iters=6, context_parallel_size=cp_size)
        args = [a for a in args if a not in DOCUMENTS]
        return launch(args, cp_size, script=PRETRAIN_HYBRID, before=KERNELS)

    whole = train(1)
    first = train(saved_at, "--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3")
    second = train(resumed_at, "--load", str(tmp_path))
    assert list(second.losses) == [4, 5, 6]
    for iteration, loss in (first.losses | second.losses).items():
        assert abs(loss - whole.losses[iteration]) <= LOSS_TOLERANCE * loss, iteration


GPU_SIZES = (
    *("--hidden-size", "256", "--mamba-head-dim", "64", "--mamba-num-groups", "2", "--mamba-state-dim", "64"),
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "4"),
    *("--linear-key-head-dim", "64", "--linear-value-head-dim", "64", "--bf16"),
)
KERNEL_PACKAGES = ("mamba_ssm", "causal_conv1d", "fla")


@pytest.mark.gpu
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in KERNEL_PACKAGES),
    reason="needs mamba-ssm, causal-conv1d, fla-core",
)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
def test_losses_in_bf16_equal_stock_with_kernels(num_ranks: int) -> None:
    def train(cp_size: int, *extra: str) -> RunResult:
        model = ("--hybrid-layer-pattern", "M*G-", *GPU_SIZES, *extra)
        args = [a for a in tiny_gpt_args("mock", *model, context_parallel_size=cp_size) if a not in DOCUMENTS]
        return launch(args, cp_size, script=PRETRAIN_HYBRID, before=TUNE_LESS)

    stock, found = train(1), train(num_ranks, *MAGI)
    for iteration, loss in stock.losses.items():
        print(iteration, loss, found.losses[iteration])
        assert abs(found.losses[iteration] - loss) < 1e-2


@pytest.mark.parametrize("name", CASES)
def test_loss_curve_equals_stock_on_one_rank(name: str, runs: Runs) -> None:
    case = CASES[name]
    assert_same_curve(runs.magi(case), runs.stock(case))
