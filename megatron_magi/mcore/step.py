"""What every forward step does around its batch and its model, as Megatron's own script does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_timers

# The trainer's own detector: to make another is to reset it.
from megatron.training.training import stimer, update_seqlen_stats_from_cu_seqlens


def load_batch[Batch](load: Callable[[], Batch]) -> Batch:
    """Calls ``load`` under Megatron's timer and straggler detector of batches."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = load()
    timers("batch-generator").stop()
    return batch


def run_model(model: torch.nn.Module, return_schedule_plan: bool, *inputs: Any, **named: Any) -> Any:
    """The model's output, or with ``return_schedule_plan`` its schedule plan; under the straggler detector."""
    run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    with stimer:
        return run(*inputs, **named)


def count_documents(model: torch.nn.Module, cu_seqlens: torch.Tensor | None) -> None:
    """Tells Megatron's figures of throughput how long documents are. Call it on every rank for every microbatch.

    Without it Megatron counts the operations of attention over whole sequences.

    Args:
        model: the chunk that runs the microbatch. Only training counts, and of several chunks the first.
        cu_seqlens: ``[num_documents + 1]``, best on the device; None where nothing confines attention.
    """
    if cu_seqlens is None or not is_first_run(model):
        return
    if not get_attr_wrapped_model(model, "vp_stage"):
        update_seqlen_stats_from_cu_seqlens(cu_seqlens)


def is_first_run(model: torch.nn.Module) -> bool:
    """Is a training microbatch run for the first time, not again to reproduce a suspicious result?"""
    return model.training and get_rerun_state_machine().state is not RerunState.RERUNNING_IN_PLACE
