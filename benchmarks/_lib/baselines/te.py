"""Transformer Engine's own context parallelism (`DotProductAttention`), over the kernels that it chooses."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._lib.baselines.base import Baseline, Cluster, Unsupported, document_bounds, zigzag_of
from benchmarks._lib.cases import Case


class TeP2P(Baseline):
    """A ring over zigzag pieces of the sequence or of each document.

    TE wants documents in multiples of twice the ranks: their bounds move to the nearest, so that nothing is padded.
    """

    cp_comm_type: ClassVar[str] = "p2p"
    has_windows: ClassVar[bool] = False

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        del impl
        if dist.get_backend() != "nccl" or importlib.util.find_spec("transformer_engine") is None:
            raise Unsupported("Transformer Engine is not installed, or needs GPUs")
        if not case.plain or (case.window is not None and not self.has_windows):
            raise Unsupported(f"Transformer Engine's {self.cp_comm_type} is not for this mask")
        pieces = 2 * cluster.num_ranks
        if case.length % pieces:
            raise Unsupported(f"{case.length} tokens are not {pieces} equal pieces")
        ends = pieces * np.rint(document_bounds(case)[:, 1] / pieces).astype(np.int64)
        bounds = np.unique(np.append(0, ends))
        parts = zigzag_of(np.stack([bounds[:-1], bounds[1:]], axis=1), cluster.num_ranks)
        self.runs, self._case, self._num_heads_kv = parts[cluster.rank], case, num_heads_kv
        self._bounds = bounds if case.doc_lengths is not None else None
        if self._bounds is not None:
            self.note = f"document bounds at multiples of {pieces}"
        self._group = cluster.group(cluster.table(cluster.num_ranks))
        self._attention: Any = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._attention is None:
            self._attention = self._make(q)
        call, causal = self._attention, "causal" if self._case.causal else None
        if self._bounds is None:
            out = call(q[None], k[None], v[None], qkv_format="bshd", attn_mask_type=causal or "no_mask")
            return out.reshape(*q.shape[:2], v.shape[2])
        mask_type = "padding_causal" if causal else "padding"
        out = call(q, k, v, qkv_format="thd", attn_mask_type=mask_type, **self._lengths)
        return out.reshape(*q.shape[:2], v.shape[2])

    def _make(self, q: Tensor) -> Any:
        from transformer_engine.pytorch import DotProductAttention

        if self._bounds is not None:
            starts = torch.from_numpy(self._bounds).to(q.device, torch.int32)
            longest = int(np.diff(self._bounds).max())
            names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
            self._lengths = dict.fromkeys(names, starts) | {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        window = self._case.window
        return DotProductAttention(
            q.shape[1],
            q.shape[2],
            num_gqa_groups=self._num_heads_kv,
            attention_dropout=0.0,
            window_size=None if window is None else (window - 1, 0),
            cp_group=self._group,
            cp_global_ranks=dist.get_process_group_ranks(self._group),
            cp_stream=torch.cuda.Stream(),
            cp_comm_type=self.cp_comm_type,
        )


class TeAllGather(TeP2P):
    """The same pieces; each rank gathers all keys and values."""

    cp_comm_type = "all_gather"
    has_windows = True
