"""Checkpoints are stock Megatron's: written under one parallelism, read under another."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import RunResult, launch, tiny_gpt_args
from tests.e2e.parity import LOSS_TOLERANCE, Runs

NUM_BEFORE, NUM_ALL = 3, 6
SINK = ("--softmax-type", "learnable")


def _train(runs: Runs, cp_size: int, *extra: str) -> RunResult:
    # The length of the schedule is that of the whole training, or Megatron would not resume it.
    args = tiny_gpt_args(runs.corpus, *SINK, *extra, train_iters=NUM_ALL, context_parallel_size=cp_size)
    return launch(args, cp_size)


@pytest.mark.parametrize(("saved_at", "resumed_at"), [(2, 1), (1, 2)], ids=["cp2_to_stock", "stock_to_cp2"])
def test_training_resumes_under_another_parallelism(saved_at: int, resumed_at: int, runs: Runs, tmp_path: Path) -> None:
    whole = _train(runs, 1)
    save = ["--save", str(tmp_path), "--save-interval", str(NUM_BEFORE), "--exit-interval", str(NUM_BEFORE)]
    first = _train(runs, saved_at, *save)
    second = _train(runs, resumed_at, "--load", str(tmp_path))
    assert list(first.losses) == list(range(1, NUM_BEFORE + 1))
    assert list(second.losses) == list(range(NUM_BEFORE + 1, NUM_ALL + 1))
    for iteration, loss in (first.losses | second.losses).items():
        assert abs(loss - whole.losses[iteration]) <= LOSS_TOLERANCE * loss, iteration


def test_checkpoint_has_the_length_of_the_data_not_of_the_padding(runs: Runs, tmp_path: Path) -> None:
    lengths = ["--seq-length", "--max-position-embeddings"]
    args = tiny_gpt_args(runs.corpus, seq_length=125, train_iters=NUM_ALL)
    of_checkpoint = [a for name, a in zip(["", *args], args, strict=False) if not {name, a} & set(lengths)]
    magi = ["--context-parallel-size", "2", "--attention-backend", "magi"]
    whole = launch(args)
    save = ["--save", str(tmp_path), "--save-interval", str(NUM_BEFORE), "--exit-interval", str(NUM_BEFORE)]
    launch([*args, *magi, *save], 2)
    load = [*of_checkpoint, "--load", str(tmp_path), "--use-checkpoint-args"]
    for resumed in (launch(load), launch([*load, *magi], 2)):
        assert list(resumed.losses) == list(range(NUM_BEFORE + 1, NUM_ALL + 1))
        for iteration, loss in resumed.losses.items():
            assert abs(loss - whole.losses[iteration]) <= LOSS_TOLERANCE * loss, iteration
