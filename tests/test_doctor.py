"""What ``magi doctor`` says of machines: with and without GPUs, with and without what they need."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import doctor
from megatron_magi.__main__ import main
from megatron_magi.backends import registry
from megatron_magi.backends.cudnn import support
from megatron_magi.backends.sm90 import support as hopper
from megatron_magi.cuda.target import TARGETS
from megatron_magi.doctor import Gpu, examine


@pytest.fixture
def machine(monkeypatch):
    """``machine(capability, count, **versions)``: as on a machine with such GPUs and packages."""

    def pretend(capability, count=1, linked=True, **versions):
        known = {"megatron-core": "0.19.2", "triton": "3.6.0", "nvidia-cudnn-frontend": "1.32.0"} | {
            name.replace("_", "-"): version for name, version in versions.items()
        }
        gpus = [Gpu(i, f"GPU {capability}", capability) for i in range(count)]
        monkeypatch.setattr(doctor, "_gpus", lambda: gpus)
        monkeypatch.setattr(doctor, "has_nvidia_devices", lambda: bool(count))
        monkeypatch.setattr(doctor, "installed", known.get)
        monkeypatch.setattr(doctor, "driver_version", lambda: "580.65.06")
        monkeypatch.setattr(doctor, "target_of", lambda _device: TARGETS.get(capability))
        monkeypatch.setattr(doctor, "_collectives", lambda found, of=doctor._collectives: of(found, lambda *_: linked))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr("megatron_magi.backends.triton.support._missing_of_compiler", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: f"GPU {capability}")
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
        monkeypatch.setattr(support, "_where", lambda device: (device.type, capability if count else None))
        monkeypatch.setattr(support, "installed_version", lambda: known["nvidia-cudnn-frontend"])
        monkeypatch.setattr(hopper, "_is_hopper", lambda device: device.type == "cuda" and capability == (9, 0))

    return pretend


def test_a_machine_without_gpus_is_whole(machine, monkeypatch, capsys):
    machine((0, 0), 0, nvidia_cudnn_frontend=None)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "no GPU: everything runs on the CPU" in text and "torch: correct, not fast" in text
    assert "gloo, between CPUs" in text and "nvidia-cudnn-frontend: not installed (pip install" in text
    assert text.rstrip().endswith("nothing")


@pytest.mark.parametrize(
    ("capability", "name", "between"),
    [
        ((9, 0), "ffa", "kernels of this package over NVLink"),
        ((10, 0), "cudnn", "kernels of this package over NVLink"),
        ((8, 0), "triton", "NCCL: kernels over NVLink need compute capability 9.0, 10.0 or 10.3"),
        ((12, 0), "triton", "NCCL: kernels over NVLink need compute capability"),
    ],
)
def test_it_says_which_attention_and_which_collectives(machine, capability, name, between):
    machine(capability, 2)
    report = examine()
    assert f"2 x GPU {capability}, compute capability {capability[0]}.{capability[1]}" in report.text
    assert f"impl {name!r} for bf16 and head dims 64, 128, 192/128" in report.text
    assert between in report.text and "driver 580.65.06, NCCL 2.28.9" in report.text
    assert not report.problems


def test_gpus_that_are_not_linked_use_nccl(machine):
    machine((9, 0), 4, linked=False)
    assert "NCCL: there is no NVLink between GPUs 0 and 1" in examine().text


@pytest.mark.parametrize("version", [None, "1.31.0"])
def test_what_a_blackwell_gpu_lacks_is_a_problem_and_how_to_install_it(machine, capsys, version):
    machine((10, 0), nvidia_cudnn_frontend=version)
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.partition("Missing")[2]
    assert "impl: 'cudnn' needs nvidia-cudnn-frontend 1.32.x" in last
    assert "pip install 'megatron-magi[cudnn]'" in last


def test_what_a_hopper_gpu_does_not_need_is_no_problem(machine):
    machine((9, 0), nvidia_cudnn_frontend=None)
    assert not examine().problems


def test_wrong_versions_and_variables_are_problems(machine, monkeypatch):
    machine((9, 0), megatron_core="0.11.0", triton=None)
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "fa9")
    problems = examine().problems
    assert [problem.partition(":")[0] for problem in problems] == [
        "megatron-core", "triton", "MAGI_ATTENTION_KERNEL_BACKEND",
    ]  # fmt: skip
    assert "0.11.0" in problems[0] and "0.19.2" in problems[0]


def test_gpus_that_torch_cannot_use_are_a_problem(machine, monkeypatch):
    machine((0, 0), 0)
    monkeypatch.setattr(doctor, "has_nvidia_devices", lambda: True)
    report = examine()
    assert "there are NVIDIA GPUs, but torch" in report.problems[0] and "install a driver" in report.problems[0]


def test_every_backend_is_named(machine):
    machine((9, 0))
    lines = [line.strip() for line in examine().text.splitlines()]
    for name in registry.BACKENDS:
        assert any(line.startswith(f"{name}: ") for line in lines), name
