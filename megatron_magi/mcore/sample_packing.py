"""`--sequence-packing-scheduler dp_balanced`: samples of any length become packed microbatches, few and full ones.

Megatron's trainer counts samples: an iteration reads as many as the global batch has. Where its schedule is called,
those of a data-parallel rank are put one after another into microbatches of at most so many tokens, in their order, and
the schedule runs these. Microbatches so differ in length, and iterations in their number of microbatches, which is the
same on all data-parallel ranks. Losses are per token, so it does not matter to them which sample shares a microbatch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.mask.microbatch import document_bounds
from megatron_magi.mcore.argv import PACKING_FIELD
from megatron_magi.mcore.groups import make_agreement_group
from megatron_magi.mcore.planner import BOUNDS, SEQUENCES, Fields, check_no_mask_field

MEGATRONS = "sequence_packing_scheduler"
"""The option's name in Megatron's arguments and configurations, from some release on."""

_FAILED = -1


def is_asked_for(args: Namespace) -> bool:
    """Whether a command line asks for packed microbatches."""
    return getattr(args, PACKING_FIELD, None) is not None


def take(args: Namespace) -> None:
    """Takes the option, in place, from a Megatron that has it: its trainer would pack before the schedules here do."""
    if getattr(args, MEGATRONS, None) is not None:
        setattr(args, PACKING_FIELD, getattr(args, MEGATRONS))
        setattr(args, MEGATRONS, None)


def most_tokens(args: Namespace) -> int:
    """Tokens that a microbatch may have, over all context-parallel ranks."""
    per_rank = getattr(args, "max_seqlen_per_dp_cp_rank", None)
    return args.seq_length if per_rank is None else per_rank * args.context_parallel_size


def multiple_of(args: Namespace) -> int:
    """What divides the number of microbatches of an iteration: interleaved stages run them in groups."""
    if args.virtual_pipeline_model_parallel_size is None:
        return 1
    return args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size


def make_packing(args: Namespace) -> SamplePacking:
    """As a validated command line says; collective over all ranks."""
    return SamplePacking(most_tokens(args), make_agreement_group(dist.group.WORLD), multiple_of(args))


class SamplePacking:
    """Packs what the schedules of Megatron's trainer read.

    Args:
        most_tokens: of a microbatch.
        group: all ranks, on a CPU backend; None where there is one.
        multiple: divides the number of microbatches.
    """

    def __init__(self, most_tokens: int, group: dist.ProcessGroup | None, multiple: int = 1) -> None:
        self.most_tokens = most_tokens
        self._group = group
        self._multiple = multiple

    def __call__(self, schedule: Callable) -> Callable:
        """``schedule``, which then reads ``num_microbatches`` samples and runs packed microbatches; collective."""

        def run(*, data_iterator: Any, num_microbatches: int, **kwargs: Any) -> Any:
            # One a model chunk where stages are interleaved.
            iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
            samples, failure = [], None
            try:
                samples = [self._read(iterator, num_microbatches) for iterator in iterators]
                lengths = [sample["tokens"].shape[1] for sample in samples[0]]
                needed = -(-len(divide(lengths, self.most_tokens)) // self._multiple) * self._multiple
                if needed > num_microbatches:
                    raise ValueError(
                        f"sequence_packing_scheduler: {num_microbatches} samples of an iteration cannot be {needed} "
                        "microbatches, which interleaved stages need; give a larger --global-batch-size"
                    )
            except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must not wait)
                needed, failure = _FAILED, error
            number = self._agree(needed, failure)
            packed = [iter([pack(part) for part in _parts(own, self.most_tokens, number)]) for own in samples]
            data_iterator = packed if isinstance(data_iterator, list) else packed[0]
            from megatron_magi.mcore.logged_losses import counted_as  # layers are imported late

            with counted_as(number, of=num_microbatches):
                return schedule(data_iterator=data_iterator, num_microbatches=number, **kwargs)

        return run

    def _read(self, iterator: Iterator | None, number: int) -> list[Fields]:
        if iterator is None:
            raise ValueError("data: none to read here; with --attention-backend magi every rank reads it")
        samples = []
        for _ in range(number):
            try:
                sample = next(iterator)
            except StopIteration:
                raise ValueError("data: has ended, the data set has fewer samples than are to be read") from None
            samples.append(_checked(sample, self.most_tokens))
        return samples

    def _agree(self, needed: int, failure: Exception | None) -> int:
        """The largest number of microbatches that a rank needs.

        Raises:
            Exception: the rank's own failure.
            RuntimeError: another rank could not read its samples.
        """
        if self._group is None:
            if failure is not None:
                raise failure
            return needed
        numbers = torch.tensor([needed, -needed], device="cpu")
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        if -int(numbers[1]) != _FAILED:
            return int(numbers[0])
        told: list[str | None] = [None] * self._group.size()
        dist.all_gather_object(told, failure and str(failure), group=self._group)
        if failure is not None:
            raise failure
        first = next(rank for rank, text in enumerate(told) if text is not None)
        raise RuntimeError(f"{told[first]} (on global rank {first})")


def _checked(sample: Any, most_tokens: int) -> Fields:
    missing = [name for name in SEQUENCES if name not in sample]
    if missing:
        raise ValueError(f"dataset_provider: its items have no {' and no '.join(missing)}, only {sorted(sample)}")
    check_no_mask_field(sample, "which packing leaves out: give bounds of documents (cu_seqlens), and no mask")
    shape = sample["tokens"].shape
    for name in SEQUENCES:
        if sample[name].shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(sample[name].shape)}")
    if len(shape) != 2 or shape[0] != 1 or not 0 < shape[1] <= most_tokens:
        raise ValueError(
            f"tokens: expected one sample of 1 to {most_tokens} tokens (--seq-length, or --max-seqlen-per-dp-cp-rank "
            f"on all context-parallel ranks), got shape {list(shape)}"
        )
    return sample


def divide(lengths: Sequence[int], most_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Samples of microbatches, in their order.

    Args:
        lengths: tokens of each sample, at most ``most_tokens``.
        most_tokens: of a microbatch.
        at_least: so many microbatches, no more than there are samples; those with most tokens are divided.

    Returns:
        Of each microbatch the indices of its samples; none is empty.
    """
    parts: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            parts.append([])
            room = most_tokens
        parts[-1].append(index)
        room -= length
    assert at_least <= len(lengths), "so many microbatches would be empty"
    while len(parts) < at_least:
        tokens = [sum(lengths[i] for i in part) if len(part) > 1 else 0 for part in parts]
        largest = tokens.index(max(tokens))
        part = parts[largest]
        before = [sum(lengths[i] for i in part[:n]) for n in range(1, len(part))]
        cut = 1 + min(range(len(before)), key=lambda n: abs(2 * before[n] - tokens[largest]))
        parts[largest : largest + 1] = [part[:cut], part[cut:]]
    return parts


