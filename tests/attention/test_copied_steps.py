"""Steps that fetch and return keys, copied for another mask: on each rank they are those that would be made for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_magi.attention import fused_comm
from megatron_magi.attention.collective_args import joined_cast
from megatron_magi.backends.registry import backend_that
from megatron_magi.backends.sm90.program import new_makers
from megatron_magi.comm import fused_steps
from megatron_magi.comm.impl import native
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.config import DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda.launch_list import LaunchList
from megatron_magi.cuda.params import struct
from megatron_magi.operands.options import AttnOptions
from megatron_magi.plan import RankPlan, make_plan
from tests.attention import cases as cs
from tests.backends.sm90.launch_records import Memory, Record, kernel_named, recorded

CPU = torch.device("cpu")
PROGRAMS = backend_that("programs", "ffa").programs
CONFIG = MagiConfig(DispatchConfig(algorithm="zigzag"), OverlapConfig(degree=1, one_launch=True))
MASKS = {"one": cs.documents([2048]), "two": cs.documents([1500, 548]), "three": cs.documents([1100, 248, 700])}


class Mover(native.Native):
    """That of one of two ranks; it queues what it is given."""

    def __init__(self, rank: int) -> None:
        self._device, self._num_sms, self._flags = CPU, 132, torch.zeros(native.FLAG_BYTES, dtype=torch.uint8)
        peers = struct("group_collective/peers.cuh", "Peers")(control=(8, 64), notice=16, timeout_ns=5)
        self._memory = SimpleNamespace(generation=0, slot_bytes=0, peers=peers)
        self._rendezvous, self._started = SimpleNamespace(rank=rank), SimpleNamespace(cuda_event=0)

    def queue(self, calls: LaunchList, raw: int, *addresses: int) -> None:
        calls.queue(*addresses)


@pytest.fixture
def movers(monkeypatch):
    """Takes the mover of a rank, as if nothing had been prepared with it; there is no group."""
    found, current = [Mover(0), Mover(1)], [0]
    monkeypatch.setattr(native, "_of_device", lambda _device: found[:1])
    monkeypatch.setattr(native, "kernel_of", lambda name, macros, _device: kernel_named(name, macros, 128, 0))
    monkeypatch.setattr(
        fused_steps, "choose_mover", lambda tensors, *_args, **_back: (found[current[0]], RowLayout.of(tensors))
    )

    def take(rank: int) -> None:
        current[0] = rank
        fused_steps._known.clear()

    return take


def steps_of(plan: RankPlan, makers, records: list[Record], memory: Memory) -> list[Record]:
    """The launches of a forward and a backward of a plan."""
    args = joined_cast(plan, CPU)
    tables = {f"peers {i}": t for i, t in enumerate(args.peers)}
    tables |= {"arrivals rows": args.arrivals.rows, "arrivals starts": args.arrivals.starts}
    q, k, v = (torch.zeros(plan.num_rows, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    memory.name({**tables, "q": q, "k": k, "v": v})
    program = fused_comm.program_of(plan, PROGRAMS, "native", CPU, lambda: None, makers)
    out, lse, _ = program.forward(q, k, v, None, AttnOptions(0.1), False)
    program.backward(torch.zeros_like(out), (q, k, v), out, lse, AttnOptions(0.1), torch.bfloat16, False)
    found = list(records)
    records.clear()
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_copied_for_another_mask_are_those_made_for_it(monkeypatch, movers, rank):
    plans = {name: make_plan(mask, CONFIG, 2).for_rank(rank) for name, mask in MASKS.items()}
    transfers = [joined_cast(plan, CPU) for plan in plans.values()]
    assert len({(args.num_send, args.num_recv) for args in transfers}) == 3
    made, copied, afresh = [], {}, {}
    with recorded(monkeypatch) as (records, memory):
        begin = LaunchList.__init__
        monkeypatch.setattr(LaunchList, "__init__", lambda *args: made.append(args) or begin(*args))
        movers(rank)
        shared = new_makers()
        for name, plan in plans.items():
            copied[name] = steps_of(plan, shared, records, memory)
        assert len(made) <= 3, "of a forward and a backward; one mask may need kernels of its own"
        made.clear()
        for name, plan in plans.items():
            movers(rank)
            afresh[name] = steps_of(plan, new_makers(), records, memory)
    assert len(made) == 6
    assert {"get_rows", "forward", "backward", "put_sums_bulk"} <= {record.kernel for record in copied["one"]}
    for name in plans:
        assert copied[name] == afresh[name], name
