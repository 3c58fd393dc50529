"""The forward step of Megatron's trainer: a microbatch in, a model's output and its loss out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.training import get_args

from megatron_magi.mcore.batch import BatchDispatcher
from megatron_magi.mcore.loss import microbatch_loss
from megatron_magi.mcore.loss_log import LossLog
from megatron_magi.mcore.step import count_documents, is_first_run, load_batch, run_model


class MagiForwardStep:
    """Dispatches the microbatch over context-parallel ranks, on every pipeline stage.

    Args:
        make_dispatcher: called by `prepare`.
        loss_log: told the plan of each training microbatch, if given.
    """

    def __init__(self, make_dispatcher: Callable[[], BatchDispatcher], loss_log: LossLog | None = None) -> None:
        self._make_dispatcher = make_dispatcher
        self._dispatcher: BatchDispatcher | None = None
        self._loss_log = loss_log

    def prepare(self) -> None:
        """Makes the dispatcher; collective over all ranks, once process groups and tokenizer exist. Idempotent."""
        if self._dispatcher is None:
            self._dispatcher = self._make_dispatcher()

    def __call__(
        self, data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """As Megatron's schedules call it; with ``return_schedule_plan`` the model is not run yet."""
        dispatcher = self._dispatcher
        assert dispatcher is not None, "prepare() comes first"
        batch = load_batch(lambda: dispatcher.next(data_iterator))
        count_documents(model, batch.documents)
        if self._loss_log is not None and is_first_run(model):
            self._loss_log.add_plan(batch.params.plans.plan)
        args = get_args()
        output = run_model(
            model,
            return_schedule_plan,
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.params,
            # Only the router of experts reads it.
            padding_mask=batch.padding_mask if args.num_experts else None,
        )
        loss = partial(
            microbatch_loss,
            batch.loss_mask,
            num_loss_tokens=batch.params.num_loss_tokens,
            cp_size=args.context_parallel_size,
        )
        return output, loss
