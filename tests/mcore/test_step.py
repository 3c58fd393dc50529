"""What forward steps report to Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator, RerunState
from megatron.training import training

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mcore import forward_step as forward_step_module
from megatron_magi.mcore import loader, step, stock_step
from megatron_magi.mcore.batch import ReadBatches
from megatron_magi.mcore.forward_step import MagiForwardStep, end_token

CU_SEQLENS = torch.tensor([0, 3, 10])


class Model(torch.nn.Module):
    """Notes when it is run."""

    def __init__(self, events: list[str], vp_stage: int | None = None) -> None:
        super().__init__()
        self.vp_stage = vp_stage
        self._events = events

    def forward(self, *inputs: Any, **named: Any) -> str:
        self._events.append("model")
        return "output"

    def build_schedule_plan(self, *inputs: Any, **named: Any) -> str:
        self._events.append("plan")
        return "schedule plan"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a forward step, in order."""
    noted: list[str] = []

    class Detector:
        def __call__(self, bdata: bool) -> Any:
            return self._section("batch")

        def __enter__(self) -> None:
            noted.append("start model")

        def __exit__(self, *error: Any) -> None:
            noted.append("stop model")

        @contextmanager
        def _section(self, name: str) -> Iterator[None]:
            noted.append(f"start {name}")
            yield
            noted.append(f"stop {name}")

    timer = SimpleNamespace(start=lambda: noted.append("timer on"), stop=lambda: noted.append("timer off"))
    monkeypatch.setattr(step, "stimer", Detector())
    monkeypatch.setattr(step, "get_timers", lambda: lambda name, log_level=0: timer)
    return noted


def _load(events: list[str], batch: Any) -> Any:
    events.append("load")
    return batch


def _magi_step(events: list[str], monkeypatch: pytest.MonkeyPatch, loss_log: Any = None) -> Any:
    params = SimpleNamespace(plans=SimpleNamespace(stats="plan"), num_loss_tokens=1.0)
    fields = dict.fromkeys(("tokens", "position_ids", "labels", "loss_mask", "padding_mask", "documents"))
    dispatcher = SimpleNamespace(planner=None, next=lambda it: _load(events, SimpleNamespace(**fields, params=params)))
    args = SimpleNamespace(num_experts=None, context_parallel_size=2, sft=False)
    monkeypatch.setattr(forward_step_module, "get_args", lambda: args)
    monkeypatch.setattr(forward_step_module, "get_context_parallel_group", lambda: SimpleNamespace(rank=lambda: 1))
    monkeypatch.setattr(loader, "install", lambda planner: None)
    forward_step = MagiForwardStep(lambda: dispatcher, loss_log)
    forward_step.prepare()
    return forward_step


