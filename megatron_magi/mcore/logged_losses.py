"""Losses that layers of Megatron's log by themselves: of experts, multi-token prediction and indexers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

_SUMS = ("loss_values", "values")
"""What the helpers call them, by release."""


@contextmanager
def counted_as(number: int, of: int) -> Iterator[None]:
    """What layers log meanwhile is of ``number`` microbatches, while the trainer divides it by ``of``.

    It is multiplied, so that the log has the mean over the microbatches that were run.
    """
    before = [(total, total.clone()) for total in _sums()]
    yield
    for total in _sums():
        old = next((old for known, old in before if known is total), 0.0)
        total.copy_(old + (total - old) * (of / number))


def _sums() -> list[Tensor]:
    """Sums over microbatches, ``[num_layers]`` each, which Megatron changes in place."""
    helpers = (MTPLossLoggingHelper.tracker, DSAIndexerLossLoggingHelper.tracker)
    of_helpers = [tracker[name] for tracker in helpers for name in _SUMS if name in tracker]
    return of_helpers + [entry.values for entry in get_moe_metrics_tracker().metrics.values()]
