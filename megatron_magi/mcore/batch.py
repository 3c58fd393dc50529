"""From a microbatch of the data loader to this rank's shard of it and the plans that go with it.

Every tensor-parallel rank and every pipeline stage reads the data loader itself: all of them
need the plan, which depends on nothing but the batch, and so nothing is broadcast and no
rank waits for a GPU to learn where documents end. Work is done on the CPU and only
the shard is copied to the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.comm.agreement import Agreement, start_agreement
from megatron_magi.comm.dispatch import dispatch
from megatron_magi.config import MagiConfig
from megatron_magi.mask.microbatch import Microbatch, document_bounds, sequence_bounds
from megatron_magi.mask.source import LayerMasks
from megatron_magi.mcore.carrier import LayerPlans, MagiSeqParams, ShardLayout
from megatron_magi.plan import PlanCache

_SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids")
_FAILED = (1 << 63) - 1
"""Compared in place of a plan by a rank that could not make one."""


@dataclass(frozen=True)
class LocalBatch:
    """This rank's shard of a microbatch, on the device.

    Attributes:
        tokens, labels, position_ids: int64 ``[batch_size, seqlen]``, the shard's sequence length.
        loss_mask: fp32, likewise; 0 on padding.
        padding_mask: bool, likewise, True on padding; None when the shard has none on any rank.
        params: the carrier.
        documents: int64 ``[num_documents + 1]``, bounds of the documents that confine attention in the
            whole microbatch; None when nothing does.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    padding_mask: torch.Tensor | None
    params: MagiSeqParams
    documents: torch.Tensor | None


