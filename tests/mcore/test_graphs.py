"""Iterations of Megatron's trainer as one CUDA graph: what is replayed, what runs when a microbatch does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from megatron_magi.attention import AttnShape
from megatron_magi.mcore import graphs
from megatron_magi.mcore.forward_step import MagiForwardStep, check_captures
from megatron_magi.mcore.graphs import GraphedIterations, ReadBatches
from megatron_magi.mcore.loss import microbatch_loss


class Place:
    """Of a microbatch, which is a number; those above 99 do not fit."""

    def __init__(self, batch: int, _group) -> None:
        self.batch = [batch]

    def load(self, batch: int) -> str | None:
        if batch > 99:
            return "it is large"
        self.batch[0] = batch
        return None


class Graph:
    """What was captured, run again."""

    def __init__(self, run) -> None:
        self._run = run

    def replay(self) -> None:
        FullCudaGraphWrapper.result["training"][:] = self._run()


@pytest.fixture
def iterations(monkeypatch):
    """A wrapped schedule that sums microbatches up, and notes which were read from their places."""
    step = MagiForwardStep(lambda: None)
    read = iter([1, 2, 3, 4, 5, 6, 7, 100, 8, 9, 10, 11])
    monkeypatch.setattr(step, "read", lambda *_: next(read))
    seen = []

    def schedule(*, data_iterator, **_):
        (batches,) = data_iterator
        assert isinstance(batches, ReadBatches)
        found = list(batches)
        seen.append(found)
        return [sum(x[0] if isinstance(x, list) else x for x in found)]

    def capture(_wrapper, stage, static):
        places = graphs.GraphedIterations._places[stage]
        FullCudaGraphWrapper.result[stage] = [None]
        FullCudaGraphWrapper.cuda_graph[stage] = Graph(lambda: [sum(place.batch[0] for place in places)])
        assert static["data_iterator"]

    monkeypatch.setattr(graphs, "StaticBatch", Place)
    monkeypatch.setattr(graphs, "is_magi", lambda: True)
    monkeypatch.setattr(GraphedIterations, "_capture", capture)
    wrapper = GraphedIterations(schedule, cuda_graph_warmup_steps=2)
    monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", {"training": None, "validation": None})
    monkeypatch.setattr(FullCudaGraphWrapper, "result", {"training": None, "validation": None})
    monkeypatch.setattr(FullCudaGraphWrapper, "curr_iteration", {"training": 0, "validation": 0})
    named = {"forward_only": False, "model": [None], "data_iterator": [None], "num_microbatches": 2}
    yield SimpleNamespace(run=lambda: wrapper(forward_step_func=step, **named), seen=seen, wrapper=wrapper, named=named)
    GraphedIterations._places.clear()


def test_iterations_are_replayed_on_what_was_read_and_run_by_themselves_where_it_does_not_fit(iterations, caplog):
    assert [iterations.run()[0] for _ in range(2)] == [3, 7]
    assert iterations.seen == [[[3], [4]], [[3], [4]]], "places of the microbatches"
    assert iterations.run() == [11] and len(iterations.seen) == 2, "captured, and replayed"
    assert iterations.run() == [107] and iterations.seen[2:] == [[7, 100]], "its own tensors"
    assert "runs without its CUDA graph: a microbatch does not fit, it is large" in caplog.text
    assert [iterations.run()[0] for _ in range(2)] == [17, 21] and len(iterations.seen) == 3


def test_another_number_of_microbatches_than_the_graph_has_runs_by_itself(iterations, caplog):
    iterations.named["num_microbatches"] = 1
    assert iterations.run() == [1]
    iterations.named["num_microbatches"] = 2
    assert iterations.run() == [5] and iterations.run() == [9], "captured with two"
    assert [len(batches) for batches in iterations.seen] == [1, 2]
    iterations.named["num_microbatches"] = 3
    assert iterations.run() == [6 + 7 + 100] and iterations.seen[2:] == [[6, 7, 100]]
    assert "without its CUDA graph: it has 3 microbatches, the graph 2" in caplog.text
    iterations.named["num_microbatches"] = 1
    assert iterations.run() == [8] and iterations.seen[3:] == [[8]]
    iterations.named["num_microbatches"] = 2
    assert iterations.run() == [19] and len(iterations.seen) == 4, "replayed again"


def test_a_reset_drops_the_places_with_the_graph(iterations):
    iterations.run()
    iterations.wrapper.reset_cuda_graph("training")
    assert not GraphedIterations._places and FullCudaGraphWrapper.curr_iteration["training"] == 0


def test_another_forward_step_is_refused_by_name(iterations):
    with pytest.raises(ValueError, match="cuda_graph_impl: full_iteration needs the forward step"):
        iterations.wrapper(forward_step_func=print, **iterations.named)


def test_attention_of_other_kernels_is_refused_by_name():
    shape = AttnShape(4, 2, 64, 64, torch.float32)
    check_captures(SimpleNamespace(cuda_graph_impl="none"), shape)
    with pytest.raises(ValueError, match=r"cuda_graph_impl: full_iteration .* needs Hopper GPUs"):
        check_captures(SimpleNamespace(cuda_graph_impl="full_iteration"), shape)


def test_a_loss_is_scaled_alike_by_a_number_and_by_a_tensor(monkeypatch):
    args = SimpleNamespace(
        calculate_per_token_loss=False, check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False
    )
    monkeypatch.setattr("megatron_magi.mcore.loss.get_args", lambda: args)
    monkeypatch.setattr("megatron_magi.mcore.loss.get_rerun_state_machine", lambda: None)
    mask, losses = torch.ones(1, 10), torch.rand(1, 10)
    for count in (0.0, 17.0, 4096.0):
        loss, *_ = microbatch_loss(mask, losses, num_loss_tokens=count, cp_size=2)
        other, *_ = microbatch_loss(mask, losses, num_loss_tokens=torch.tensor(count), cp_size=2)
        assert other.dtype == loss.dtype and torch.allclose(loss, other, rtol=1e-6)
