"""Checksums differ where tensors differ, and are the same on any device and for any integer dtype."""

import pytest
import torch

from megatron_magi.comm import checksum as module
from megatron_magi.comm.checksum import checksum, checksums


def tokens(*shape, seed=0):
    return torch.randint(0, 1000, shape, generator=torch.Generator().manual_seed(seed))


def test_any_changed_swapped_or_moved_element_changes_it():
    x = tokens(40)
    seen = {checksum(x), checksum(x.view(2, 20)), checksum(x.view(20, 2)), checksum(x[:39]), checksum(x.roll(1))}
    for i in range(40):
        changed = x.clone()
        changed[i] += 1
        seen.add(checksum(changed))
        moved = x.clone()
        moved[i], moved[i - 1] = moved[i] + 1, moved[i - 1] - 1
        seen.add(checksum(moved))
    assert len(seen) == 5 + 80 and all(0 <= value < 1 << 63 for value in seen)


def test_the_last_bit_of_a_floating_point_number_counts():
    x = torch.randn(9, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        y = x.to(dtype)
        bits = y.clone().view(module._INTS[y.element_size()])
        bits[3] ^= 1
        assert checksum(y) != checksum(bits.view(dtype)), dtype


def test_signs_of_floating_point_numbers_count_one_by_one_and_all_together():
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        y = x.to(dtype)
        signed = [torch.where(torch.arange(8) < count, -y.float(), y.float()).to(dtype) for count in range(9)]
        assert len({checksum(x) for x in signed}) == 9, dtype
    assert checksum(torch.tensor([0, 5])) != checksum(torch.tensor([-(1 << 63), 5]))


def test_complex_numbers_and_lazily_changed_tensors_count_as_they_are_read():
    x = torch.complex(torch.arange(5.0), torch.arange(5.0) + 1)
    for y in (x, x.to(torch.complex128)):
        assert checksum(y.conj()) == checksum(y.conj().resolve_conj()) != checksum(y)
        assert len({checksum(y), checksum(y.real), checksum(-y.imag), checksum(y.roll(1))}) == 4
    negative = x.conj().imag  # its sign is only noted
    assert negative.is_neg() and checksum(negative) == checksum(negative.clone())


def test_integers_of_any_dtype_have_the_same_one():
    x = tokens(30) % 100
    dtypes = (torch.uint8, torch.int16, torch.int32, torch.uint32)
    assert {checksum(x.to(dtype)) for dtype in dtypes} == {checksum(x)}


def test_tensors_longer_than_a_block_count_in_full(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 7)
    x = tokens(50)
    seen = set()
    for i in range(50):
        changed = x.clone()
        changed[i] += 1
        seen.add(checksum(changed))
    assert len(seen | {checksum(x), checksum(x.roll(7))}) == 52


def test_several_are_those_of_each():
    several = [tokens(3), tokens(4, 5), torch.zeros(0), torch.tensor(True)]
    found = checksums(several, torch.device("cpu"))
    assert found.tolist() == [checksum(x) for x in several]


@pytest.mark.gpu
def test_those_of_a_gpu_are_those_of_the_cpu_and_the_host_waits_for_none():
    several = [tokens(3000), torch.randn(77), torch.zeros(0)]
    on_gpu = [x.cuda() for x in several]
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = checksums(on_gpu, torch.device("cuda", 0))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found.tolist() == checksums(several, torch.device("cpu")).tolist()


@pytest.mark.gpu
def test_those_of_a_gpu_are_there_when_they_are_wanted_on_the_cpu():
    x = tokens(1 << 22)
    on_gpu, busy = x.cuda(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy
    assert checksums([on_gpu], torch.device("cpu")).tolist() == [checksum(x)]
