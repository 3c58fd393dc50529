"""`--sequence-packing-scheduler`: packed samples train as stock Megatron trains the same samples, each padded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import LaunchError, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import LOSS_TOLERANCE, NUM_ITERATIONS, WEIGHTS, assert_same_curve
from tests.e2e.test_linear_layers import KERNELS, SIZES

SCRIPT = str(Path(__file__).with_name("samples_of_any_length.py"))
PACKED = ("--sequence-packing-scheduler", "dp_balanced", "--attention-backend", "magi")
PER_TOKEN = ("--calculate-per-token-loss", "--no-create-attention-mask-in-dataloader")
UNUSED = ("--mock-data", "--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
PIPELINE = ("--pipeline-model-parallel-size", "2")


def train(kind: str, num_ranks: int, cp_size: int, *extra: str, model: str = "gpt", before: str = "") -> RunResult:
    sizes = {"global_batch_size": 8, "train_iters": NUM_ITERATIONS, "context_parallel_size": cp_size}
    args = tiny_gpt_args("mock", *PER_TOKEN, *WEIGHTS, *extra, **sizes)
    return launch([kind, model, *(a for a in args if a not in UNUSED)], num_ranks, script=SCRIPT, before=before)


def saved(folder: Path, *model: str) -> tuple[str, ...]:
    """Arguments with which all begin with the same weights, which otherwise depend on pipelines."""
    save = ("--save", str(folder), "--save-interval", "1", "--no-save-optim", "--train-iters", "1")
    train("padded", 1, 1, *model, *save)
    return "--load", str(folder), "--finetune"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return saved(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def padded(weights: tuple[str, ...]) -> RunResult:
    """On one rank, by stock Megatron."""
    return train("padded", 1, 1, *weights)


CASES = {
    "cp2": (2, 2, ()),
    "dp2_cp2": (4, 2, ()),
    "cp2_rows_of_a_rank": (2, 2, ("--max-seqlen-per-dp-cp-rank", "40")),
    "pp2_cp2": (4, 2, PIPELINE),
    "tp2_sp": (2, 1, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_samples_train_as_stock_trains_padded_ones(
    name: str, padded: RunResult, weights: tuple[str, ...]
) -> None:
    num_ranks, cp_size, extra = CASES[name]
    got = train("packed", num_ranks, cp_size, *PACKED, *extra, *weights)
    assert_same_curve(got, padded)
    plans = [record["num_plans"] for record in got.records]
    # Eight samples of 32 tokens on average, in microbatches of 128 (80) tokens.
    assert max(plans) < 8 and len(set(plans)) > 1


def test_interleaved_stages_run_packed_samples_as_one_rank_runs_them_padded(tmp_path: Path) -> None:
    model = ("--num-layers", "4")
    weights = saved(tmp_path, *model)
    interleaved = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
    got = train("packed", 2, 1, *model, *weights, *PACKED, *interleaved)
    assert_same_curve(got, train("padded", 1, 1, *model, *weights))


def test_packed_samples_of_a_hybrid_model_with_multi_token_prediction_train_as_padded_ones() -> None:
    pattern = ("--hybrid-layer-pattern", "*-*-/*-")
    padded = train("padded", 1, 1, *pattern, model="hybrid")
    packed = train("packed", 2, 2, *pattern, *PACKED, model="hybrid")
    assert_same_curve(packed, padded)
    # Of eight microbatches of a sample each, or fewer of several, each of which counts as one: not quite the same.
    mine, stock = (float(re.findall(r"mtp_1 loss: (\S+)", run.stdout)[-1]) for run in (packed, padded))
    assert mine == pytest.approx(stock, rel=0.05)


def test_packed_samples_of_linear_layers_train_as_stock_trains_padded_ones() -> None:
    """A state that ran on from one sample into the next would change the losses."""
    model = ("--hybrid-layer-pattern", "M*G-", *SIZES)
    padded = train("padded", 1, 1, *model, model="hybrid", before=KERNELS)
    assert_same_curve(train("packed", 2, 2, *model, *PACKED, model="hybrid", before=KERNELS), padded)


def test_evaluations_pack_too() -> None:
    evaluate = ("--eval-iters", "2", "--eval-interval", "5")
    losses = []
    for run in (train("padded", 1, 1, *evaluate), train("packed", 2, 2, *PACKED, *evaluate)):
        (line,) = [line for line in run.stdout.splitlines() if "validation loss at iteration 5" in line]
        losses.append(float(line.split("lm loss value:")[1].split("|")[0]))
    assert losses[1] == pytest.approx(losses[0], rel=LOSS_TOLERANCE)


def test_a_sample_that_is_too_long_ends_all_ranks_by_name() -> None:
    with pytest.raises(LaunchError) as error:
        train("packed", 2, 2, *PACKED, "--max-seqlen-per-dp-cp-rank", "20")
    assert sorted(error.value.failed) == [0, 1]
    for output in error.value.outputs:
        assert "tokens: expected one sample of 1 to 40 tokens" in output
