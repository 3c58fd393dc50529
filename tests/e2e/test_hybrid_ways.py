"""Hybrid models: ways in which batches come, masks by layer, and checkpoints, those of GPTs among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import PRETRAIN_HYBRID, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import LOSS_TOLERANCE, NUM_ITERATIONS, WEIGHTS, Case, Runs, assert_same_curve
from tests.e2e.test_hybrid import EXPERTS, MAGI, hybrid
from tests.e2e.test_loader import WORKERS, _planned

VIDEO = ("--magi-mask", "block_causal:block_size=16")
LAYERS = "--magi-layer-masks"
NUM_BEFORE, NUM_ALL = 3, 6
SINK = ("--softmax-type", "learnable")


def test_masks_of_layers_count_all_letters_and_train_as_those_of_a_gpt(runs: Runs) -> None:
    # The second layer with attention has a window: of a GPT it is the second, of *-*- the third.
    gpt = (*VIDEO, LAYERS, "tests.e2e.masks:windows_on_even_layers")
    mixed = (*VIDEO, LAYERS, "tests.e2e.masks:window_on_the_third_layer")
    of_gpt = runs.magi(Case(gpt, MAGI, num_ranks=1, cp_size=1))
    assert_same_curve(runs.magi(hybrid("*-*-", mixed, MAGI, num_ranks=1, cp_size=1)), of_gpt)
    assert_same_curve(runs.magi(hybrid("*-*-", mixed)), of_gpt)
    assert of_gpt.losses[1] != runs.magi(hybrid("*-*-", VIDEO)).losses[1]


def test_documents_from_the_data_loader_equal_documents_from_eod(runs: Runs) -> None:
    parallel = ("--dataloader-inter-document-masking",)
    got = runs.magi(hybrid("*-*-", (), parallel, without=("--reset-attention-mask",)))
    assert_same_curve(got, runs.stock(hybrid("*-*-")))


def test_batches_of_workers_train_bit_by_bit_as_those_planned_in_the_step(runs: Runs) -> None:
    window = ("--window-size", "20,0", "--window-attn-skip-freq", "3")
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    found = []
    for workers in ((), WORKERS):
        case = hybrid("*-*-/*-", (*window, *recompute), workers, before="tests.e2e.hooks:count_planning")
        found.append(runs.magi(case))
    due, ahead = found
    assert ahead.records == due.records
    for rank in range(2):
        planned = [counts["split_stages"] for counts in _planned(due, rank)]
        assert len(planned) == NUM_ITERATIONS and all(planned) and max(planned) == 8  # four microbatches, two masks
        first, *others = _planned(ahead, rank)
        first.pop("blake2b", None)  # names of the calls that ranks compare when they come for the first time
        assert not any(sum(counts.values()) for counts in (first, *others))


def _train(runs: Runs, script: str | None, cp_size: int, *extra: str) -> RunResult:
    args = tiny_gpt_args(runs.corpus, *WEIGHTS, *extra, train_iters=NUM_ALL, context_parallel_size=cp_size)
    return launch(args, cp_size, **({"script": script} if script else {}))


def _saved(folder: Path) -> tuple[str, ...]:
    return "--save", str(folder), "--save-interval", str(NUM_BEFORE), "--exit-interval", str(NUM_BEFORE)


def _assert_goes_on(first: RunResult, second: RunResult, whole: RunResult) -> None:
    assert list(first.losses) == list(range(1, NUM_BEFORE + 1))
    assert list(second.losses) == list(range(NUM_BEFORE + 1, NUM_ALL + 1))
    for iteration, loss in (first.losses | second.losses).items():
        assert abs(loss - whole.losses[iteration]) <= LOSS_TOLERANCE * loss, iteration


@pytest.mark.parametrize(("saved_at", "resumed_at"), [(2, 1), (1, 2)], ids=["cp2_to_stock", "stock_to_cp2"])
def test_training_resumes_under_another_parallelism(saved_at: int, resumed_at: int, runs: Runs, tmp_path: Path) -> None:
    model = ("--hybrid-layer-pattern", "*-*-", *SINK)
    whole = _train(runs, PRETRAIN_HYBRID, 1, *model)
    first = _train(runs, PRETRAIN_HYBRID, saved_at, *model, *_saved(tmp_path))
    second = _train(runs, PRETRAIN_HYBRID, resumed_at, *model, "--load", str(tmp_path))
    _assert_goes_on(first, second, whole)


@pytest.mark.parametrize(("pattern", "model"), [("*-*-", SINK), ("*E*E", (*SINK, *EXPERTS))], ids=["dense", "experts"])
def test_checkpoint_of_a_gpt_goes_on_as_a_hybrid_model(
    pattern: str, model: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    """Megatron translates it while it loads, the optimizer's state too; losses are those of the GPT that goes on."""
    optimizer = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
    whole = _train(runs, None, 1, *model)
    first = _train(runs, None, 2, *model, *optimizer, *_saved(tmp_path))
    second = _train(
        runs, PRETRAIN_HYBRID, 2, "--hybrid-layer-pattern", pattern, *model, *optimizer, "--load", str(tmp_path)
    )
    _assert_goes_on(first, second, whole)