def _stock_step(events: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    batch = dict.fromkeys((*stock_step._SEQUENCES, *stock_step._OPTIONAL))
    monkeypatch.setattr(stock_step, "_next_batch", lambda iterator, vp_stage: _load(events, batch))
    return stock_step.StockForwardStep(SimpleNamespace(logits_load_dir=None))


@pytest.mark.parametrize("make_step", [_magi_step, _stock_step], ids=["magi", "stock"])
@pytest.mark.parametrize("wants_plan", [False, True], ids=["output", "schedule_plan"])
def test_stragglers_are_looked_for_in_batches_and_in_the_model(
    make_step: Any, wants_plan: bool, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, _ = make_step(events, monkeypatch)(iter(()), Model(events), wants_plan)
    assert output == ("schedule plan" if wants_plan else "output")
    batch = ["timer on", "start batch", "load", "stop batch", "timer off"]
    assert events == [*batch, "start model", "plan" if wants_plan else "model", "stop model"]


def test_the_detector_is_the_one_that_the_trainer_configures() -> None:
    assert step.stimer is training.stimer


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A rerun machine in an iteration's first run; Megatron's statistics are empty."""
    machine = SimpleNamespace(state=RerunState.INITIAL_RUN)
    monkeypatch.setattr(step, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    monkeypatch.setattr(training, "_seqlen_stats_active", False)
    return machine


def test_documents_of_training_microbatches_are_counted(machine: SimpleNamespace) -> None:
    step.count_documents(Model([]), CU_SEQLENS)
    step.count_documents(Model([], vp_stage=0), CU_SEQLENS)
    assert training.consume_seqlen_stats_in_iteration() == (20.0, 2 * (9 + 49))


@pytest.mark.parametrize("case", ["evaluation", "second_chunk", "replay", "nothing_confines"])
def test_documents_are_not_counted_in(case: str, machine: SimpleNamespace) -> None:
    model = Model([], vp_stage=1 if case == "second_chunk" else None)
    model.train(case != "evaluation")
    if case == "replay":
        machine.state = RerunState.RERUNNING_IN_PLACE
    step.count_documents(model, None if case == "nothing_confines" else CU_SEQLENS)
    assert training.consume_seqlen_stats_in_iteration() == (None, None)


def test_a_replayed_microbatch_adds_no_plan_to_the_log(
    machine: SimpleNamespace, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[str] = []
    forward_step = _magi_step(events, monkeypatch, SimpleNamespace(add_plan=plans.append))
    model = Model(events)
    forward_step(iter(()), model)
    machine.state = RerunState.RERUNNING_IN_PLACE
    forward_step(iter(()), model)
    machine.state = RerunState.INITIAL_RUN
    forward_step(iter(()), model.eval())
    assert plans == ["plan"]


def test_the_loss_looks_ahead_in_what_megatron_reads_but_not_in_captured_iterations(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SimpleNamespace(planned=None)
    forward_step, reads = _magi_step(events, monkeypatch), RerunDataIterator(iter([batch, batch]))
    _, loss = forward_step(reads, Model(events))
    meanwhile = loss.keywords["meanwhile"]
    assert meanwhile.func == forward_step.look and meanwhile.args == (reads.iterable,)
    read = forward_step.read(reads, Model(events))
    _, loss = forward_step(ReadBatches([read]), Model(events))
    assert loss.keywords["meanwhile"] is None


def test_a_dispatcher_is_made_once_for_a_set_of_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart inside the process makes new groups and calls the same forward step."""
    groups, made, planners = [object()], [], []
    monkeypatch.setattr(forward_step_module, "get_context_parallel_group", lambda: groups[-1])
    monkeypatch.setattr(loader, "install", planners.append)
    forward_step = MagiForwardStep(lambda: made.append(groups[-1]) or SimpleNamespace(planner=len(made)))
    for expected in (1, 1, 2, 2):
        if expected > len(groups):
            groups.append(object())
        forward_step.prepare()
        assert len(made) == expected
    assert made == groups
    assert planners == [1, 2]


@pytest.mark.parametrize("vp_stage", [None, 1])
def test_a_microbatch_that_cannot_be_read_is_named(
    vp_stage: int | None, events: list[str], machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_step = _magi_step(events, monkeypatch)
    args, model = forward_step_module.get_args(), Model(events, vp_stage)
    args.curr_iteration = 6
    forward_step(iter(()), Model(events, vp_stage=0))
    for _ in range(2):
        forward_step(iter(()), model)
    good = forward_step._dispatcher.next

    def fail(data_iterator: Iterator) -> None:
        raise ValueError("cu_seqlens: bad")

    for trains, iteration, place in (
        (True, 6, "microbatch 3 of iteration 7"),
        (True, 7, "microbatch 1 of iteration 8"),
        (False, 7, "microbatch 1 of the evaluation after iteration 8"),
    ):
        args.curr_iteration = iteration
        forward_step._dispatcher.next = fail
        with pytest.raises(ValueError, match=r"^cu_seqlens: bad") as error:
            forward_step(iter(()), model.train(trains))
        assert error.value.__notes__ == [f"In {place}."]
        forward_step._dispatcher.next = good


def test_items_without_what_other_backends_broadcast_are_refused() -> None:
    """On tensor-parallel rank 0, which alone reads: the others would wait for ever."""
    items = dict.fromkeys(stock_step._SEQUENCES)
    stock_step._check_fields(items, SimpleNamespace(create_attention_mask_in_dataloader=False))
    with pytest.raises(ValueError, match=r"^dataset_provider: .* no attention_mask; give --no-create-attention"):
        stock_step._check_fields(items, SimpleNamespace(create_attention_mask_in_dataloader=True))
    del items["labels"]
    with pytest.raises(ValueError, match=r"^dataset_provider: its items have no labels$"):
        stock_step._check_fields(items, SimpleNamespace(create_attention_mask_in_dataloader=False))


def test_documents_that_no_token_ends_are_an_error() -> None:
    """They would see each other: a tokenizer has no EOD token, or Megatron's data sets replace it as padding."""
    args = SimpleNamespace(allow_ambiguous_pad_tokens=False, dataloader_inter_document_masking=False)
    assert end_token(args, SimpleNamespace(eod=0)) == 0
    assert end_token(args, SimpleNamespace(eod=7, pad=7)) == 7
    with pytest.raises(ValueError, match=r"^reset_attention_mask: .* this tokenizer has none"):
        end_token(args, SimpleNamespace(eod=None))
    args.allow_ambiguous_pad_tokens = True
    assert end_token(args, SimpleNamespace(eod=7, pad=8)) == 7
    assert end_token(args, SimpleNamespace(eod=7)) == 7  # Megatron takes a number that is no token
    assert end_token(args, SimpleNamespace(eod=0, pad=0)) == 0  # it is replaced by itself
    with pytest.raises(ValueError, match=r"^allow_ambiguous_pad_tokens: .* in the place of --reset-attention-mask"):
        end_token(args, SimpleNamespace(eod=7, pad=7))
    args.dataloader_inter_document_masking = True  # bounds come with the tokens
    assert end_token(args, SimpleNamespace(eod=7, pad=7)) == 7
    assert end_token(args, SimpleNamespace(eod=None)) is None


def shared_rates(rank, num_ranks, tp_sizes):
    own = replace(DEFAULT, host_forward_us=100.0 + rank)
    found = MagiConfig(dispatch=DispatchConfig(rates=own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_step_module, "with_present_rates", lambda _config: found)
        patch.setattr(forward_step_module, "_is_on_gpus", lambda: True)
        return [forward_step_module._with_shared_rates(MagiConfig(), size).dispatch.rates for size in tp_sizes]


def test_all_ranks_choose_dispatches_by_the_rates_of_rank_0(ranks):
    """Stages of a pipeline too, which compare no plans."""
    tp_sizes, per_node = (1, 4, 16), (8, 2, 1)
    expected = [replace(DEFAULT, host_forward_us=100.0, ranks_per_node=size) for size in per_node]
    assert ranks(2, shared_rates, tp_sizes) == [expected] * 2


def unreadable(rank, num_ranks):
    def fail(_config):
        raise ValueError("calibration: no JSON")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_step_module, "with_present_rates", fail)
        patch.setattr(forward_step_module, "_is_on_gpus", lambda: True)
        with pytest.raises(ValueError, match="calibration: no JSON"):
            forward_step_module._with_shared_rates(MagiConfig(), 1)


def test_a_calibration_that_cannot_be_read_is_an_error_on_all_ranks(ranks):
    ranks(2, unreadable)


def test_cpus_keep_areas_even_as_rates_are_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_step_module, "_is_on_gpus", lambda: False)
    assert forward_step_module._with_shared_rates(MagiConfig(), 1).dispatch == DispatchConfig("affinity")
    named = MagiConfig(dispatch=DispatchConfig("zigzag"))
    monkeypatch.setattr(forward_step_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(forward_step_module.dist, "broadcast_object_list", lambda _found, src: None)
    assert forward_step_module._with_shared_rates(named, 1) == named
