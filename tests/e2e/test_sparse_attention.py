"""DeepSeek's sparse attention (DSA) with the loss of its indexer: the loss curve of stock Megatron on one rank."""

from __future__ import annotations

import pytest

from megatron_magi.testing.megatron_launch import PRETRAIN_HYBRID
from tests.e2e.parity import DIFFERENCES, LOSS_TOLERANCE, NORM_TOLERANCE, Case, Runs
from tests.e2e.test_hybrid import LATENT, MAGI, RECOMPUTE, TENSOR

ITERATIONS = 3
"""Few, as in the long run rounding changes which of two keys with almost the same score is chosen."""
SPARSE = (
    *LATENT,
    *("--rope-type", "rope", "--q-lora-rank", "16", "--qk-layernorm", "--dsa-indexer-n-heads", "8"),
    *("--dsa-indexer-head-dim", "16", "--dsa-indexer-topk", "96", "--dsa-indexer-loss-coeff", "1.0"),
    *("--train-iters", str(ITERATIONS), "--global-batch-size", "2"),
    "--no-dsa-indexer-rotate-activation",  # needs a package with kernels for GPUs
)
# Stock sparse attention knows no documents that end at a token.
WITHOUT = ("--group-query-attention", "--reset-attention-mask")


def hybrid(*args: object) -> Case:
    model = ("--hybrid-layer-pattern", "D-D-", *SPARSE)
    return Case(model, *args, script=PRETRAIN_HYBRID, without=WITHOUT, same_weights=True)


CASES = {
    "cp1": hybrid(MAGI, 1, 1),
    "cp2_full_recompute": hybrid(RECOMPUTE),
    "tp2_sp_cp2": hybrid(TENSOR, 4),
    "gpt_cp2": Case(
        (*SPARSE, "--experimental-attention-variant", "dsa", "--dsa-indexer-topk-freq", "2"),
        without=WITHOUT,
        before="tests.e2e.hooks:local_sparse_layers",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_curve_equals_stock_on_one_rank(name: str, runs: Runs) -> None:
    case = CASES[name]
    found, expected = runs.magi(case), runs.stock(case)
    assert len(expected.losses) == ITERATIONS
    assert found.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=NORM_TOLERANCE)
    for name in ("losses", "grad_norms"):
        got, want = getattr(found, name), getattr(expected, name)
        DIFFERENCES[name] = max(abs(got[i] - want[i]) / want[i] for i in want)
