"""The forward step of Megatron's trainer: a microbatch in, a model's output and its loss out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.parallel_state import get_context_parallel_group, get_tensor_and_context_parallel_group
from megatron.training import get_args, get_tokenizer

from megatron_magi import envs
from megatron_magi.calibration import with_present_rates
from megatron_magi.mcore.arguments import buffer_length
from megatron_magi.mcore.batch import BatchDispatcher, LocalBatch
from megatron_magi.mcore.groups import make_agreement_group
from megatron_magi.mcore.loss import microbatch_loss
from megatron_magi.mcore.loss_log import LossLog
from megatron_magi.mcore.settings import layer_masks, magi_config
from megatron_magi.mcore.step import count_documents, is_first_run, load_batch, run_model


def make_dispatcher(args: Namespace) -> BatchDispatcher:
    """The dispatcher that a validated command line asks for; collective over all ranks."""
    environment = envs.load()
    config = with_present_rates(magi_config(args, environment.default_config()))
    # Tensor-parallel ranks read the data too. Pipeline stages do so at different times and cannot wait.
    readers = get_tensor_and_context_parallel_group()
    return BatchDispatcher(
        config,
        masks=layer_masks(args),
        own_positions=args.magi_mask is not None or args.magi_layer_masks is not None,
        eod=get_tokenizer().eod if args.reset_attention_mask else None,
        cp_group=get_context_parallel_group(),
        agreement_group=make_agreement_group(readers) if config.comm.verify else None,
        seq_length=buffer_length(args),
        num_plans=environment.plan_cache_size,
    )


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
        batch = self._next(data_iterator, model)
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

    def _next(self, data_iterator: Iterator, model: torch.nn.Module) -> LocalBatch:
        """This rank's shard of the next microbatch."""
        dispatcher = self._dispatcher
        assert dispatcher is not None, "prepare() comes first"
        batch = load_batch(lambda: dispatcher.next(data_iterator))
        count_documents(model, batch.documents)
        if self._loss_log is not None and is_first_run(model):
            self._loss_log.add_plan(batch.params.plans.plan)
        return batch
