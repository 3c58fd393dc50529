"""Tables of masks that change in place, made while uploads wait for each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.backends.base import MaskSize
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.changing_mask import StaticMask, StaticMemory, _parts
from megatron_magi.backends.sm90.plan import Tiling, device_plan, make_host_plan, schedule_of
from megatron_magi.mask import bands as bd
from megatron_magi.runtime import upload as upload_module
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import together

CPU = torch.device("cpu")
BANDS = np.array([[0, 130, 0, 150, -bd.NO_DIAGONAL, 21], [130, 300, 150, 400, -64, 64]], dtype=np.int64)
BACKWARD = Tiling(True, 400, (128, 64))
KEY = (2, 2, 132, 1, False)


class LaterBlock(upload_module._Block):
    """On a device of its own, as a GPU's memory is: what is there before the copy is nonsense."""

    def _begin(self) -> None:
        super()._begin()
        self._memory.fill_(255)
        self._staging = torch.empty(self.room, dtype=torch.uint8)


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setattr(upload_module, "_Block", LaterBlock)
    monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 20, 8))


@pytest.mark.usefixtures("waiting")
def test_tables_are_copied_to_their_places_once_the_upload_is_there():
    bands = BANDS.copy()
    mask = StaticMask([MaskSize(bands, 400, 300)], 300, 400, CPU, StaticMemory(CPU), 1.5)
    forward = Tiling(False, 300, (128, 128))
    with together(CPU):
        plans = {tiling: mask.plan(tiling, lambda _, same=tiling: same) for tiling in (forward, BACKWARD)}
        made = schedule_of(plans[BACKWARD], *KEY)
    for tiling, plan in plans.items():
        host = make_host_plan(bands, tiling)
        of_mask = torch.from_numpy(np.array(host.table))
        bounds = [offset // 4 for offset in host.offsets[1:]]
        for part, expected in zip(_parts(plan), of_mask.tensor_split(bounds), strict=True):
            assert torch.equal(part[: len(expected)], expected)
    items = make_host_plan(bands, BACKWARD).schedule(*KEY).items
    np.testing.assert_array_equal(made.items[: len(items)].numpy(), items)
    assert schedule_of(plans[BACKWARD], *KEY) is made


@pytest.mark.usefixtures("waiting")
def test_a_schedule_that_is_not_there_yet_is_not_given_to_other_threads():
    known = device_plan(BANDS.copy(), BACKWARD, CPU)
    with together(CPU):
        made = schedule_of(known, *KEY)
        assert not known.schedules
    assert known.schedules == {KEY: made} and schedule_of(known, *KEY) is made
