"""Tables of prepared batches on their device: who finds them, who waits for them, and how long they stay."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_magi.attention import fused_comm, prepare_batch
from megatron_magi.backends import base
from megatron_magi.backends.registry import backend_that
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.host_tables import MaskTables
from megatron_magi.config import AttendConfig, CommConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan
from megatron_magi.runtime.lru import LruCache
from tests.attention.test_prepared_batch import CPU, MASKS, SHAPE, attend, refuse
from tests.backends.sm90.fake_driver import USE_STREAMS, fake_driver

PROGRAMS = backend_that("programs", "ffa").programs


def test_tables_are_waited_for_and_held_on_other_streams_than_that_of_their_copy(monkeypatch):
    class Stream:
        def __init__(self, handle):
            self.cuda_stream, self.done = handle, []

        def wait_event(self, event):
            self.done.append(event)

    class Table:
        is_cuda, device = True, torch.device("cuda", 0)

        def record_stream(self, stream):
            stream.done.append(self)

    table, items, made_later = Table(), Table(), Table()
    ready = hopper_plan.Ready("copied", 7)
    plan = hopper_plan.DevicePlan(None, table, ready, 0)
    plan.schedules.update(first=hopper_plan.DeviceSchedule(items, 0, ready))
    plan.schedules.update(later=hopper_plan.DeviceSchedule(made_later, 0))
    monkeypatch.setattr(base, "is_capturing", lambda _device: False)
    for handle, expected in ((7, [made_later]), (8, ["copied", table, items, made_later])):
        stream = Stream(handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device, stream=stream: stream)
        plan.hold_for_stream()
        assert stream.done == expected
    # What a graph reads would have to live as long as the graph.
    monkeypatch.setattr(base, "is_capturing", lambda device: device == table.device)
    with pytest.raises(RuntimeError, match="make_static_key"):
        plan.hold_for_stream()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_launches_are_made_ready_for_the_stream_on_which_the_batch_comes(monkeypatch, head_dim):
    """A call on another stream makes its own, and waits there for the tables, which it keeps until it has used them."""
    config, shape = MagiConfig(attend=AttendConfig(impl="ffa")), SHAPE._replace(head_dim=head_dim, head_dim_v=head_dim)

    def batch_of(like, lengths):
        batch = prepare_batch({0: make_plan(builders.varlen(doc_lengths=lengths), config).for_rank(0)}, shape, config)
        batch.to(CPU, like=like)
        return batch.plans

    def streams(plans):
        """Of launches in one list, and of others: those of the backward of wide heads."""
        (call,) = plans[0].runtime.calls.values()
        return {key[0] for key in call.program.bound}, {key[0] for stage in call.stages for key in stage.bound}

    with fake_driver(monkeypatch):
        current, held = [0], []
        for module in USE_STREAMS:
            monkeypatch.setattr(module, "current_stream", lambda _device: current[0])
        first = batch_of({}, [700, 548])  # of which it has nothing that is like it
        for stream in (7, 7, 0, 0):
            current[0] = stream
            attend(first[0], shape, config)
        of_parts = {0, 7} if head_dim == 256 else set()
        assert streams(first) == ({0, 7}, of_parts)
        second = batch_of(first, [500, 748])
        assert streams(second) == ({0}, of_parts & {0})
        monkeypatch.setattr(hopper_plan.DevicePlan, "hold_for_stream", lambda _: held.append(current[0]))
        current[0] = 7
        attend(second[0], shape, config)
        assert held and set(held) == {7}


def test_batches_of_equal_masks_find_their_tables_whichever_ends_first(monkeypatch):
    config = MagiConfig(attend=AttendConfig(impl="ffa"))
    with fake_driver(monkeypatch):
        monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30))
        for left in (0, 1):
            batches = [prepare_batch({0: make_plan(MASKS["many"], config).for_rank(0)}, SHAPE, config) for _ in (0, 1)]
            for batch in batches:
                batch.to(CPU)
            del batch, batches[1 - left]
            with monkeypatch.context() as patch:
                refuse(patch)
                attend(batches[0].plans[0], SHAPE, config)


def test_passes_go_with_a_batch_only_where_it_brought_their_tables():
    config = MagiConfig(attend=AttendConfig(impl="ffa"))
    for shape, brings in ((SHAPE, True), (SHAPE._replace(num_sms=None), False)):
        batch = prepare_batch({0: make_plan(MASKS["many"], config).for_rank(0)}, shape, config)
        batch.to(CPU)
        assert fused_comm.program_of(batch.plans[0], PROGRAMS, "auto", CPU, lambda: None, {}).is_prepared == brings


def test_tables_are_those_of_a_deterministic_backward_also_where_torch_asks_for_it(monkeypatch):
    def prepared_bytes(**options):
        config = MagiConfig(attend=AttendConfig(impl="ffa", **options))
        return prepare_batch({0: make_plan(MASKS["many"], config).for_rank(0)}, SHAPE, config).num_bytes

    plain, expected = prepared_bytes(), prepared_bytes(deterministic=True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert prepared_bytes() == expected != plain


def test_threads_that_ask_for_tables_of_stages_at_once_find_the_same(monkeypatch):
    config = MagiConfig(attend=AttendConfig(impl="ffa"), comm=CommConfig("native", verify=False))
    batch = prepare_batch({0: make_plan(MASKS["causal"], config, 2).for_rank(0)}, SHAPE, config)
    batch.to(CPU)
    found, keep, both = {}, MaskTables.keep, threading.Barrier(2, timeout=900)

    def note(self, bands, tensors, *rest):
        both.wait()
        kept = keep(self, bands, tensors, *rest)
        found.setdefault(threading.get_ident(), []).append([plan.memory.data_ptr() for plan in kept])
        return kept

    monkeypatch.setattr(MaskTables, "keep", note)
    with ThreadPoolExecutor(2) as threads:
        for asked in [threads.submit(batch.plans[0].runtime.keep_stage_tables) for _ in (0, 1)]:
            asked.result()
    first, second = found.values()
    assert first == second and all(first)