def _parts(samples: Sequence[Fields], most_tokens: int, number: int) -> list[list[Fields]]:
    lengths = [sample["tokens"].shape[1] for sample in samples]
    return [[samples[index] for index in part] for part in divide(lengths, most_tokens, number)]


def pack(samples: Sequence[Fields]) -> dict[str, torch.Tensor]:
    """One microbatch of samples.

    Args:
        samples: each with `SEQUENCES` as tensors ``[1, seqlen]``, and ``cu_seqlens`` or ``cu_seqlens_padded``
            ``[1, n]`` where a sample has several documents.

    Returns:
        `SEQUENCES` ``[1, total]``, and ``cu_seqlens`` int64 ``[1, num_documents + 1]``. Other fields are left out.

    Raises:
        ValueError: bounds that do not fit their sample.
    """
    bounds, start = [torch.zeros(1, dtype=torch.int64, device="cpu")], 0
    for sample in samples:
        own = next((sample[name] for name in BOUNDS if name in sample), None)
        bounds.append(torch.from_numpy(document_bounds(sample["tokens"], own)[1:]) + start)
        start += sample["tokens"].shape[1]
    packed = {name: torch.cat([sample[name] for sample in samples], dim=1) for name in SEQUENCES}
    return {**packed, "cu_seqlens": torch.cat(bounds).unsqueeze(0)}
