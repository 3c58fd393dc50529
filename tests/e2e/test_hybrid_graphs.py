"""Hybrid models with `--cuda-graph-impl full_iteration`."""

from __future__ import annotations

import pytest

from megatron_magi.testing.megatron_launch import PRETRAIN_HYBRID, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import NUM_ITERATIONS, Runs

GRAPH = ("--cuda-graph-impl", "full_iteration", "--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad")


def _train(runs: Runs, pattern: str, cp_size: int, *extra: str) -> RunResult:
    model = ("--hybrid-layer-pattern", pattern, "--attention-backend", "magi", "--bf16", "--logging-level", "20")
    window = ("--window-size", "16,0", "--window-attn-skip-freq", "3")
    args = tiny_gpt_args(
        runs.corpus, *model, *window, *extra, train_iters=NUM_ITERATIONS, context_parallel_size=cp_size
    )
    return launch(args, cp_size, env={"MAGI_ATTENTION_DETERMINISTIC_MODE": "1"}, script=PRETRAIN_HYBRID)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(("cp_size", "tolerance"), [(1, 1e-3), pytest.param(2, 1e-2, marks=pytest.mark.ranks(2))])
def test_captured_iterations_train_as_eager_ones(cp_size: int, tolerance: float, runs: Runs) -> None:
    """On several ranks a graph computes in other stages, which rounds otherwise."""
    eager, graph = _train(runs, "*-*-", cp_size), _train(runs, "*-*-", cp_size, *GRAPH)
    assert "captured a training" in graph.outputs[0]
    assert graph.losses == pytest.approx(eager.losses, rel=tolerance)
