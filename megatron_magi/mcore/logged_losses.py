"""Losses that layers of Megatron's log by themselves, as means over the tokens of each microbatch.

They are those of experts and of multi-token prediction. The loss of an indexer is a sum over tokens, where losses are
per token: divided by the number of samples it is the same however these are packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

_PREDICTED = ("loss_values", "values")
"""What multi-token prediction calls its sums, by release."""


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
    predicted = [total for name in _PREDICTED if (total := MTPLossLoggingHelper.tracker.get(name)) is not None]
    return predicted + [entry.values for entry in get_moe_metrics_tracker().metrics.values()]
