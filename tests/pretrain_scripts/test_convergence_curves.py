"""Loss curves against the band of two seeds, on curves that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pretrain_scripts.convergence import curves

ITERATIONS = 60


def _write(folder: Path, name: str, losses: np.ndarray) -> None:
    lines = [json.dumps({"iteration": n, "lm loss": float(loss)}) for n, loss in enumerate(losses, start=1)]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two seeds that differ by 0.05, and a run that differs by rounding alone."""
    stock = 4 * np.exp(-np.arange(ITERATIONS) / 30) + 1
    noise = np.random.default_rng(0).normal(size=(2, ITERATIONS)) * 0.3
    _write(tmp_path, "stock", stock + noise[0])
    _write(tmp_path, "stock_other_seed", stock + 0.05 + noise[1])
    _write(tmp_path, "magi_cp2", stock + noise[0] + 1e-3)
    return tmp_path


def test_run_within_the_band_passes_and_is_plotted(folder: Path) -> None:
    assert curves.report(folder, "title") == 0
    assert (folder / "loss_curves.png").stat().st_size > 10_000
    assert len((folder / "losses.csv").read_text().splitlines()) == 1 + ITERATIONS


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_run_that_drifts_from_stock_fails_by_name(folder: Path, error: float) -> None:
    stock = curves.read_losses(folder / "stock.jsonl")
    _write(folder, "magi_cp4", stock + error * (np.arange(ITERATIONS) >= 40))
    found = curves.read(folder)
    assert [sentence.split()[0] for sentence in found.failures] == ["magi_cp4"]
    assert curves.report(folder, "title") == 1


def test_one_unlucky_batch_is_no_drift(folder: Path) -> None:
    found = curves.read(folder)
    assert found.window > 1
    losses = found.curves["magi_cp2"].copy()
    losses[30] += 2 * found.band[0]
    _write(folder, "magi_cp2", losses)
    assert curves.read(folder).failures == []


def test_iteration_that_was_trained_twice_counts_once(folder: Path) -> None:
    path = folder / "stock.jsonl"
    before = curves.read_losses(path)
    path.write_text(path.read_text() + json.dumps({"iteration": 5, "lm loss": 9.0}) + "\n")
    after = curves.read_losses(path)
    assert after[4] == 9.0
    assert np.delete(after, 4).tolist() == np.delete(before, 4).tolist()


def test_runs_of_different_lengths_are_refused(folder: Path) -> None:
    _write(folder, "magi_cp8", np.ones(ITERATIONS - 1))
    with pytest.raises(ValueError, match=r"different numbers of iterations.*'magi_cp8': 59"):
        curves.read(folder)


def test_band_needs_a_second_seed(folder: Path) -> None:
    (folder / "stock_other_seed.jsonl").unlink()
    with pytest.raises(ValueError, match=r"^folder: .* has no stock_other_seed\.jsonl"):
        curves.read(folder)
