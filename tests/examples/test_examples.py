"""The examples, at a tiny size on two ranks."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi.testing.megatron_launch import launch
from megatron_magi.testing.spawn import run_ranks

pytestmark = pytest.mark.ranks(2)

EXAMPLES = Path(megatron_magi.__file__).parents[1] / "examples"


def load(path):
    """A script as a module, which finds its neighbours."""
    sys.path.insert(0, str(EXAMPLES / Path(path).parent))
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_native(_rank, _num_ranks, folder):
    main = load("torch_native/train.py").main
    whole = main(["--steps", "4", "--cpu"])
    main(["--steps", "2", "--cpu", "--checkpoint", f"{folder}/saved"])
    resumed = main(["--steps", "4", "--cpu", "--checkpoint", f"{folder}/saved"])
    data_parallel = main(["--steps", "2", "--cp", "1", "--cpu"])
    return whole, resumed, data_parallel


def torch_native_on_one_rank(_rank, _num_ranks):
    return load("torch_native/train.py").main(["--steps", "4", "--cpu"])


def test_torch_native_trains_and_goes_on_from_its_checkpoint(tmp_path):
    results = run_ranks(torch_native, 2, str(tmp_path), timeout_s=120.0)
    assert results[0] == results[1]
    whole, resumed, data_parallel = results[0]
    assert len(whole) == 4
    assert whole == pytest.approx(run_ranks(torch_native_on_one_rank, 1)[0], abs=1e-4)
    assert resumed == pytest.approx(whole[2:], abs=1e-5)
    assert len(data_parallel) == 2


def only_what_torchrun_sets(_workdir):
    del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]


def test_megatron_trains(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron_magi[megatron]")
    script, before = str(EXAMPLES / "megatron/train.py"), f"{__name__}:only_what_torchrun_sets"
    run = launch(["--train-iters", "3", "--save-interval", "1000"], 2, script=script, before=before, workdir=tmp_path)
    assert len(run.losses) == 3
    assert run.losses[3] < run.losses[1]


def transformers(_rank, _num_ranks, folder):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_WORLD_SIZE="2")
    os.chdir(folder)
    return load("transformers/train.py").main(["--steps", "3", "--cpu"])


def test_transformers_trains(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
    results = run_ranks(transformers, 2, str(tmp_path), timeout_s=120.0)
    assert results[0] == results[1]
    assert len(results[0]) == 3
    assert results[0][-1] < results[0][0]
