"""A training script of a user's own takes `--attention-backend magi` after one call."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import LaunchError, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import NUM_ITERATIONS, Runs, assert_same_curve

SCRIPT = str(Path(__file__).parents[1] / "mcore" / "user_pretrain_gpt.py")
MAGI = ("--attention-backend", "magi", "--context-parallel-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
ODD_LENGTH = ("--seq-length", "125", "--max-position-embeddings", "125")


@pytest.fixture(scope="module")
def one_rank(runs: Runs) -> RunResult:
    """The script with Megatron's own attention."""
    return train(runs, 1)


def train(runs: Runs, num_ranks: int, *args: str) -> RunResult:
    return launch(tiny_gpt_args(runs.corpus, *args, train_iters=NUM_ITERATIONS), num_ranks, script=SCRIPT)


@pytest.mark.parametrize(
    ("num_ranks", "args"), [(2, MAGI), (4, (*MAGI, *TENSOR))], ids=["cp2", "tp2_sp_cp2"]
)  # fmt: skip
def test_own_loss_of_a_script_equals_that_of_one_rank(
    num_ranks: int, args: tuple[str, ...], one_rank: RunResult, runs: Runs
) -> None:
    got = train(runs, num_ranks, *args)
    assert_same_curve(got, one_rank)
    assert got.records[0]["num_plans"] == 4


def test_hybrid_model_of_a_script_equals_that_of_one_rank(runs: Runs) -> None:
    model = ("--hybrid-layer-pattern", "*-*-/*-")
    assert_same_curve(train(runs, 2, *model, *MAGI), train(runs, 1, *model))


@pytest.mark.parametrize("mode", ["mean_of_microbatches", "per_token"])
def test_multi_token_prediction_counts_the_tokens_of_the_mask_that_the_script_gives(mode: str, runs: Runs) -> None:
    model = ("--mtp-num-layers", "2", *(["--calculate-per-token-loss"] if mode == "per_token" else []))
    expected = train(runs, 1, *model)
    for num_ranks in (1, 2):
        magi = ("--attention-backend", "magi", "--context-parallel-size", str(num_ranks))
        assert_same_curve(train(runs, num_ranks, *model, *magi), expected)


def test_pipeline_and_padding_are_the_same_as_through_the_entry_point(runs: Runs, tmp_path: Path) -> None:
    model = (*ODD_LENGTH, "--num-layers", "4", "--calculate-per-token-loss")
    save = ("--save", str(tmp_path), "--save-interval", "1", "--no-save-optim", "--train-iters", "1")
    train(runs, 1, *model, *save)
    start = (*model, "--load", str(tmp_path), "--finetune")
    assert_same_curve(train(runs, 4, *start, *MAGI, *PIPELINE), train(runs, 1, *start))


def test_script_without_the_option_trains_as_megatron_does(one_rank: RunResult, runs: Runs) -> None:
    assert_same_curve(train(runs, 2, *TENSOR), one_rank)
    assert "num_plans" not in one_rank.records[0]


def test_model_that_does_not_attend_by_plan_is_refused(runs: Runs) -> None:
    args = tiny_gpt_args(runs.corpus, *MAGI[:2])
    with pytest.raises(LaunchError, match="ValueError: model: does not attend by plan"):
        launch(args, 1, script=SCRIPT, before="tests.e2e.hooks:plain_models")


def test_loss_that_is_a_mean_over_a_rank_is_refused(runs: Runs) -> None:
    args = tiny_gpt_args(runs.corpus, *MAGI)
    with pytest.raises(LaunchError, match="ValueError: forward_step: its loss function must return"):
        launch(args, 2, script=SCRIPT, before="tests.e2e.hooks:loss_of_two")
