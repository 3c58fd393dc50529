"""Which kernels are compiled for which architecture; compiled here, without a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.__main__ import build_kernels, main
from megatron_magi.comm import peers
from megatron_magi.comm.kernel_list import row_kernels
from megatron_magi.comm.peer_kernels import SHAPES
from megatron_magi.cuda import build
from megatron_magi.cuda.target import (
    DEFAULT_TARGET,
    PEER_CAPABILITIES,
    TARGETS,
    capabilities,
    has_peer_kernels,
    target_named,
    target_of,
)
from tests.cuda.cubins import resources

REGISTERS = 1 << 16
SHARED_BYTES = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10, "sm_100": 227 << 10,
    "sm_103": 227 << 10, "sm_120": 99 << 10,
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS.values())
def test_kernels_of_collectives_compile_and_fit(target: str) -> None:
    kernels = row_kernels(target)
    names = {source.rpartition("/")[2].removesuffix(".cu") for source, _ in kernels}
    assert {"gather_rows", "sum_rows"} <= names
    assert (set(SHAPES) <= names) == has_peer_kernels(target)
    for source, macros in kernels:
        taken = resources(build.compile_kernel(source, macros, target=target)[0])
        name = source.rpartition("/")[2].removesuffix(".cu")
        threads = SHAPES[name].threads if name in SHAPES else 256
        shared = SHAPES[name].shared_bytes if name in SHAPES else 0
        assert taken.registers * threads <= REGISTERS, (source, taken)
        assert shared + taken.shared_bytes <= SHARED_BYTES[target], (source, taken)


@pytest.mark.parametrize("target", sorted({*TARGETS.values()} - {TARGETS[known] for known in PEER_CAPABILITIES}))
def test_where_there_are_no_peer_kernels_they_would_not_compile_or_fit(target: str) -> None:
    source, macros = next(kernel for kernel in row_kernels(DEFAULT_TARGET) if "get_rows" in kernel[0])
    if SHAPES["get_rows"].shared_bytes > SHARED_BYTES[target] and target == "sm_120":
        return
    with pytest.raises(RuntimeError, match=f"failed for {target}"):
        build.compile_kernel(source, macros, target=target)


def test_an_architecture_has_cubins_of_its_own(tmp_path) -> None:
    kernel = row_kernels("sm_80")[0]
    names = {build.cubin_name(*kernel, target=target) for target in TARGETS.values()}
    assert len(names) == len(TARGETS)
    assert build.cubin_name(*kernel) == build.cubin_name(*kernel, target=DEFAULT_TARGET)
    built = build.build(*kernel, tmp_path, target="sm_80")
    assert built != build.build(*kernel, tmp_path, target="sm_90a")


@pytest.mark.parametrize("capability", [*TARGETS, (7, 5), (13, 0)])
def test_a_device_has_the_target_of_its_capability(monkeypatch, capability) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    target_of.cache_clear()
    try:
        assert target_of(torch.device("cuda", 0)) == TARGETS.get(capability)
    finally:
        target_of.cache_clear()


@pytest.mark.parametrize("capability", [*TARGETS, (7, 5)])
def test_ranks_reach_each_others_memory_where_the_kernels_are(capability) -> None:
    said = [
        {"host": "a", "device": str(i), "capability": list(capability), "sms": 132, "groups": 0, "captured": False}
        for i in range(2)
    ]
    refusal = peers.refusal_of(said)
    if capability in PEER_CAPABILITIES:
        assert refusal is None
    else:
        assert refusal == "needs GPUs of compute capability 9.0, 10.0 or 10.3"


def test_architectures_are_named_in_two_ways() -> None:
    assert [target_named(name) for name in ("sm_100", "10.0", "sm_90", "sm_90a", "8.9")] == [
        "sm_100", "sm_100", "sm_90a", "sm_90a", "sm_89",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"^arch: there are no kernels for '7\.5'; expected one of sm_80 \(8\.0\),"):
        target_named("7.5")
    assert capabilities([(9, 0)]) == "9.0"


def test_build_compiles_what_an_architecture_has(tmp_path, capsys) -> None:
    said = build_kernels(tmp_path, 2, "8.0")
    kernels = row_kernels("sm_80")
    assert said.startswith(f"{len(kernels)} kernels for sm_80 are in") and "compiles when it is first used" in said
    assert {file.name for file in tmp_path.iterdir()} == {build.cubin_name(*k, target="sm_80") for k in kernels}
    assert main(["build", "--arch", "sm_75"]) == 1
    assert "arch: there are no kernels for 'sm_75'" in capsys.readouterr().err
