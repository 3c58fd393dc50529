"""From a microbatch of the data loader to this rank's shard of it and the plans that go with it.

Every tensor-parallel rank and every pipeline stage reads the data loader itself: all of them
need the plan, which depends on nothing but the batch, and so nothing is broadcast and no
rank waits for a GPU to learn where documents end. Work is done on the CPU and only
the shard is copied to the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.comm.agreement import start_agreement
from megatron_magi.comm.dispatch import dispatch
from megatron_magi.config import MagiConfig
from megatron_magi.mask.builders import cu_seqlens_from_eod
from megatron_magi.mcore.carrier import MagiSeqParams, PlanSet, ShardLayout, Window
from megatron_magi.plan import PlanCache


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
        primary: window of the layers for which tokens are balanced.
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
        primary: Window,
        eod: int | None,
        cp_group: dist.ProcessGroup,
        agreement_group: dist.ProcessGroup | None,
        seq_length: int | None = None,
        num_plans: int = 64,
    ) -> None:
        self._config = config
        self._primary = primary
        self._eod = eod
        self._cp_rank = cp_group.rank()
        self._cp_size = cp_group.size()
        self._agreement_group = agreement_group
        self._seq_length = seq_length
        self._cache = PlanCache(num_plans)

    def next(self, data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> LocalBatch:
        """Reads a microbatch and dispatches it.

        Raises:
            RuntimeError: ranks of the agreement group read different data or made different plans.
        """
        return self.dispatch(next(data_iterator))

    def dispatch(self, batch: Mapping[str, torch.Tensor]) -> LocalBatch:
        """This rank's shard of ``batch``, whose tensors are ``[batch_size, seqlen]`` on the CPU.

        Raises:
            RuntimeError: ranks of the agreement group read different data or made different plans.
            ValueError: the batch does not have the shape for which Megatron has been set up.
        """
        tokens = batch["tokens"]
        documents = _documents(batch, self._eod)
        plans = PlanSet(documents, self._primary, self._config, self._cp_rank, self._cp_size, self._cache)
        self._check_length(plans, tokens.shape)
        agreement = None
        if self._agreement_group is not None:
            fingerprint = plans.plan.plan_hash ^ (_checksum(batch) << 31)
            agreement = start_agreement(fingerprint, self._agreement_group, "tokens and plan of a microbatch")
        index = plans.dispatch.global_index(self._cp_rank)
        rows_index = torch.from_numpy(index)

        def local(name: str) -> torch.Tensor:
            return dispatch(batch[name].reshape(-1), rows_index).view(tokens.shape[0], -1)

        # Rotary positions and rolling follow stock: they know documents only from cu_seqlens.
        segments = documents if "cu_seqlens" in batch else _sample_bounds(tokens.shape)
        result = LocalBatch(
            tokens=_to_device(local("tokens")),
            labels=_to_device(local("labels")),
            position_ids=_to_device(local("position_ids")),
            loss_mask=_to_device(local("loss_mask")),
            padding_mask=self._padding_mask(plans, index, tokens.shape),
            params=MagiSeqParams(
                qkv_format="sbhd",
                max_seqlen_q=tokens.shape[1],
                max_seqlen_kv=tokens.shape[1],
                plans=plans,
                layout=_layout(index, tokens.shape[0], segments),
                num_loss_tokens=float(batch["loss_mask"].sum()),
            ),
            documents=_to_device(torch.from_numpy(documents)) if self._is_confined(batch) else None,
        )
        if agreement is not None:
            agreement.wait()
        return result

    def _is_confined(self, batch: Mapping[str, torch.Tensor]) -> bool:
        return "cu_seqlens" in batch or self._eod is not None

    def _check_length(self, plans: PlanSet, shape: torch.Size) -> None:
        padded = plans.dispatch.padded_seqlen
        if self._seq_length is not None and padded != self._seq_length * shape[0]:
            raise ValueError(
                f"tokens: {shape[0]} sequences of {shape[1]} become {padded} tokens over all ranks, "
                f"Megatron is set up for {self._seq_length} each"
            )

    @staticmethod
    def _padding_mask(plans: PlanSet, index: np.ndarray, shape: torch.Size) -> torch.Tensor | None:
        # Whether there is one must not depend on the rank: layers reduce over what it leaves.
        if plans.dispatch.padded_seqlen == plans.dispatch.total_seqlen:
            return None
        return _to_device(torch.from_numpy(index >= plans.dispatch.total_seqlen).view(shape[0], -1))


def _documents(batch: Mapping[str, torch.Tensor], eod: int | None) -> np.ndarray:
    """Bounds of the spans that attention is confined to, int64 ``[num_documents + 1]``."""
    tokens = batch["tokens"]
    if "cu_seqlens" in batch:
        # Rows are padded with copies of the sequence length, which `unique` drops.
        rows = batch["cu_seqlens"].numpy().astype(np.int64)
        offsets = np.arange(len(rows), dtype=np.int64)[:, None] * tokens.shape[1]
        return np.unique(np.concatenate([_sample_bounds(tokens.shape), (rows + offsets).reshape(-1)]))
    if eod is not None:
        return cu_seqlens_from_eod(tokens=tokens, eod=eod)
    return _sample_bounds(tokens.shape)


def _checksum(batch: Mapping[str, torch.Tensor]) -> int:
    """32 bits that tell batches apart whose documents are the same."""
    value = 0
    for name in ("tokens", "labels", "loss_mask"):
        value = zlib.crc32(batch[name].contiguous().numpy(), value)
    return value


def _sample_bounds(shape: torch.Size) -> np.ndarray:
    return np.arange(shape[0] + 1, dtype=np.int64) * shape[1]


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
