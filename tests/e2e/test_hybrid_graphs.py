"""Hybrid models with `--cuda-graph-impl full_iteration`."""

from __future__ import annotations

import pytest

from megatron_magi.testing.megatron_launch import PRETRAIN_HYBRID, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import NUM_ITERATIONS, Runs

GRAPH = ("--cuda-graph-impl", "full_iteration", "--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad")


def _train(runs: Runs, pattern: str, *extra: str) -> RunResult:
    model = ("--hybrid-layer-pattern", pattern, "--attention-backend", "magi", "--bf16", "--logging-level", "20")
    window = ("--window-size", "16,0", "--window-attn-skip-freq", "3")
    args = tiny_gpt_args(runs.corpus, *model, *window, *extra, train_iters=NUM_ITERATIONS)
    return launch(args, env={"MAGI_ATTENTION_DETERMINISTIC_MODE": "1"}, script=PRETRAIN_HYBRID)


@pytest.mark.gpu
@pytest.mark.sm90
def test_captured_iterations_train_as_eager_ones(runs: Runs) -> None:
    eager, graph = _train(runs, "*-*-"), _train(runs, "*-*-", *GRAPH)
    assert "captured a training" in graph.outputs[0]
    assert graph.losses == pytest.approx(eager.losses, rel=1e-3)
