"""Rates that were measured: how they are fitted, kept and found again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_magi import api
from megatron_magi.__main__ import main
from megatron_magi.api.functions import _RUNTIMES
from megatron_magi.backends.costs import RATES, rates_of
from megatron_magi.backends.registry import BACKENDS
from megatron_magi.backends.sm90.cost import H100
from megatron_magi.calibration import calibration_file, measure, present_rates, rates_file, with_present_rates
from megatron_magi.calibration.fit import fit_kernels
from megatron_magi.calibration.measure import calibrate, masks
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig
from megatron_magi.cost_model import Rates
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.counts import count
from megatron_magi.plan.predict import kernels_us

DEVICE = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is there by name alone, and a cache of one's own."""
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: DEVICE)


@pytest.mark.parametrize("changed", [{}, {"forward_tflops": 300.0, "tile_columns": 10.0, "backward_us": 0.0}])
def test_rates_are_found_again_from_the_times_that_they_predict(changed) -> None:
    cost = CostModel(num_heads_q=32, num_heads_kv=8)
    true = replace(H100, **changed)
    times = []
    for mask in masks():
        rows = mask.total_seqlen_q
        counts = count(ChunkedMask(mask, np.array([0, rows]), 1), np.array([0]), 1)
        times.append(kernels_us(counts, rows, true, cost))
    start = replace(H100, forward_tflops=1.0, backward_tflops=1.0, tile_columns=1.0, tile_rows=1.0)
    found = fit_kernels(masks(), *zip(*times, strict=True), start, cost)
    for name in ("forward_tflops", "backward_tflops", "tile_columns", "tile_rows", "forward_us", "backward_us"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-4, abs=1e-3), name


def test_times_that_no_rates_explain_are_an_error() -> None:
    nothing = [1e-3] * len(masks())
    with pytest.raises(RuntimeError, match=r"^calibration: no rates explain"):
        fit_kernels(masks(), nothing, nothing, H100, CostModel(num_heads_q=32, num_heads_kv=8))


def test_rates_are_kept_for_their_device_and_found_again(gpu, tmp_path) -> None:
    assert present_rates() == RATES["H100"]
    rates_file._read.cache_clear()
    mine = replace(H100, device=DEVICE, gbytes_per_s=123.0)
    for rates in (H100, mine):  # calibrated again, the last ones count
        assert rates_file.keep(replace(rates, device=DEVICE)) == calibration_file(DEVICE)
    assert (
        calibration_file(DEVICE).is_relative_to(tmp_path) and len(list(calibration_file(DEVICE).parent.iterdir())) == 1
    )
    assert present_rates() == mine
    assert with_present_rates(MagiConfig()).dispatch.rates == mine
    key = api.magi_attn_varlen_key([0, 100], [0, 100])
    assert _RUNTIMES.get(key).plan.config.dispatch.rates == mine


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"device": 3}', b"\xff"])
def test_a_damaged_calibration_is_an_error_that_names_the_file(gpu, content) -> None:
    rates_file._read.cache_clear()
    file = calibration_file(DEVICE)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file.name}: (calibration: |'utf-8' codec)"):
        present_rates()


def test_where_no_calibration_can_be_read_the_defaults_hold(gpu, monkeypatch, tmp_path, caplog) -> None:
    """As in a container that runs with the home directory of another user, or with /dev/null for one."""
    rates_file._read.cache_clear()
    (tmp_path / "no_folder").touch()
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(tmp_path / "no_folder"))
    assert present_rates() == RATES["H100"] and not caplog.text
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(tmp_path))
    calibration_file(DEVICE).mkdir(parents=True)  # which root too cannot read as a file
    assert present_rates() == RATES["H100"]
    assert f"{calibration_file(DEVICE)} cannot be read" in caplog.text


def test_rates_that_cannot_be_kept_are_printed_all_the_same(gpu, monkeypatch, tmp_path, capsys) -> None:
    (tmp_path / ".cache").touch()
    monkeypatch.setattr("megatron_magi.calibration.measure.calibrate", lambda: replace(H100, device=DEVICE))
    assert main(["calibrate"]) == 1
    said = capsys.readouterr()
    assert Rates.from_json(said.out) == replace(H100, device=DEVICE) and "megatron_magi" in said.err


def test_who_names_an_algorithm_or_rates_gets_them(gpu) -> None:
    named = MagiConfig(DispatchConfig(algorithm="affinity"))
    assert with_present_rates(named) == named
    own = MagiConfig(DispatchConfig(rates=replace(H100, gbytes_per_s=1.0)))
    assert with_present_rates(own) == own


def test_gpus_of_no_known_kind_take_the_rates_of_an_h100() -> None:
    assert rates_of("NVIDIA GeForce RTX 4090") == H100
    assert rates_of("NVIDIA H100 80GB HBM3") == RATES["H100"]


@pytest.mark.parametrize(
    "changed",
    [{"forward_tflops": 0.0}, {"gbytes_per_s": float("nan")}, {"hidden": 1.5}, {"ranks_per_node": 0}, {"device": None}],
)
def test_rates_refuse_what_is_none(changed) -> None:
    (name,) = changed
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        replace(H100, **changed)


def test_rates_survive_their_file_to_the_last_bit() -> None:
    odd = replace(H100, forward_tflops=1 / 3, tile_columns=np.pi)
    assert Rates.from_json(odd.to_json()) == odd and Rates.from_json(odd.to_json()).digest == odd.digest
    assert odd.digest != H100.digest


def test_a_gpu_that_no_kernels_run_on_is_not_measured(gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("megatron_magi.calibration.measure.table_backend", lambda *_: None)
    with pytest.raises(RuntimeError, match=rf"^calibrate: no kernels of impl 'triton' run on {DEVICE}$"):
        calibrate("triton")


@pytest.mark.parametrize(("impl", "taken"), [("auto", "triton"), ("cudnn", "cudnn")])
def test_the_backend_that_computes_on_a_gpu_is_the_one_that_is_measured(gpu, monkeypatch, impl, taken) -> None:
    def found(asked, *_):
        return BACKENDS["triton" if asked == "auto" else asked]

    measured = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure, "table_backend", found)
    monkeypatch.setattr(measure, "_memory_rate", lambda: 1.0)
    monkeypatch.setattr(measure, "_kernels", lambda rates, impl: measured.append(impl) or rates)
    assert calibrate(impl).device == DEVICE and measured == [taken]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_calibrating_is_one_clear_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_magi", "calibrate"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.strip() == "calibrate: there is no GPU"
