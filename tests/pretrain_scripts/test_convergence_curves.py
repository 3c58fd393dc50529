"""Loss curves against the band of seeds, on curves that are made up."""

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
    """Three seeds, 0.05 apart at least, and runs that differ from two of them by rounding alone."""
    stock = 4 * np.exp(-np.arange(ITERATIONS) / 30) + 1
    noise = np.random.default_rng(0).normal(size=(3, ITERATIONS)) * 0.3
    for number, (seed, shift) in enumerate({1: 0.0, 2: 0.05, 3: 0.2}.items()):
        _write(tmp_path, f"stock_seed_{seed}", stock + shift + noise[number])
        if seed < 3:
            _write(tmp_path, f"magi_cp2_seed_{seed}", stock + shift + noise[number] + 1e-3)
        log = (
            f" validation loss at iteration 60 on validation set | lm loss value: 1.{seed}00000E+00 | lm loss PPL: 3 | "
        )
        (tmp_path / f"stock_seed_{seed}.log").write_text("iteration 60\n" + log + "\n")
    return tmp_path


def test_run_within_the_band_passes_and_is_plotted(folder: Path) -> None:
    assert curves.report(folder, "title") == 0
    assert (folder / "loss_curves.png").stat().st_size > 10_000
    assert len((folder / "losses.csv").read_text().splitlines()) == 1 + ITERATIONS
    assert (folder / "validation.csv").read_text().split()[:2] == ["run,loss", "stock_seed_1,1.100000"]


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_run_that_drifts_from_stock_fails_by_name(folder: Path, error: float) -> None:
    stock = curves.read_losses(folder / "stock_seed_1.jsonl")
    _write(folder, "magi_cp4_seed_1", stock + error * (np.arange(ITERATIONS) >= 40))
    found = curves.read(folder)
    assert [sentence.split()[0] for sentence in found.failures] == ["magi_cp4_seed_1"]
    assert curves.report(folder, "title") == 1


def test_stock_over_other_ranks_is_shown_beside_and_does_not_decide(folder: Path, capsys) -> None:
    stock = curves.read_losses(folder / "stock_seed_1.jsonl")
    _write(folder, "stock_ranks_1_seed_1", stock + 0.5)
    found = curves.read(folder)
    assert found.controls == ["stock_ranks_1_seed_1"]
    assert found.failures == []
    assert found.band == pytest.approx(
        curves.Comparison(found.window, {n: found.curves[n] for n in found.runs("stock")}).band
    )
    assert curves.report(folder, "title") == 0
    assert "stock_ranks_1_seed_1  0.5000 and 0.5000" in capsys.readouterr().out


def test_one_unlucky_batch_is_no_drift(folder: Path) -> None:
    found = curves.read(folder)
    assert found.window > 1
    losses = found.curves["magi_cp2_seed_1"].copy()
    losses[30] += 2 * found.band[0]
    _write(folder, "magi_cp2_seed_1", losses)
    assert curves.read(folder).failures == []


def test_iteration_that_was_trained_twice_counts_once(folder: Path) -> None:
    path = folder / "stock_seed_1.jsonl"
    before = curves.read_losses(path)
    path.write_text(path.read_text() + json.dumps({"iteration": 5, "lm loss": 9.0}) + "\n")
    after = curves.read_losses(path)
    assert after[4] == 9.0
    assert np.delete(after, 4).tolist() == np.delete(before, 4).tolist()


def test_runs_of_different_lengths_are_refused(folder: Path) -> None:
    _write(folder, "magi_cp8_seed_1", np.ones(ITERATIONS - 1))
    with pytest.raises(ValueError, match=r"different numbers of iterations.*'magi_cp8_seed_1': 59"):
        curves.read(folder)


def test_run_is_compared_with_stock_of_its_seed_and_the_band_is_the_least_between_seeds(folder: Path) -> None:
    found = curves.read(folder)
    assert found.distance("magi_cp2_seed_2") == pytest.approx([1e-3, 1e-3])
    pairs = [found.distance(f"stock_seed_{a}", f"stock_seed_{b}") for a, b in ((1, 2), (1, 3), (2, 3))]
    assert found.band.tolist() == np.min(pairs, axis=0).tolist()


def test_losses_of_the_validation_text_are_shown_by_attention(folder: Path) -> None:
    found = curves.read(folder)
    assert found.validation == {"stock_seed_1": 1.1, "stock_seed_2": 1.2, "stock_seed_3": 1.3}
    lines = curves.table(found).splitlines()
    assert any("stock" in line and "1.1000 to 1.3000, 1.2000" in line for line in lines)
    assert any("magi_cp2" in line and "not validated" in line for line in lines)


def test_band_needs_a_second_seed(folder: Path) -> None:
    for name in ("stock_seed_2", "stock_seed_3"):
        (folder / f"{name}.jsonl").unlink()
    with pytest.raises(ValueError, match=r"^folder: .* has 1 runs of stock"):
        curves.read(folder)


def test_run_needs_stock_of_its_seed(folder: Path) -> None:
    (folder / "stock_seed_2.jsonl").unlink()
    with pytest.raises(ValueError, match=r"no run of stock with the seed of magi_cp2_seed_2\.jsonl"):
        curves.read(folder)
