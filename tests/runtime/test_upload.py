"""Arrays that go to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.runtime import upload as module
from megatron_magi.runtime.upload import pack, together, upload, when_there

CYCLES = 200_000_000
"""Of the clock: about a tenth of a second."""


def some_arrays(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 9, 1000), rng.integers(0, 9, (7, 3)).astype(np.int32), np.empty(0, dtype=np.int64)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_arrive_as_they_are(device):
    for array, tensor in zip(some_arrays(), upload(some_arrays(), device), strict=True):
        assert tensor.device.type == device and tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
    assert not len(upload([], device))


on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@on_both
def test_arrays_of_inference_mode_can_be_written_outside_of_it(device):
    (array, *_), found = some_arrays(), []
    with torch.inference_mode():
        found += upload([array], device)
        found += pack([array]).to(device)
        with together(torch.device(device)):
            found += upload([array], device)
    for tensor in found:
        assert not tensor.is_inference()
        np.testing.assert_array_equal(tensor.add_(1).cpu().numpy(), array + 1)


@on_both
def test_arrays_that_go_together_are_one_copy_and_large_ones_go_alone(device, monkeypatch):
    monkeypatch.setattr(module, "_rooms", {})
    for turn in range(3):
        large, told = np.arange(20_000) + turn, []
        with together(torch.device(device)):
            found = [(seed, upload(some_arrays(turn + seed), device)) for seed in range(3)]
            with together(torch.device(device)):
                alone = upload([large], device)[0]
            when_there(lambda told=told: told.append("later"))
            assert not told
        assert told == ["later"]
        for seed, tensors in found:
            for array, tensor in zip(some_arrays(turn + seed), tensors, strict=True):
                np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        np.testing.assert_array_equal(alone.cpu().numpy(), large)
        blocks = {t.untyped_storage().data_ptr() for t in (*(tensors[0] for _, tensors in found), alone)}
        assert len(blocks) == (2 if turn == 0 else 1), "the next time there is room for all"
    when_there(lambda: told.append("now"))
    assert told == ["later", "now"]


@pytest.mark.gpu
def test_what_goes_together_is_there_for_any_stream_when_that_ends():
    other = torch.cuda.Stream()
    for turn in range(3):
        torch.cuda._sleep(CYCLES)
        with together(torch.device("cuda")):
            found = upload(some_arrays(turn), "cuda")
            gathers = module._gathering.block is not None
        with torch.cuda.stream(other):
            seen = found[0].clone()
        other.synchronize()
        assert gathers and module._gathering.block is None
        np.testing.assert_array_equal(seen.cpu().numpy(), some_arrays(turn)[0])


def test_what_goes_together_arrives_though_an_error_ends_it():
    class FakeCuda(module._Block):
        """On a device of its own, as a GPU's memory is."""

        def _begin(self):
            super()._begin()
            self._staging = torch.empty(self.room, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_Block", FakeCuda)
        found = []

        def fails():
            with together(torch.device("cpu")):
                found.append(upload(some_arrays(), "cpu"))
                raise KeyError

        with pytest.raises(KeyError):
            fails()
    for array, tensor in zip(some_arrays(), found[0], strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_what_is_queued_and_any_stream_may_use_the_copy():
    upload(some_arrays(), "cuda")  # makes the stream
    other, queued = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda._sleep(CYCLES)
    queued.record()
    copy = upload(some_arrays(), "cuda")[0]
    with torch.cuda.stream(other):
        seen = copy.clone()
    other.synchronize()
    assert not queued.query(), "it has waited"
    np.testing.assert_array_equal(seen.cpu().numpy(), some_arrays()[0])


@pytest.mark.gpu
def test_memory_that_queued_work_still_reads_is_not_used_again():
    for turn in range(3):
        copies = upload(some_arrays(turn), "cuda")
        torch.cuda._sleep(CYCLES)
        seen = copies[0].clone()  # after the pause
        del copies
        others = [upload(some_arrays(100 + i), "cuda") for i in range(20)]
        np.testing.assert_array_equal(seen.cpu().numpy(), some_arrays(turn)[0])
        del others


@pytest.mark.gpu
def test_nothing_is_copied_while_a_graph_is_captured():
    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            upload(some_arrays(), "cuda")

    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        capture()
