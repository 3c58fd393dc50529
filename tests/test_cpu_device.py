"""Stock Megatron on a CPU, and who is told of a device that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_magi import cpu_device
from megatron_magi.testing.megatron_launch import RunResult, launch, tiny_gpt_args

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without a GPU")

_PROBE = """
def available(): return torch.cuda.is_available()
def count(): return torch.cuda.device_count()
def current(): return torch.cuda.current_device()
def stream(): return torch.cuda.Stream()
def zeros(device): return torch.zeros(2, device=device)
def arange(): return torch.arange(3, device=torch.cuda.current_device(), pin_memory=True)
def like(x): return x.new_ones(2, device="cuda")
def to(x, *args, **kwargs): return x.to(*args, **kwargs)
def cuda(x): return x.cuda()
def kind(x): return x.type()
def compiled(f): return torch.compile(f)
def random_state(): return torch.cuda.get_rng_state()
"""


def _module(name: str) -> types.ModuleType:
    """Code that calls torch from a module of that name."""
    module = types.ModuleType(name)
    module.torch = torch
    exec(_PROBE, module.__dict__)
    return module


@pytest.fixture(scope="module")
def megatron_code() -> types.ModuleType:
    cpu_device.install()
    return _module("megatron.core.pretend")


@pytest.fixture(scope="module", params=["torch.pretend", "megatron_magi.mcore.pretend", "megatronic"])
def other_code(request: pytest.FixtureRequest) -> types.ModuleType:
    cpu_device.install()
    return _module(request.param)


def test_megatron_sees_one_device(megatron_code: types.ModuleType) -> None:
    assert megatron_code.available()
    assert megatron_code.count() == 1
    assert megatron_code.current() == 0


def test_others_see_no_device(other_code: types.ModuleType) -> None:
    assert not other_code.available()
    assert other_code.count() == 0
    with pytest.raises((RuntimeError, AssertionError)):
        other_code.current()
    with pytest.raises((RuntimeError, AssertionError)):
        other_code.zeros("cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        other_code.cuda(torch.zeros(2))
    assert other_code.kind(torch.zeros(2)) == "torch.FloatTensor"


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0), "cpu", None])
def test_tensors_of_megatron_are_on_the_cpu(megatron_code: types.ModuleType, device: object) -> None:
    assert megatron_code.zeros(device).device.type == "cpu"


def test_moves_of_megatron_stay_on_the_cpu(megatron_code: types.ModuleType) -> None:
    x = torch.zeros(2)
    assert megatron_code.arange().tolist() == [0, 1, 2]
    assert megatron_code.like(x).device.type == "cpu"
    assert megatron_code.cuda(x) is x
    assert megatron_code.to(x, "cuda", torch.float64).dtype == torch.float64
    assert megatron_code.to(x, device=torch.device("cuda"), non_blocking=True).device.type == "cpu"
    assert megatron_code.to(x, torch.int32).dtype == torch.int32
    assert megatron_code.kind(x) == "torch.cuda.FloatTensor"


def test_meta_device_context_still_reaches_factories(megatron_code: types.ModuleType) -> None:
    with torch.device("meta"):
        assert megatron_code.zeros(None).device.type == "meta"
        assert torch.zeros(2).device.type == "meta"


def test_streams_do_nothing_and_events_tell_time(megatron_code: types.ModuleType) -> None:
    stream = megatron_code.stream()
    begin, end = stream.record_event(), stream.record_event()
    stream.wait_event(begin)
    stream.synchronize()
    assert begin.elapsed_time(end) >= 0


def test_generator_of_the_device_is_that_of_the_cpu(megatron_code: types.ModuleType) -> None:
    torch.manual_seed(7)
    assert torch.equal(megatron_code.random_state(), torch.get_rng_state())


def test_megatron_compiles_nothing(megatron_code: types.ModuleType) -> None:
    assert megatron_code.compiled(len) is len


def test_installing_twice_changes_nothing(megatron_code: types.ModuleType) -> None:
    before = torch.zeros
    assert cpu_device.install()
    assert torch.zeros is before


def test_installing_after_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "_installed", False)
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="before the first import of megatron"):
        cpu_device.install()


def test_nothing_is_patched_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.zeros
    assert not cpu_device.install()
    assert torch.zeros is before


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_packages_that_need_a_gpu_are_as_if_not_installed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    code = f"""
import importlib.util
from megatron_magi import cpu_device
assert importlib.util.find_spec({name!r})
assert cpu_device.install()
assert not importlib.util.find_spec({name!r})
try:
    import {name}.optimizers
except ImportError:
    print("not there")
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "not there\n"


@pytest.fixture(scope="module")
def one_process() -> RunResult:
    return launch(tiny_gpt_args("mock", train_iters=4))


def test_stock_training_lowers_the_loss(one_process: RunResult) -> None:
    assert list(one_process.losses) == [1, 2, 3, 4]
    assert one_process.losses[4] < one_process.losses[1] - 0.1


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([], id="DP2"),
        pytest.param(["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"], id="sharded"),
        pytest.param(["--tensor-model-parallel-size", "2", "--sequence-parallel"], id="TP2-SP"),
    ],
)
def test_two_ranks_train_as_one(one_process: RunResult, extra: list[str]) -> None:
    run = launch(tiny_gpt_args("mock", *extra, train_iters=4), num_ranks=2)
    assert run.losses == pytest.approx(one_process.losses, rel=2e-6)
    assert run.grad_norms == pytest.approx(one_process.grad_norms, rel=1e-5)


def test_pipeline_stages_train() -> None:
    """Their weights are drawn with other seeds, so only the fall of the loss can be compared."""
    extra = ["--pipeline-model-parallel-size", "2", "--no-create-attention-mask-in-dataloader"]
    run = launch(tiny_gpt_args("mock", *extra, train_iters=4), num_ranks=2)
    assert run.losses[4] < run.losses[1] - 0.1
