"""Gradients of latent attention in Transformer Engine's layers under tensor parallelism. On two GPUs only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import RunResult, launch, tiny_gpt_args
from tests.e2e.parity import NORM_TOLERANCE
from tests.e2e.test_loss_parity import NO_GROUPS, TENSOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(2),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]

HEADS = ("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "16", "--v-head-dim", "16", "--kv-lora-rank", "16")
MODEL = ("--multi-latent-attention", *HEADS, "--q-lora-rank", "32", "--qk-layernorm", "--rope-type", "rope")
TE = ("--transformer-impl", "transformer_engine", "--attention-backend", "magi", "--init-method-std", "0.15")


def _train(num_ranks: int, *extra: str) -> RunResult:
    args = tiny_gpt_args("mock", *MODEL, *TE, *extra, train_iters=2)
    # Transformer Engine multiplies fp32 matrices in TF32.
    return launch([a for a in args if a not in NO_GROUPS], num_ranks, env={"NVIDIA_TF32_OVERRIDE": "0"})


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments that start from weights of one rank: on GPUs they are drawn differently for each parallelism."""
    folder: Path = tmp_path_factory.mktemp("weights")
    _train(1, "--save", str(folder), "--save-interval", "1", "--no-save-optim", "--train-iters", "1")
    return "--load", str(folder), "--finetune"


@pytest.mark.parametrize("parallel", [TENSOR, TENSOR[:2]], ids=["sequence_parallel", "without"])
def test_gradients_of_all_heads_are_added_up(parallel: tuple[str, ...], weights: tuple[str, ...]) -> None:
    expected, got = _train(1, *weights), _train(2, *parallel, *weights)
    for iteration, norm in expected.grad_norms.items():
        assert got.losses[iteration] == pytest.approx(expected.losses[iteration], rel=1e-5)
        assert got.grad_norms[iteration] == pytest.approx(norm, rel=NORM_TOLERANCE)
