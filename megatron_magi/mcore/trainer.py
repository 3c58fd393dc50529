"""What Megatron's trainer does otherwise where batches are dispatched.

Dispatch may pad. Arguments are saved in checkpoints, choose the data and enter the figures of
throughput, so ``args.seq_length`` stays what the user gave, and only schedules are told the
length of the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_magi.mcore import seams
from megatron_magi.mcore.sample_packing import is_asked_for
from megatron_magi.mcore.settings import buffer_length, is_magi

_SCHEDULE, _SKIP = "training.training:get_forward_backward_func", "training.training:dummy_train_step"


def install() -> None:
    """Fits Megatron's trainer to batches that every rank reads and dispatches. Idempotent.

    Its pipeline schedules get the length of the tensors instead of ``args.seq_length``, and iterations that are
    skipped are read on every rank: Megatron reads them on the first tensor-parallel rank and cuts them. Without
    `--attention-backend magi` nothing changes.
    """
    from megatron.training import get_args

    stock_schedule, stock_skip = seams.original(_SCHEDULE), seams.original(_SKIP)

    @functools.wraps(stock_schedule)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable:
        schedule = stock_schedule(*args, **kwargs)
        if not is_magi():
            return schedule
        if is_asked_for(get_args()):
            return _packed(schedule)
        return _with_length(schedule, buffer_length(get_args()))

    @functools.wraps(stock_skip)
    def dummy_train_step(data_iterator: Any) -> None:
        (_skip_step if is_magi() else stock_skip)(data_iterator)

    seams.put(_SCHEDULE, get_forward_backward_func)
    seams.put(_SKIP, dummy_train_step)


def _skip_step(data_iterator: Any) -> None:
    """Reads an iteration's microbatches and drops them."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    # One a model chunk where stages are interleaved.
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):
        for iterator in iterators:
            for _ in range(get_num_microbatches()):
                next(iterator)


def _packed(schedule: Callable) -> Callable:
    """Stages tell each other the length of each microbatch."""

    @functools.wraps(schedule)
    def run(*, forward_step_func: Any, **kwargs: Any) -> Any:
        return forward_step_func.packing(schedule)(forward_step_func=forward_step_func, **kwargs)

    return run


def _with_length(schedule: Callable, length: int) -> Callable:
    @functools.wraps(schedule)
    def run(*, seq_length: int, decoder_seq_length: int | None = None, **kwargs: Any) -> Any:
        # Stages exchange tensors of the other length, if there is one.
        return schedule(seq_length=length, **kwargs)

    return run
