"""Trainings that follow each other in one launch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks._lib import trainer
from megatron_magi.testing.megatron_launch import launch, tiny_gpt_args


def test_groups_serve_runs_of_the_same_parallelism_and_attention_alone() -> None:
    asked = [
        "--seed 1 --context-parallel-size 2", "--context-parallel-size 2 --lr 2",
        "--context-parallel-size 2 --attention-backend magi",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 4 1",
    ]  # fmt: skip
    first, same, *others = [trainer._parallelism(line.split()) for line in asked]
    assert first == same
    assert all(other not in (first, *others[:n]) for n, other in enumerate(others))


def test_a_training_takes_over_groups_and_nothing_of_the_model_before_it() -> None:
    """Megatron's attention takes memory that is made with the groups; losses of experts have a place for each layer."""
    experts = ("--num-experts", "2", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2")
    args = tiny_gpt_args("mock", *experts, "--log-interval", "1", train_iters=1, global_batch_size=1)
    run = launch(args, script=str(Path(__file__).with_name("two_trainings.py")))
    assert len(re.findall(r"^losses \d", run.stdout, re.MULTILINE)) == 2


def test_a_checkpoint_that_does_not_fit_is_an_error_that_callers_go_on_after(monkeypatch) -> None:
    """torch's is no `Exception`."""

    def main(*_: object, **__: object) -> None:
        raise CheckpointException("load", {0: (KeyError("linear_fc1 from model not in state dict"), None)})

    monkeypatch.setattr("megatron_magi.mcore.entry.main", main)
    session = trainer.TrainingSession(keeps_groups=True)
    with pytest.raises(RuntimeError, match="linear_fc1 from model not in state dict"):
        session.run([])
