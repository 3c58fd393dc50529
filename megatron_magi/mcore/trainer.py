"""What Megatron's trainer does otherwise where batches are dispatched.

Dispatch may pad. Arguments are saved in checkpoints, choose the data and enter the figures of
throughput, so ``args.seq_length`` stays what the user gave, and only schedules are told the
length of the tensors.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_magi.mcore import seams
from megatron_magi.mcore.arguments import buffer_length, is_magi

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
        return _with_length(schedule, buffer_length(get_args())) if is_magi() else schedule

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


def _with_length(schedule: Callable, length: int) -> Callable:
    @functools.wraps(schedule)
    def run(*, seq_length: int, decoder_seq_length: int | None = None, **kwargs: Any) -> Any:
        # Stages exchange tensors of the other length, if there is one.
        return schedule(seq_length=length, **kwargs)

    return run


def check_padding(args: Namespace, seq_length: int) -> None:
    """Refuses padding where Megatron sizes further buffers by ``args.seq_length``, or counts it.

    Args:
        args: a validated command line.
        seq_length: tokens a sequence in Megatron's tensors, all context-parallel ranks together.

    Raises:
        ValueError: an option has buffers or means of its own and the length is padded.
    """
    if seq_length == args.seq_length:
        return
    advice = f"this sequence length is padded from {args.seq_length} to {seq_length}; give --seq-length {seq_length}"
    if args.tp_comm_overlap:
        raise ValueError(f"tp_comm_overlap: its buffers do not know that {advice}")
    if args.cuda_graph_impl == "transformer_engine":
        raise ValueError(f"cuda_graph_impl: transformer_engine captures without knowing that {advice}")
    if args.num_experts:
        _check_padded_experts(args, advice)


def _check_padded_experts(args: Namespace, advice: str) -> None:
    # Of a layer in chunks, and of one whose communication is overlapped, the router is not given the mask of padding.
    unmasked = {
        "overlap_moe_expert_parallel_comm": args.overlap_moe_expert_parallel_comm,
        "mlp_chunks_for_training": args.mlp_chunks_for_training > 1,
    }
    for name, is_given in unmasked.items():
        if is_given and _router_counts_tokens(args):
            raise ValueError(f"{name}: Megatron's router takes padding for tokens there; {advice}")
    balancing = args.moe_router_load_balancing_type
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in (balancing if isinstance(balancing, list) else [balancing]):
            raise ValueError(f"moe_router_load_balancing_type: {kind} takes padding for tokens; {advice}")
    if args.moe_expert_capacity_factor is not None:
        raise ValueError(f"moe_expert_capacity_factor: padding would take the place of tokens; {advice}")


def _router_counts_tokens(args: Namespace) -> bool:
    """Whether the numbers of tokens of experts enter a loss or a bias, and not only the order of their work."""
    coefficients = args.moe_aux_loss_coeff if isinstance(args.moe_aux_loss_coeff, list) else [args.moe_aux_loss_coeff]
    return bool(any(coefficients) or args.moe_z_loss_coeff or args.moe_router_enable_expert_bias)
