"""Room in the slots of ranks that reach each other's memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.comm import group_collective, transport
from megatron_magi.comm import slots as native_slots
from megatron_magi.comm.group_collective import GroupCastArgs
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.comm.row_layout import RowLayout


class Slots:
    """Memory that grows up to ``most`` bytes a slot."""

    def __init__(self, most: int) -> None:
        self.most, self.slot_bytes, self.grown = most, 0, []

    def grow(self, slot_bytes: int, keep: bool) -> str | None:
        assert not keep, "there are no graphs"
        self.grown.append(slot_bytes)
        self.slot_bytes = slot_bytes if slot_bytes <= self.most else 0
        return None if self.slot_bytes else "rank 1: out of memory"


def test_slots_grow_with_need_and_what_does_not_fit_is_refused():
    layout = RowLayout.make(((8, 128), (8, 128)), (torch.bfloat16, torch.bfloat16))
    slots = Slots(256 << 20)
    room = native_slots.Room(slots)
    assert room.refusal(layout, 0) is None and room.refusal(layout, 4096) is None and slots.grown == [16 << 20]
    assert room.refusal(layout, 4097) is None and slots.grown[1:] == [32 << 20]
    assert "at most 1073741824 bytes" in room.refusal(layout, (1 << 18) + 1)
    assert "built with peers" in room.refusal(layout, None)
    assert room.refusal(RowLayout.make(((),) * 4, (torch.int8,) * 4), 1) is None
    assert "at most 4 tensors" in room.refusal(RowLayout.make(((),) * 5, (torch.int8,) * 5), 1)
    assert len(slots.grown) == 2
    assert "rank 1: out of memory" in room.refusal(layout, 1 << 17) and slots.grown[2:] == [512 << 20]
    assert "at most 33554432 bytes" in room.refusal(layout, 1 << 17)  # it is not tried again
    assert room.refusal(layout, 4097) is None and slots.grown[3:] == [32 << 20]


def test_no_slot_holds_more_chunks_than_can_be_told_of():
    for row_bytes in [*range(16, 1 << 17, 16), native_slots.MOST_BYTES]:
        fits = native_slots.MOST_BYTES // row_bytes
        for num_rows in {fits, *(1 << n for n in range(fits.bit_length()))}:
            for shift in (native_slots.chunk_shift(row_bytes), native_slots.sent_shift(row_bytes, num_rows)):
                assert -(-num_rows >> shift) <= native_slots.MAX_CHUNKS


def test_ranks_that_did_not_meet_to_make_room_do_not_try_again_alone():
    class Broken(Slots):
        def grow(self, slot_bytes, keep):
            super().grow(slot_bytes, keep)
            raise RuntimeError("native: rank 1 did not arrive within 3 s")

    layout, slots = RowLayout.make(((8, 128),), (torch.bfloat16,)), Broken(1 << 30)
    room = native_slots.Room(slots)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 did not arrive"):
            room.refusal(layout, 1)
    assert len(slots.grown) == 1


def test_without_any_memory_everything_is_refused_at_once():
    layout, slots = RowLayout.make(((8, 128),), (torch.bfloat16,)), Slots(0)
    room = native_slots.Room(slots)
    assert "out of memory" in room.refusal(layout, 1)
    assert "no room" in room.refusal(layout, 0) and "at most 0 bytes" in room.refusal(layout, 1)
    assert len(slots.grown) == 1


def test_room_is_made_for_the_largest_call_of_a_plan_before_any_begins(monkeypatch):
    there, back = (RowLayout.make(((8, 128),), (t,)) for t in (torch.bfloat16, torch.float32))
    slots = Slots(1 << 30)
    room = native_slots.Room(slots)
    way = transport.Transport(room, None, None, 0)
    monkeypatch.setattr(transport, "_find", lambda *_: way)
    sizes = ((3000, 100, 9000), (20_000, 9000, 50_000), (10_000, 4000, 4000))
    casts = []
    for most in sizes:
        rows = PeerRows(np.array([0]), [0, 0], [0, 0], *most)
        casts.append(GroupCastArgs.build(np.array([0]), [0, 1], [0, 1], peers=rows))
    group = Slots(0)  # anything that can be referred to
    group_collective.make_room(casts, there, back, group)
    assert slots.grown == [256 << 20]  # of 50,000 rows of 4 KB
    for most_rows, most_recv, most_send in sizes:
        assert room.refusal(there, most_rows) is None and room.refusal(there, most_recv) is None
        assert room.refusal(back, most_send) is None
    for cast in casts:  # what a rank may ask alone from then on
        for dtype, is_back in ((torch.bfloat16, False), (torch.float32, True)):
            mover, _ = group_collective.choose_mover(
                [torch.zeros(1, 8, 128, dtype=dtype)], cast, group, "auto", is_back
            )
            assert mover is room
    assert len(slots.grown) == 1
