"""Calls beside the stream of the caller take turns with those on it: what the host counts, without a GPU."""

from __future__ import annotations

import torch

from megatron_magi.comm.impl import native


class Stream:
    """That notes nothing."""

    def wait_stream(self, _other) -> None:
        """Nothing is queued."""

    def wait_event(self, _event) -> None:
        """Likewise."""


def test_a_call_that_was_waited_for_with_all_others_does_not_count_for_a_later_one(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    mover = object.__new__(native.Native)
    mover._device, mover._side, mover._streams, mover._events = torch.device("cuda", 0), None, {7: Stream()}, []
    mover._last, mover._joins, mover._beside, mover._sends_beside = 7, 0, 1, False
    early = native._Done(object(), 0, mover)
    mover._join(Stream())
    assert not mover._beside
    mover._beside = 1  # a call that takes beside
    late = native._Done(object(), mover._joins, mover)
    early.wait()
    assert mover._beside == 1, "what comes next would not wait for the later call"
    late.wait()
    assert mover._beside == 0
