"""Parameters, gradients or the optimizer's state that lie elsewhere: losses are those without that. On GPUs only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_magi.testing.megatron_launch import RunResult, launch, tiny_gpt_args

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2)]

MODEL = ("--bf16", "--hidden-size", "256", "--ffn-hidden-size", "512", "--softmax-type", "learnable")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
MEGATRON_FSDP = ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--use-distributed-optimizer")
WAYS = {
    "torch_fsdp2": ("--use-torch-fsdp2", *RECOMPUTE),
    "megatron_fsdp": MEGATRON_FSDP,
    "optimizer_on_the_cpu": (
        *("--optimizer-cpu-offload", "--use-distributed-optimizer", "--use-precision-aware-optimizer"),
    ),
}
LOSS_TOLERANCE, NORM_TOLERANCE = 3e-4, 1e-3
"""Of bf16, in which sums are formed in another order."""


def _train(extra: tuple[str, ...]) -> RunResult:
    args = tiny_gpt_args("mock", *MODEL, *extra, seq_length=512, train_iters=4, context_parallel_size=2)
    # FSDP refuses the one connection that Megatron otherwise wants.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"} if any("fsdp" in a for a in extra) else {}
    return launch(args, 2, env=env)


@pytest.fixture(scope="module")
def trained() -> dict[str, RunResult]:
    """All at once, as most of a launch is the start of its processes."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(["plain", *WAYS], pool.map(_train, [(), *WAYS.values()]), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_losses_do_not_depend_on_where_parameters_are_kept(way: str, trained: dict[str, RunResult]) -> None:
    plain, got = trained["plain"], trained[way]
    assert list(got.losses) == list(plain.losses) == [1, 2, 3, 4]
    for iteration, loss in plain.losses.items():
        assert got.losses[iteration] == pytest.approx(loss, rel=LOSS_TOLERANCE)
        assert got.grad_norms[iteration] == pytest.approx(plain.grad_norms[iteration], rel=NORM_TOLERANCE)
