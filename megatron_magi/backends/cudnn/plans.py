"""Mask plans of `cudnn.flex_attention` on a device: made once for a mask and shape; cached, or kept with a batch.

Making a plan launches kernels and reads a few counts back. It is done on a stream of its own, so that the host waits
for nothing else; those of prepared batches are made by a thread of their own, while the device computes earlier steps.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import Ready, StageMasks, StageTables, TableUse, refuse_tables_in_graph
from megatron_magi.backends.cudnn import support
from megatron_magi.backends.cudnn.sequences import Sequences, local, split
from megatron_magi.mask import bands as bd
from megatron_magi.mask.row_intervals import row_intervals
from megatron_magi.operands.frozen import FrozenMemo
from megatron_magi.runtime.lru import LruCache

_MAX_PLANS = 256
_MAX_BYTES = 512 << 20  # of device memory
_plans: LruCache[tuple, Planned] = LruCache(_MAX_BYTES, _MAX_PLANS)
_prepared: WeakValueDictionary[tuple, Planned] = WeakValueDictionary()
_known: FrozenMemo[Facts] = FrozenMemo()
_MARK = np.zeros(1, dtype=np.int32)
building = threading.Lock()
"""Held while a plan is made or a kernel is compiled: the compiler serves one thread at a time."""


class Facts(NamedTuple):
    """Of a mask.

    Attributes:
        digest: of the table's content.
        sees: whether any row sees a key.
    """

    digest: bytes
    sees: bool


class Shape(NamedTuple):
    """On which a plan depends beside the mask.

    Attributes:
        num_rows, num_keys: of queries, and of keys and values.
        num_heads: of queries, and of keys and values.
        dims: head dims of q and k, and of v.
        dtype: of q, k and v.
        has_backward: whether it serves the backward too.
    """

    num_rows: int
    num_keys: int
    num_heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    has_backward: bool


class Seen(NamedTuple):
    """What rows of a mask see.

    Attributes:
        ends: of `row_intervals`, counted from the first key of the sequence.
        sequences: of the mask; None if it is planned as a whole.
    """

    ends: np.ndarray
    sequences: Sequences | None


@dataclass(eq=False)
class Planned:
    """A mask plan in device memory.

    Attributes:
        future: of the plan, and of an event recorded after it.
        uses: arguments of `first_use`, streams as raw handles.
    """

    future: Future[tuple[Any, torch.cuda.Event]]
    uses: set[tuple[int, bool]] = field(default_factory=set)

    def plan(self) -> Any:
        """The `cudnn.flex_attention.MaskPlan`, when it is made."""
        return self.future.result()[0]

    def first_use(self, stream: torch.cuda.Stream, deterministic: bool) -> bool:
        """Makes a stream wait for the plan; True the first time, when the call has to note its use of the memory.

        Passes that are deterministic may read other memory of the plan than those that are not.
        """
        use = stream.cuda_stream, deterministic
        if use in self.uses:
            return False
        stream.wait_event(self.future.result()[1])
        self.uses.add(use)
        return True


def facts_of(bands: np.ndarray) -> Facts:
    """Facts of a mask; cached for read-only tables."""
    facts = _known.get(bands)
    if facts is None:
        digest = hashlib.blake2b(np.ascontiguousarray(bands).tobytes(), digest_size=16).digest()
        facts = Facts(digest, bool(len(bd.tighten(bands))))
        _known.put(bands, facts)
    return facts


def plan_of(bands: np.ndarray, shape: Shape, device: torch.device) -> Planned:
    """The plan of a mask on a device: of a prepared batch, from the cache, or made.

    Args:
        bands: the mask, of which some row sees a key.
        shape: of the pass. A forward takes any plan; one that is made serves a backward too.
        device: of the tensors.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would read the plan after it is dropped.
    """
    refuse_tables_in_graph(device, "cudnn")
    digest, both = facts_of(bands).digest, shape._replace(has_backward=True)
    for known in dict.fromkeys((both, shape)):
        key = _key(digest, known, device)
        if (found := _prepared.get(key) or _plans.get(key)) is not None:
            return found
    future: Future = Future()
    future.set_result(_make(_seen(bands, both), both, device))
    found = Planned(future)
    _plans.put(_key(digest, both, device), found, _bytes_of(bands, both))
    return found


def _key(digest: bytes, shape: Shape, device: torch.device) -> tuple:
    return digest, shape, device.index


def _bytes_of(bands: np.ndarray, shape: Shape) -> int:
    """About the device memory of a plan: a bit for each pair in tiles that are partly visible; a few tiles a row."""
    return (2 if shape.has_backward else 1) * shape.num_rows * 128 * max(1, min(len(bands), 16)) // 8


@cache
def _planner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="magi-cudnn-plans")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def is_split(plan: Any) -> bool:
    """Whether a plan is one of sequences, whose tensors have no dimension of the batch."""
    return plan.metadata.mode == "varlen"


def _seen(bands: np.ndarray, shape: Shape) -> Seen:
    """What the package is told of a mask."""
    sequences = split(bands, shape.num_rows, shape.num_keys, shape.num_heads[1])
    return Seen(row_intervals(bands if sequences is None else local(bands, sequences), shape.num_rows), sequences)


def _like(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of the shapes of q, k and v, of which a plan reads no element."""

    def of(tokens: int, heads: int, dim: int) -> Tensor:
        return torch.empty(dim, dtype=shape.dtype, device=device).as_strided((tokens, heads, dim), (0, 0, 1))

    (num_q, num_kv), (dim, dim_v) = shape.num_heads, shape.dims
    return of(shape.num_rows, num_q, dim), of(shape.num_keys, num_kv, dim), of(shape.num_keys, num_kv, dim_v)


