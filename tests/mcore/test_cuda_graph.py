"""Iterations of Megatron's trainer as one CUDA graph: what is replayed, what runs when a microbatch does not fit."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode

from megatron_magi.attention import AttnShape
from megatron_magi.mcore import cuda_graph, forward_step
from megatron_magi.mcore.batch import ReadBatches
from megatron_magi.mcore.cuda_graph import GraphedIterations
from megatron_magi.mcore.forward_step import MagiForwardStep, check_captures
from megatron_magi.mcore.loader import LoadedBatch
from megatron_magi.mcore.loss import microbatch_loss
from megatron_magi.mcore.user_step import UserForwardStep


class Place:
    """Of a microbatch, which is a number; there is room for numbers of as many digits as the longest it knows has."""

    def __init__(self, batch: int, group: object, samples: Sequence[int]) -> None:
        self.batch, self.group, self.has_run = [batch], group, False
        self._room = max(len(str(x)) for x in (batch, *samples))

    @staticmethod
    def sample_of(batch: int) -> int:
        return batch

    @staticmethod
    def load(places: Sequence[Place], batches: Sequence[int]) -> tuple[int, str] | None:
        for place, batch in zip(places, batches, strict=True):
            if len(str(batch)) > place._room:
                return batch, f"a microbatch does not fit, it has {len(str(batch))} digits"
        for place, batch in zip(places, batches, strict=True):
            place.batch[0] = batch
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
    step._group = ranks = Group(2)
    monkeypatch.setattr(cuda_graph.dist, "get_world_size", lambda: 2)
    left = list(range(1, 10))
    monkeypatch.setattr(step, "read", lambda *_: left.pop(0))
    seen, forgotten = [], []
    monkeypatch.setattr(cuda_graph, "forget_graphs", forgotten.append)

    def schedule(*, data_iterator, **_):
        (batches,) = data_iterator
        assert isinstance(batches, ReadBatches)
        found = list(batches)
        seen.append(found)
        return [sum(x[0] if isinstance(x, list) else x for x in found)]

    def capture(_wrapper, stage, static):
        places = cuda_graph.GraphedIterations._places[stage]
        FullCudaGraphWrapper.result[stage] = [None]
        FullCudaGraphWrapper.cuda_graph[stage] = Graph(lambda: [sum(place.batch[0] for place in places)])
        assert static["data_iterator"]
        return FullCudaGraphWrapper.cuda_graph[stage]

    monkeypatch.setattr(cuda_graph, "StaticBatch", Place)
    monkeypatch.setattr(cuda_graph, "is_magi", lambda: True)
    monkeypatch.setattr(GraphedIterations, "_capture", capture)
    wrapper = GraphedIterations(schedule, cuda_graph_warmup_steps=2)
    monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", {"training": None, "validation": None})
    monkeypatch.setattr(FullCudaGraphWrapper, "result", {"training": None, "validation": None})
    monkeypatch.setattr(FullCudaGraphWrapper, "curr_iteration", {"training": 0, "validation": 0})
    named = {"forward_only": False, "model": [None], "data_iterator": [None], "num_microbatches": 2}
    monkeypatch.setattr(GraphedIterations, "_places", {})
    monkeypatch.setattr(GraphedIterations, "_samples", {})
    monkeypatch.setattr(GraphedIterations, "_growths", {})
    run = lambda: wrapper(forward_step_func=step, **named)  # noqa: E731
    return SimpleNamespace(
        run=run, step=step, seen=seen, wrapper=wrapper, named=named, left=left, forgotten=forgotten, ranks=ranks
    )


def test_iterations_are_replayed_on_what_was_read(iterations):
    assert [iterations.run()[0] for _ in range(2)] == [3, 7]
    assert iterations.seen == [[[3], [4]], [[3], [4]]], "places of the microbatches"
    assert iterations.run() == [11] and len(iterations.seen) == 2, "captured, and replayed"
    assert iterations.run() == [15] and len(iterations.seen) == 2


def test_the_next_microbatch_is_fetched_while_an_iteration_is_replayed(iterations, monkeypatch):
    taken = []

    def source():
        for number in range(1, 9):
            taken.append(number)
            # As a worker sends it: what the process itself plans is not fetched ahead.
            yield pickle.loads(pickle.dumps(LoadedBatch({"number": number}, ValueError("not planned"))))

    machine = SimpleNamespace(get_mode=lambda: RerunMode.DISABLED)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(iterations.step, "read", lambda iterator, _: next(iterator).fields["number"])
    begun = []
    iterations.step._dispatcher = SimpleNamespace(begin=lambda batch: begun.append(batch.fields["number"]))
    iterations.named["data_iterator"] = [RerunDataIterator(source())]
    assert [iterations.run()[0] for _ in range(2)] == [3, 7] and taken == [1, 2, 3, 4], "not captured yet"
    assert iterations.run() == [11] and taken == [1, 2, 3, 4, 5, 6, 7]
    assert iterations.run() == [15] and taken == [1, 2, 3, 4, 5, 6, 7, 8]
    assert begun == [7]


def test_a_microbatch_without_room_gets_a_larger_place_and_the_graph_is_captured_again(iterations, caplog):
    iterations.left[:] = [1, 2, 3, 40, 5, 6, 7, 8, 9, 10, 11, 12, 130, 14, 15, 16, 17, 180, 19, 20]
    assert iterations.run() == [3] and iterations.run() == [43] and not caplog.text, "there is no graph yet"
    assert iterations.run() == [11] and iterations.seen[1:] == [[[5], [6]]] * 2, "the new places run before a capture"
    assert [iterations.run()[0] for _ in range(3)] == [15, 19, 23] and len(iterations.seen) == 3, "replayed"
    assert len(iterations.forgotten) == 1, "for the places of the first iteration"
    iterations.run()
    assert "a training iteration is captured again, with more room: a microbatch does not fit, it has 3" in caplog.text
    assert iterations.seen[3:] == [[[130], [14]]] and iterations.forgotten == [iterations.ranks] * 2
    assert iterations.run() == [31] and len(iterations.seen) == 5, "warms up again"
    assert [iterations.run()[0] for _ in range(2)] == [197, 39] and len(iterations.seen) == 5, (
        "replayed in larger places"
    )


def test_replicas_capture_again_together(iterations, monkeypatch, caplog):
    large = {3}  # iterations in which ranks 2 and 3 have a microbatch that does not fit
    asked = []

    def agreement(value: int, group: None, _what: str) -> SimpleNamespace:
        asked.append(value)
        return SimpleNamespace(values=lambda: [value, value, *[int(len(asked) - 1 in large)] * 2])

    monkeypatch.setattr(cuda_graph.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(cuda_graph, "start_agreement", agreement)
    assert [iterations.run()[0] for _ in range(3)] == [3, 7, 11] and len(iterations.seen) == 2
    assert iterations.run() == [15] and len(iterations.seen) == 3, "not replayed"
    assert "captured again, with more room: a microbatch of ranks [2, 3] does not fit" in caplog.text
    assert asked == [0] * 4 and GraphedIterations._samples["training"] == [1]


def test_graphs_are_not_captured_again_for_ever(iterations, caplog):
    digits = range(1, 14)
    iterations.left[:] = [10**n for n in digits for _ in range(2)]
    for n in digits:
        assert iterations.run() == [2 * 10**n]
    assert caplog.text.count("runs without its CUDA graph: a microbatch does not fit, it has") == 13 - 9
    assert iterations.seen[-1] == [10**13] * 2, "its own tensors"


def test_another_number_of_microbatches_than_the_graph_has_runs_by_itself(iterations, caplog):
    iterations.left[:] = [1, 2, 3, 4, 5, 6, 7, 1, 8, 9, 1]
    iterations.named["num_microbatches"] = 1
    assert iterations.run() == [1]
    iterations.named["num_microbatches"] = 2
    assert iterations.run() == [5] and iterations.run() == [9], "captured with two"
    assert [len(batches) for batches in iterations.seen] == [1, 2]
    iterations.named["num_microbatches"] = 3
    assert iterations.run() == [6 + 7 + 1] and iterations.seen[2:] == [[6, 7, 1]]
    assert "without its CUDA graph: it has 3 microbatches, the graph 2" in caplog.text
    iterations.named["num_microbatches"] = 1
    assert iterations.run() == [8] and iterations.seen[3:] == [[8]]
    iterations.named["num_microbatches"] = 2
    assert iterations.run() == [10] and len(iterations.seen) == 4, "replayed again"


def test_a_reset_drops_the_places_with_the_graph(iterations):
    iterations.run()
    iterations.wrapper.reset_cuda_graph("training")
    assert iterations.forgotten == [iterations.ranks]
    assert not GraphedIterations._places and FullCudaGraphWrapper.curr_iteration["training"] == 0


@pytest.mark.parametrize("step", [print, UserForwardStep(print, lambda: None)], ids=lambda step: type(step).__name__)
def test_another_forward_step_is_refused_by_name(iterations, step):
    with pytest.raises(ValueError, match="cuda_graph_impl: full_iteration needs the forward step"):
        iterations.wrapper(forward_step_func=step, **iterations.named)


class Group:
    """Of so many ranks."""

    def __init__(self, count: int) -> None:
        self.size = lambda: count


def test_what_cannot_be_captured_is_refused_by_name(monkeypatch):
    shape, args = AttnShape(4, 2, 64, 64, torch.float32), SimpleNamespace(cuda_graph_impl="full_iteration")
    check_captures(SimpleNamespace(cuda_graph_impl="none"), shape, "all_to_all", Group(2))
    with pytest.raises(ValueError, match=r"cuda_graph_impl: full_iteration .* needs Hopper GPUs"):
        check_captures(args, shape, "auto", Group(1))
    shape = shape._replace(num_sms=132)
    check_captures(args, shape, "all_to_all", Group(1))
    with pytest.raises(ValueError, match=r"cuda_graph_impl: .* not 'all_to_all'; drop MAGI_ATTENTION_NATIVE_GRPCOLL"):
        check_captures(args, shape, "all_to_all", Group(2))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        forward_step, "peer_collectives", lambda *_: (None, "needs NVLink between all GPUs of the group")
    )
    with pytest.raises(ValueError, match=r"cuda_graph_impl: .*; here that needs NVLink"):
        check_captures(args, shape, "auto", Group(2))
    monkeypatch.setattr(forward_step, "peer_collectives", lambda *_: (object(), ""))
    check_captures(args, shape, "native", Group(2))


def test_a_loss_is_scaled_alike_by_a_number_and_by_a_tensor(monkeypatch):
    args = SimpleNamespace(
        calculate_per_token_loss=False, check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False
    )
    monkeypatch.setattr("megatron_magi.mcore.loss.get_args", lambda: args)
    monkeypatch.setattr("megatron_magi.mcore.loss.get_rerun_state_machine", lambda: None)
    mask, losses = torch.ones(1, 10), torch.rand(1, 10)
    mask[0, 3], losses[0, 3] = 0.0, torch.inf  # what does not count may be anything
    for count in (0.0, 17.0, 4096.0):
        loss, *_ = microbatch_loss(mask, losses, num_loss_tokens=count, cp_size=2)
        other, *_ = microbatch_loss(mask, losses, num_loss_tokens=torch.tensor(count), cp_size=2)
        assert other.dtype == loss.dtype and torch.allclose(loss, other, rtol=1e-6) and loss.isfinite()


def test_a_graph_shares_the_memory_of_another_but_takes_none_that_all_graphs_have_left(monkeypatch):
    class Captured:
        def register_generator_state(self, _state: object) -> None:
            pass

        def pool(self) -> int:
            return self.memory

    def capturing(graph: Captured, pool: int, **_: object) -> contextlib.AbstractContextManager:
        graph.memory = pool
        return contextlib.nullcontext()

    handles = itertools.count(1)
    for name, value in {
        "CUDAGraph": Captured, "graph": capturing, "graph_pool_handle": lambda: next(handles),
        "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph.dist, "barrier", lambda: None)
    monkeypatch.setattr(cuda_graph, "get_all_rng_states", dict)
    monkeypatch.setattr(cuda_graph, "get_shared_capture_stream", lambda: None)
    for name, value in {"cuda_graph": None, "result": None, "curr_iteration": 0}.items():
        monkeypatch.setattr(FullCudaGraphWrapper, name, dict.fromkeys(("training", "validation"), value))
    wrapper = GraphedIterations(lambda: "done", use_single_mempool=True)
    assert [wrapper._capture(stage, {}).memory for stage in ("training", "validation")] == [1, 1]
    wrapper.reset_cuda_graph("training")
    assert wrapper._capture("training", {}).memory == 1
    wrapper.reset_cuda_graph()
    assert wrapper._capture("training", {}).memory == 2
    wrapper.use_single_mempool = False
    assert wrapper._capture("validation", {}).memory == 3
