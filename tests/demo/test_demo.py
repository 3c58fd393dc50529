"""The demo's verdict, table and pictures."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.demo import __main__ as demo
from megatron_magi.demo import figures, report, training
from megatron_magi.demo.corpus import Corpus, build_corpus
from megatron_magi.demo.progress import Progress
from megatron_magi.demo.report import Comparison, Traffic, shown_steps, table, traffic_of
from megatron_magi.demo.training import Run, RunFailed, Setting
from megatron_magi.explain.figures import plot_mask
from megatron_magi.mask.builders import varlen
from megatron_magi.plan import make_plan
from megatron_magi.testing.megatron_launch import launch

_RECORD = {"balance": 1.01, "areas": [101, 99], "received_rows": 30, "lower_bound_rows": 20}


def _comparison(stock: list[float], magi: list[float], tolerance: float = 1e-4) -> Comparison:
    runs = [Run(losses, 1000.0, [_RECORD] * len(losses)) for losses in (stock, magi)]
    return Comparison(*runs, ("stock, CP=1", "magi, CP=2"), tolerance, Traffic(1.01, 1.005, 3_000_000, 2_000_000))


def test_steps_of_the_table_are_the_first_the_tens_and_the_last() -> None:
    assert shown_steps(25) == [1, 10, 20, 25]
    assert shown_steps(1) == [1]


def test_table_shows_losses_difference_speed_balance_and_bytes() -> None:
    text = table(_comparison([5.0, 4.0], [5.0, 4.0001]))
    assert "     2      4.000000      4.000100     2.5e-05" in text
    assert "largest relative difference  2.5e-05  (allowed 1e-04): equal" in text
    assert "1,000  and  1,000" in text
    assert "1.0050 a step, 1.0100 in the worst microbatch" in text
    assert "3.00 MB in all forward passes; lower bound 2.00 MB" in text


@pytest.mark.parametrize(
    "losses", [[5.0, 4.001], [5.0, math.nan], [5.001, 4.0], [5.0, math.inf]], ids=["last", "nan", "first", "inf"]
)
def test_curves_that_differ_do_not_agree(losses: list[float]) -> None:
    comparison = _comparison([5.0, 4.0], losses)
    assert not comparison.agrees
    assert "NOT EQUAL" in table(comparison)


def test_traffic_adds_up_steps_and_layers() -> None:
    run = Run([5.0, 4.0], 1.0, [_RECORD, {**_RECORD, "balance": 1.2}])
    assert traffic_of(run, row_bytes=10, num_layers=3) == Traffic(1.2, 1.01, 1800, 1200)


def test_the_model_has_heads_that_the_kernels_for_gpus_take() -> None:
    assert (training.head_dim(), training.head_dim()) in hopper_kernels.BACKWARD_DIMS


def test_one_rank_has_no_traffic() -> None:
    run = Run([5.0], 1.0, [{"balance": 1.0, "areas": [7], "received_rows": 0, "lower_bound_rows": 0}])
    assert traffic_of(run, row_bytes=10, num_layers=3) is None


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The demo without its training: ``fake_training(stock_losses, magi_losses)`` runs it."""
    lengths = np.full(300, 100, dtype=np.int64)
    corpus = Corpus(tmp_path / "text", 1024, lengths)
    tokens = np.zeros(lengths.sum(), dtype=np.uint16)
    tokens[np.cumsum(lengths) - 1] = corpus.eod
    tokens.tofile(corpus.prefix.with_suffix(".bin"))
    monkeypatch.setattr(demo, "_make_corpus", lambda out: corpus)

    def run(stock: list[float], magi: list[float]) -> int:
        curves = {"stock": stock, "magi": magi}
        monkeypatch.setattr(demo, "train", lambda name, *args: Run(curves[name], 1.0, [_RECORD] * len(stock)))
        return demo.main(["--out", str(tmp_path / "out")])

    return run


def test_equal_curves_end_with_status_zero_and_all_files(fake_training, tmp_path: Path) -> None:
    assert fake_training([5.0, 4.0], [5.0, 4.0]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"report.txt", "report.json", "loss_curves.png", "mask.png"}


def test_differing_curves_end_with_a_status(fake_training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "plot_losses", lambda *args: None)
    monkeypatch.setattr(demo, "plot_mask", lambda *args: None)
    assert fake_training([5.0, 4.0], [5.0, 4.1]) == 1


def test_failing_training_ends_with_a_status_and_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RunFailed("stock: status 1")

    monkeypatch.setattr(demo, "_make_corpus", fail)
    assert demo.main(["--out", str(tmp_path)]) == 2
    assert "stock: status 1" in capsys.readouterr().err


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--steps", "1"])
    assert "--steps: expected at least 2" in capsys.readouterr().err


def test_both_runs_have_the_same_arguments_but_for_attention() -> None:
    corpus = Corpus(Path("text"), 1024, np.array([1]))
    stock, magi = (training.megatron_args(Setting(), corpus, magi=cp > 1, cp_size=cp) for cp in (1, 2))
    at = stock.index("--context-parallel-size") + 1
    assert (stock[at], magi[at]) == ("1", "2")
    assert [*stock[:at], "2", *stock[at + 1 :], "--attention-backend", "magi"] == magi


def test_the_arguments_train_equal_curves(tmp_path: Path) -> None:
    corpus = build_corpus(tmp_path, max_document_bytes=400, vocab_size=300)
    setting = Setting(num_steps=4, seq_length=128, on_gpu=torch.cuda.is_available())
    cp_size = 1 if torch.cuda.device_count() == 1 else 2
    stock, magi = (
        launch(training.megatron_args(setting, corpus, magi=magi, cp_size=size), size)
        for magi, size in ((False, 1), (True, cp_size))
    )
    assert magi.losses == pytest.approx(stock.losses, rel=report.BF16_TOLERANCE if setting.on_gpu else 1e-5)
    assert stock.losses[4] < stock.losses[1]


def test_gpus_train_in_bf16_over_nccl() -> None:
    args = training.megatron_args(Setting(on_gpu=True), Corpus(Path("text"), 1024, np.array([1])), magi=True, cp_size=2)
    assert "--bf16" in args
    assert args[args.index("--distributed-backend") + 1] == "nccl"


def test_a_trainer_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('no such argument'); raise SystemExit(3)")
    monkeypatch.setattr(training, "SCRIPT", script)
    with pytest.raises(RunFailed, match=r"(?s)stock: status .* after 0 steps.*no such argument"):
        training.train("stock", [], Setting(), 1, tmp_path, lambda record, rate: None)


def test_progress_off_a_terminal_is_a_line_every_ten_steps() -> None:
    stream = io.StringIO()
    with Progress("stock", 25, stream) as progress:
        for step in range(1, 26):
            progress.step({"iteration": step, "lm loss": 1.0}, 0.0)
    shown = [line.split("]")[1].split()[0] for line in stream.getvalue().splitlines()[1:]]
    assert shown == ["1/25", "10/25", "20/25", "25/25"]


def test_pictures_are_written(tmp_path: Path) -> None:
    figures.plot_losses(tmp_path / "losses.png", _comparison([5.0, 4.0, 3.0], [5.0, 4.0, 3.1]))
    plot_mask(tmp_path / "mask.png", make_plan(varlen(doc_lengths=[100, 30, 126]), cp_size=4), "title")
    for name in ("losses.png", "mask.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_bf16_is_allowed_more_than_fp32() -> None:
    assert report.FP32_TOLERANCE == 1e-4 < report.BF16_TOLERANCE
