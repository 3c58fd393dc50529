"""Learning rates that go on by batches, of which context-parallel ranks share each."""

from __future__ import annotations

import functools
from typing import Any

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LRScheduler


class BatchScheduler(AcceleratedScheduler):
    """accelerate's scheduler, which steps once for each batch of a training step: once for each data-parallel rank.

    accelerate's own steps once for each rank, so that under context parallelism a schedule would end too early.
    """

    def __init__(self, prepared: AcceleratedScheduler, num_batches: int) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True)
        self._num_batches = num_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        is_due = self.step_with_optimizer and self.gradient_state.sync_gradients
        last = getattr(self.scheduler, "total_steps", float("inf"))  # of a OneCycleLR, which raises an error beyond it
        for _ in range(self._num_batches if is_due else 1):
            if not is_due or self.scheduler._step_count <= last:
                super().step(*args, **kwargs)


def prepare_schedulers(accelerator: Accelerator, num_batches: int) -> None:
    """Has an accelerator prepare schedulers as `BatchScheduler`, for ``num_batches`` in each training step."""
    prepare = accelerator.prepare_scheduler

    @functools.wraps(prepare)
    def prepare_scheduler(scheduler: LRScheduler) -> AcceleratedScheduler:
        prepared = prepare(scheduler)
        if isinstance(prepared, BatchScheduler) or prepared.split_batches:
            return prepared
        by_batch = BatchScheduler(prepared, num_batches)
        by_batch._is_accelerate_prepared = True
        accelerator._schedulers[accelerator._schedulers.index(prepared)] = by_batch
        return by_batch

    accelerator.prepare_scheduler = prepare_scheduler
