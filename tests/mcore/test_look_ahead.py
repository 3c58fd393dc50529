"""Microbatches that are fetched before they are due."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode

from megatron_magi.attention import AttnShape, PreparedBatch
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mcore import loss as loss_module
from megatron_magi.mcore.batch import BatchDispatcher
from megatron_magi.mcore.loader import LoadedBatch
from megatron_magi.mcore.look_ahead import LookAhead, look_ahead_of
from megatron_magi.mcore.planner import Planner

DEVICE = torch.device("cpu")


class Source(Iterator[Any]):
    """Counts what was taken; an item that is an exception is raised."""

    def __init__(self, items: list) -> None:
        self._items, self.taken = items, 0

    def __next__(self) -> Any:
        if self.taken == len(self._items):
            raise StopIteration
        self.taken += 1
        item = self._items[self.taken - 1]
        if isinstance(item, Exception):
            raise item
        return item


def _of_a_worker(batch: LoadedBatch) -> LoadedBatch:
    return pickle.loads(pickle.dumps(batch))


def _ignore(batch: LoadedBatch) -> None:
    """For `LookAhead.look`."""


def _planned(count: int) -> list[LoadedBatch]:
    return [_of_a_worker(LoadedBatch({"number": i}, ValueError("not planned"))) for i in range(count)]


def test_items_are_the_same_and_fetched_once() -> None:
    batches = _planned(3)
    source = Source(batches)
    ahead = LookAhead(source)
    assert next(ahead) is batches[0]
    ahead.look(_ignore)
    ahead.look(_ignore)
    assert source.taken == 2
    assert next(ahead) is batches[1]
    assert next(ahead) is batches[2]
    ahead.look(_ignore)
    with pytest.raises(StopIteration):
        next(ahead)
    source._items.extend(_planned(1))  # as a source that begins again
    assert next(ahead) is source._items[-1]


def test_an_error_of_the_data_loader_is_raised_when_the_item_is_due() -> None:
    first, last = _planned(2)
    ahead, begun = LookAhead(Source([first, RuntimeError("the disk is gone"), last])), []
    next(ahead)
    ahead.look(begun.append)
    failed = next(ahead)
    assert begun == [failed]
    with pytest.raises(RuntimeError, match="the disk is gone"):
        failed.bring(DEVICE)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        BatchDispatcher(None, None).dispatch(failed)
    assert next(ahead) is last


PLANNED_HERE = LoadedBatch({}, ValueError("not planned"))


@pytest.mark.parametrize(
    "items", [[], [{}, {}], [PLANNED_HERE] * 2], ids=["nothing read", "the user's own", "no workers"]
)
def test_nothing_is_fetched_where_no_worker_plans(items: list) -> None:
    source = Source(items)
    ahead = LookAhead(source)
    if items:
        next(ahead)
    ahead.look(_ignore)
    assert source.taken == len(items[:1])


def test_replays_of_an_iteration_do_not_take_what_was_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(get_mode=lambda: RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    batches = _planned(4)
    data_iterator = RerunDataIterator(Source(batches))
    ahead = look_ahead_of(data_iterator)
    assert look_ahead_of(data_iterator) is ahead
    for i in range(2):
        assert next(data_iterator) is batches[i]
        ahead.look(_ignore)
    data_iterator.rewind()
    for i in range(2):
        assert next(data_iterator) == {"number": i}
        ahead.look(_ignore)
    data_iterator.advance()
    assert next(data_iterator) is batches[2]
    assert next(data_iterator) is batches[3]


def test_other_iterators_are_left_alone() -> None:
    assert look_ahead_of(iter([])) is None


def test_a_data_loader_that_saves_its_state_is_left_where_megatron_looks_for_it() -> None:
    class Saving(Source):
        def save_state(self) -> dict:
            return {"taken": self.taken}

    data_iterator = RerunDataIterator(Saving([{}]))
    assert look_ahead_of(data_iterator) is None
    assert data_iterator.iterable.save_state() == {"taken": 0}


def test_a_batch_that_was_brought_is_not_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    brought, to = [], PreparedBatch.to
    monkeypatch.setattr(PreparedBatch, "to", lambda self, device: brought.append(self) or to(self, device))
    tokens = torch.arange(32)[None]
    fields = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(1, 32), "position_ids": tokens}
    shape = AttnShape(2, 1, 16, 16, torch.float32)
    planner = Planner(MagiConfig(dispatch=DispatchConfig(alignment=4)), 1, 2, shape)
    dispatcher, batch = BatchDispatcher(planner, None), LoadedBatch(fields, planner(fields))
    arrays = batch.bring(DEVICE)
    local = dispatcher.dispatch(batch)
    assert len(brought) == 1
    assert local.tokens.data_ptr() == arrays["tokens"].data_ptr()
    assert torch.equal(local.tokens, dispatcher.dispatch(fields).tokens)


def test_a_batch_without_a_plan_raises_why() -> None:
    with pytest.raises(ValueError, match="not planned"):
        _planned(1)[0].bring(DEVICE)


def test_the_host_looks_ahead_before_it_waits_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(loss_module, "get_args", lambda: SimpleNamespace(calculate_per_token_loss=False))
    monkeypatch.setattr(loss_module, "_check", lambda args, loss: events.append("wait"))
    ones = torch.ones(1, 4)
    loss_module.microbatch_loss(ones, ones, meanwhile=lambda: events.append("look"))
    assert events == ["look", "wait"]
