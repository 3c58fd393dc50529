"""The length of Megatron's tensors, where dispatch pads: told to its schedules, kept out of its arguments.

Arguments are saved in checkpoints, choose the data and enter the figures of throughput, so
``args.seq_length`` stays what the user gave.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def buffers_of(seq_length: int) -> Iterator[None]:
    """Inside it, Megatron's trainer gives its pipeline schedules this length instead of ``args.seq_length``.

    Args:
        seq_length: tokens a sequence in Megatron's tensors, all context-parallel ranks together.
    """
    from megatron.training import training

    stock = training.get_forward_backward_func

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable:
        return _with_length(stock(*args, **kwargs), seq_length)

    with mock.patch.object(training, "get_forward_backward_func", get_forward_backward_func):
        yield


def _with_length(schedule: Callable, length: int) -> Callable:
    @functools.wraps(schedule)
    def run(*, seq_length: int, **kwargs: Any) -> Any:
        return schedule(seq_length=length, **kwargs)

    return run


def check_padding(args: Namespace, seq_length: int) -> None:
    """Refuses padding where Megatron sizes further buffers by ``args.seq_length``.

    Args:
        args: a validated command line.
        seq_length: as in `buffers_of`.

    Raises:
        ValueError: an option has buffers of its own and the length is padded.
    """
    if seq_length == args.seq_length:
        return
    advice = f"this sequence length is padded from {args.seq_length} to {seq_length}; give --seq-length {seq_length}"
    if args.tp_comm_overlap:
        raise ValueError(f"tp_comm_overlap: its buffers do not know that {advice}")
    if args.cuda_graph_impl == "transformer_engine":
        raise ValueError(f"cuda_graph_impl: transformer_engine captures without knowing that {advice}")