def _make(seen: Seen, shape: Shape, device: torch.device) -> tuple[Any, torch.cuda.Event]:
    """The plan of what rows see, and an event that is recorded after it."""
    create = support.library().create_mask_plan
    parts = [seen.ends, *(seen.sequences[:2] if seen.sequences else ())]
    with building, torch.cuda.device(device), torch.cuda.stream(_stream(device)), torch.no_grad():
        host = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).pin_memory()
        sent = host.to(device, non_blocking=True).split([part.size for part in parts])
        ends, like = sent[0].view(1, *seen.ends.shape), _like(shape, device)
        if seen.sequences is None:
            plan = create(ends, *(t[None] for t in like), build_backward=shape.has_backward)
        else:
            rows, keys = seen.sequences.longest
            plan = create(
                ends, *like, cu_seqlens_q=sent[1], cu_seqlens_k=sent[2], max_seqlen_q=rows, max_seqlen_k=keys,
                build_backward=shape.has_backward,
            )  # fmt: skip
        return plan, _stream(device).record_event()


@dataclass(frozen=True, eq=False)
class MaskTables:
    """See `megatron_magi.backends.base.MaskTables`. Intervals are copied on the stream of plans, not with the batch:
    its copy may wait for all that is queued on its stream.

    Attributes:
        facts: of the mask; None if there is no plan.
        shape: of the passes.
        seen: what rows see.
    """

    facts: Facts | None = None
    shape: Shape | None = None
    seen: Seen | None = None

    @property
    def num_plans(self) -> int:
        """Number of plans."""
        return int(self.facts is not None)

    @property
    def num_arrays(self) -> int:
        """Number of arrays: `_MARK`, by which the device is known."""
        return self.num_plans

    def keep(
        self, bands: np.ndarray, tensors: Sequence[Tensor], ready: Ready | None, plan_bytes: int
    ) -> Sequence[object]:
        """Has the plan made; it is found as long as the caller keeps the returned object."""
        del plan_bytes
        if self.facts is None or self.shape is None or self.seen is None or ready is None:
            return []
        _known.put(bands, self.facts)
        (mark,) = tensors
        device = mark.device
        key = _key(self.facts.digest, self.shape, device)
        found = _prepared.get(key)
        if found is None:
            found = Planned(_planner().submit(_make, self.seen, self.shape, device))
            _prepared[key] = found
        return [found]


def make_stage_tables(masks: StageMasks, use: TableUse) -> StageTables:
    """Intervals of the masks of stages, on the CPU; see `megatron_magi.backends.base.HostTables`."""
    tables = [
        _make_table(bands, Shape(masks.num_rows, keys, use.num_heads, use.dims, use.dtype, use.needs_backward))
        for bands, keys in zip(masks.bands, masks.num_keys, strict=True)
    ]
    return StageTables(tuple(tables), [_MARK for table in tables if table.num_arrays], None, None)


def _make_table(bands: np.ndarray, shape: Shape) -> MaskTables:
    facts = facts_of(bands)
    if not facts.sees or support.intervals_of(bands) > support.MOST_INTERVALS:
        return MaskTables()
    return MaskTables(facts, shape, _seen(bands, shape))