class BatchDispatcher:
    """Makes `LocalBatch` from the data loader's batches.

    Args:
        config: how to plan.
        masks: which layer attends by which mask; documents for all if not given.
        own_positions: rotary positions are the ``position_ids`` of the batch; else those in the sequence, or in the
            document where the batch has ``cu_seqlens``, as in Megatron.
        eod: token that ends a document, if attention is confined to documents by it.
        cp_group: context-parallel ranks.
        agreement_group: all ranks that must read the same batch, on a CPU backend, to compare what they
            read and planned; None to trust.
        seq_length: tokens a sequence in Megatron's tensors, all ranks together, if that is fixed.
        num_plans: microbatches whose plans are kept.
    """

    def __init__(
        self,
        config: MagiConfig,
        *,
        masks: LayerMasks | None = None,
        own_positions: bool = False,
        eod: int | None,
        cp_group: dist.ProcessGroup,
        agreement_group: dist.ProcessGroup | None,
        seq_length: int | None = None,
        num_plans: int = 64,
    ) -> None:
        self._config = config
        self._masks = LayerMasks() if masks is None else masks
        self._own_positions = own_positions
        # Reading 8 bytes a token takes its time, and position ids follow from tokens otherwise.
        self._compared = _SEQUENCES if own_positions else _SEQUENCES[:-1]
        self._eod = eod
        self._cp_rank = cp_group.rank()
        self._cp_size = cp_group.size()
        self._agreement_group = agreement_group
        self._seq_length = seq_length
        self._cache = PlanCache(num_plans)

    def next(self, data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> LocalBatch:
        """Reads a microbatch and dispatches it; errors as in `dispatch`."""
        return self.dispatch(next(data_iterator))

    def dispatch(self, batch: Mapping[str, torch.Tensor]) -> LocalBatch:
        """This rank's shard of ``batch``, whose tensors are ``[batch_size, seqlen]`` on the CPU.

        A mask that fails on one rank is an error on all ranks of the agreement group.

        Raises:
            RuntimeError: ranks of the agreement group read different data or made different plans, or
                one of them could not make its plan.
            ValueError: the batch does not have the shape for which Megatron has been set up, or a mask
                does not fit it.
        """
        made = failure = agreement = result = None
        try:
            made = self._plan(batch)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must not wait)
            failure = error
        if self._agreement_group is not None:
            fingerprint = _FAILED
            if made is not None:
                fingerprint = (made[1].fingerprint ^ (_checksum(batch, self._compared) << 31)) % _FAILED
            agreement = start_agreement(fingerprint, self._agreement_group, "tokens and plan of a microbatch")
        if made is not None:
            result = self._shard(batch, *made)
        if agreement is not None:
            self._settle(agreement, failure)
        if failure is not None:
            raise failure
        return result

    def _plan(self, batch: Mapping[str, torch.Tensor]) -> tuple[Microbatch, LayerPlans]:
        """Everything that a user's data set or mask can get wrong."""
        missing = [name for name in _SEQUENCES if name not in batch]
        if missing:
            raise ValueError(f"dataset_provider: its items have no {' and no '.join(missing)}, only {sorted(batch)}")
        tokens = batch["tokens"]
        for name in _SEQUENCES[1:]:
            if batch[name].shape != tokens.shape:
                raise ValueError(f"{name}: expected shape {list(tokens.shape)}, got {list(batch[name].shape)}")
        if self._own_positions and batch["position_ids"].min() < 0:
            raise ValueError(f"position_ids: must not be negative, got {int(batch['position_ids'].min())}")
        bounds = batch.get("cu_seqlens_padded", batch.get("cu_seqlens"))
        microbatch = Microbatch(tokens, document_bounds(tokens, bounds, self._eod), batch)
        plans = LayerPlans(microbatch, self._masks, self._config, self._cp_rank, self._cp_size, self._cache)
        self._check_length(plans, tokens.shape)
        return microbatch, plans

    def _settle(self, agreement: Agreement, failure: Exception | None) -> None:
        """Waits until all ranks agree. One that has failed tells the others why before all of them end."""
        try:
            agreement.wait()
        except RuntimeError:
            reports: list[str | None] = [None] * dist.get_world_size(self._agreement_group)
            dist.all_gather_object(reports, failure and str(failure), group=self._agreement_group)
            told = [(rank, report) for rank, report in enumerate(reports) if report is not None]
            if not told:
                raise
            ranks = dist.get_process_group_ranks(self._agreement_group)
            raise RuntimeError(
                f"{told[0][1]} (on {len(told)} of {len(reports)} ranks, first on global rank {ranks[told[0][0]]})"
            ) from failure

    def _shard(self, batch: Mapping[str, torch.Tensor], microbatch: Microbatch, plans: LayerPlans) -> LocalBatch:
        shape = batch["tokens"].shape
        index = plans.dispatch.global_index(self._cp_rank)
        rows_index = torch.from_numpy(index)

        def local(name: str) -> torch.Tensor:
            return dispatch(batch[name].reshape(-1), rows_index).view(shape[0], -1)

        # Rotary positions and rolling follow stock: they know documents only from cu_seqlens.
        segments = microbatch.cu_seqlens if "cu_seqlens" in batch else sequence_bounds(*shape)
        layout = _layout(index, shape[0], segments)
        num_positions = shape[1]
        if self._own_positions:
            layout = replace(layout, positions=_to_device(local("position_ids").reshape(-1)))
            num_positions = max(num_positions, int(batch["position_ids"].max()) + 1)
        return LocalBatch(
            tokens=_to_device(local("tokens")),
            labels=_to_device(local("labels")),
            position_ids=_to_device(local("position_ids")),
            loss_mask=_to_device(local("loss_mask")),
            padding_mask=self._padding_mask(plans, index, shape),
            params=MagiSeqParams(
                qkv_format="sbhd",
                max_seqlen_q=num_positions,
                max_seqlen_kv=num_positions,
                plans=plans,
                layout=layout,
                num_loss_tokens=float(batch["loss_mask"].sum()),
            ),
            documents=_to_device(torch.from_numpy(microbatch.cu_seqlens)) if self._is_confined(batch) else None,
        )

    def _is_confined(self, batch: Mapping[str, torch.Tensor]) -> bool:
        return "cu_seqlens" in batch or self._eod is not None

    def _check_length(self, plans: LayerPlans, shape: torch.Size) -> None:
        padded = plans.dispatch.padded_seqlen
        if self._seq_length is not None and padded != self._seq_length * shape[0]:
            raise ValueError(
                f"tokens: {shape[0]} sequences of {shape[1]} become {padded} tokens over all ranks, "
                f"Megatron is set up for {self._seq_length} each"
            )

    @staticmethod
    def _padding_mask(plans: LayerPlans, index: np.ndarray, shape: torch.Size) -> torch.Tensor | None:
        # Whether there is one must not depend on the rank: layers reduce over what it leaves.
        if plans.dispatch.padded_seqlen == plans.dispatch.total_seqlen:
            return None
        return _to_device(torch.from_numpy(index >= plans.dispatch.total_seqlen).view(shape[0], -1))


def _checksum(batch: Mapping[str, torch.Tensor], names: Sequence[str] = _SEQUENCES) -> int:
    """32 bits that tell batches apart whose masks are the same."""
    value = 0
    for name in names:
        value = zlib.crc32(batch[name].contiguous().numpy(), value)
    return value


def _layout(index: np.ndarray, batch_size: int, segments: np.ndarray) -> ShardLayout:
    """Layout of the rows ``index``; rotary positions count from the start of a segment."""
    segment = np.searchsorted(segments, index, side="right") - 1
    is_padding = index >= segments[-1]
    positions = np.where(is_padding, 0, index - segments[np.minimum(segment, len(segments) - 1)])
    is_last = np.isin(index + 1, segments)
    return ShardLayout(
        batch_size=batch_size,
        num_rows=len(index),
        positions=_to_device(torch.from_numpy(positions)),
        roll_keeps=_to_device(torch.from_numpy(~(is_last | is_padding))),
    )


def _to_device(x: torch.Tensor) -> torch.Tensor:
    if not torch.cuda.is_available():
        return x
    # From pinned memory the copy is queued and the CPU runs ahead of the device.
    return x.pin_memory().to(torch.cuda.current_device(), non_blocking=True)
