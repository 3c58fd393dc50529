"""A hybrid of Mamba, gated delta nets, attention and experts over packed documents: as stock on each document alone.

On CPUs the kernels of the linear layers are definitions in torch (`tests.mcore.linear_kernels`).
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from megatron_magi.testing.spawn import run_ranks
from tests.mcore.linear_models import (
    DOCUMENTS,
    LARGE,
    Step,
    bounds_of,
    build,
    changed,
    joined,
    microbatch,
    start,
    step,
    step_alone,
)

LAYOUTS = (None, "zigzag", "contiguous")
SETTINGS = [(layout, batch_size) for batch_size in DOCUMENTS for layout in LAYOUTS]


def packed(rank: int, num_ranks: int) -> list[Step]:
    start()
    model = build("magi")
    steps = [step(model, microbatch(batch_size), layout) for layout, batch_size in SETTINGS]
    # As in a script of the user's, whose planner does not know the model.
    return [*steps, step(model, microbatch(2), None, foreseen=False)]


def alone(rank: int, num_ranks: int) -> list[Step]:
    start()
    model = build("stock")
    return [step_alone(model, microbatch(batch_size)) for batch_size in DOCUMENTS]


@pytest.fixture(scope="module")
def expected() -> dict[int, Step]:
    (steps,) = run_ranks(alone, 1)
    return dict(zip(DOCUMENTS, steps, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_packed_documents_are_those_of_stock_alone(num_ranks: int, expected: dict[int, Step]) -> None:
    found = run_ranks(packed, num_ranks)[0]
    for (_, batch_size), got in zip([*SETTINGS, (None, 2)], found, strict=True):
        want = expected[batch_size]
        torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-5)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            assert (got.gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def probe(rank: int, num_ranks: int, layout: str | None, batch_size: int) -> tuple[np.ndarray, float]:
    """Change of each document's losses by other tokens in each, and of the second by the first without documents."""
    start()
    return _probed(build("magi", "MG*"), microbatch(batch_size), layout)


def _probed(model: torch.nn.Module, fields: dict, layout: str | None) -> tuple[np.ndarray, float]:
    bounds, before = bounds_of(fields), step(model, fields, layout).losses
    changes = np.zeros((len(bounds), len(bounds)))
    for i, document in enumerate(bounds):
        change = (step(model, changed(fields, *document), layout).losses - before).abs()
        changes[i] = [change[begin:end].max() for begin, end in bounds]
    whole, (begin, end) = joined(fields), bounds[1]
    spilt = step(model, changed(whole, *bounds[0]), layout).losses - step(model, whole, layout).losses
    return changes, spilt[begin:end].abs().max().item()


@pytest.mark.parametrize(("layout", "batch_size"), [(None, 1), ("zigzag", 2)])
def test_a_token_of_another_document_changes_nothing(layout: str | None, batch_size: int) -> None:
    for changes, spilt in run_ranks(probe, 2, layout, batch_size):
        assert (np.diag(changes) > 0.1).all()
        assert not changes[~np.eye(len(changes), dtype=bool)].any()
        assert spilt > 0.01


def has_kernels() -> bool:
    return all(importlib.util.find_spec(name) for name in ("mamba_ssm", "causal_conv1d", "fla"))


needs_kernels = pytest.mark.skipif(not has_kernels(), reason="needs mamba-ssm, causal-conv1d and fla-core")


def steps_on_gpu(rank: int, num_ranks: int, pattern: str) -> tuple[Step, Step, Step]:
    """Of packed documents, of the same without bounds, and of stock on each document."""
    start(on_cpu=False)
    model, fields = build("magi", pattern, **LARGE), microbatch(2, 4)
    packed, without = (step(model, x, None) for x in (fields, joined(fields)))
    return packed, without, step_alone(build("stock", pattern, **LARGE), fields)


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("pattern", ["M-", "G-"])
def test_packed_documents_are_those_of_stock_alone_with_kernels(pattern: str) -> None:
    ((got, without, want),) = run_ranks(steps_on_gpu, 1, pattern, backend="nccl", timeout_s=300.0)
    error, carried = ((x.losses - want.losses).abs().mean().item() for x in (got, without))
    print(f"mean error of a loss: {error:.2e}, with states carried over documents {carried:.2e}")
    for name, gradient in want.gradients.items():
        relative = ((got.gradients[name] - gradient).norm() / gradient.norm()).item()
        print(f"{name}: relative error of the gradient {relative:.1e}")
        assert relative < 0.05, name
    assert error < 0.02
    assert carried > 10 * error


def probe_on_gpu(rank: int, num_ranks: int, pattern: str) -> tuple[np.ndarray, float]:
    start(on_cpu=False)
    return _probed(build("magi", pattern, **LARGE), microbatch(1, 4), None)


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("pattern", ["M-", "G-"])
def test_a_token_of_another_document_changes_nothing_with_kernels(pattern: str) -> None:
    """Mamba's sums in a block of tokens run over bounds of documents and are subtracted, which leaves rounding."""
    ((changes, spilt),) = run_ranks(probe_on_gpu, 1, pattern, backend="nccl", timeout_s=300.0)
    others = changes[~np.eye(len(changes), dtype=bool)].max()
    print(f"largest change by another document {others:.1e}, without documents {spilt:.1e}")
    print(f"smallest change by its own tokens {np.diag(changes).min():.1e}")
    assert others <= (2e-3 if "M" in pattern else 0)
    assert spilt > 10 * others
