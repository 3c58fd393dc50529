"""Tile plans of masks on a device: made once for a mask and cached, or brought by a prepared batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import Ready, StageMasks, StageTables, TableUse, refuse_tables_in_graph
from megatron_magi.backends.tiles import cpp_tiles
from megatron_magi.backends.tiles import tiles as python_tiles
from megatron_magi.backends.tiles.tiles import TilePlan
from megatron_magi.backends.triton.tuning import ALIGNED_ROWS, NARROW, Kernel, Kind, Sizes, kind_of, sizes
from megatron_magi.mask import bands as bd
from megatron_magi.operands.frozen import FrozenMemo
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import upload

_MAX_TABLES = 256
_MAX_BYTES = 256 << 20  # of device memory


class Tiling(NamedTuple):
    """How a mask is cut.

    Attributes:
        of_keys: tiles of keys over blocks of queries, of the transposed mask; else of queries over blocks of keys.
        num_rows: queries, or keys, that are divided into tiles.
        rows, columns: of a tile; of a block.
        align: first columns of passes are multiples of it.
    """

    of_keys: bool
    num_rows: int
    rows: int
    columns: int
    align: int

    @classmethod
    def of(cls, kernel: Kernel, found: Sizes, num_queries: int, num_keys: int) -> Tiling:
        """That of a kernel with these sizes."""
        of_keys = kernel == "key_gradient"
        align = ALIGNED_ROWS if of_keys and found.described else 1
        return cls(of_keys, num_keys if of_keys else num_queries, found.rows, found.columns, align)


class Facts(NamedTuple):
    """Of a mask.

    Attributes:
        digest: of the content of its table.
        area: visible pairs.
    """

    digest: bytes
    area: int


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """A `TilePlan` in device memory, int32 each.

    Attributes:
        tiles, passes, bounds: its tables.
        ready: completion of their copy; None if complete.
    """

    tiles: Tensor
    passes: Tensor
    bounds: Tensor
    ready: Ready | None = None

    @property
    def num_bytes(self) -> int:
        """Of device memory."""
        return self.tiles.nbytes + self.passes.nbytes + self.bounds.nbytes

    def hold_for_stream(self) -> None:
        """Makes the current stream wait for the tables, and keeps their memory until work queued on it is complete.

        Raises:
            RuntimeError: the stream is being captured: the graph would read the tables after they are freed.
        """
        if not self.tiles.is_cuda:
            return
        refuse_tables_in_graph(self.tiles.device, "triton")
        current = torch.cuda.current_stream(self.tiles.device)
        if self.ready is not None and self.ready.stream != current.cuda_stream:
            current.wait_event(self.ready.event)
        if self.ready is None or self.ready.stream != current.cuda_stream:
            for table in (self.tiles, self.passes, self.bounds):
                table.record_stream(current)


_known: LruCache[tuple, DeviceTables] = LruCache(_MAX_BYTES, _MAX_TABLES)
_prepared: WeakValueDictionary[tuple, DeviceTables] = WeakValueDictionary()
_facts: FrozenMemo[Facts] = FrozenMemo()


def tables_of(bands: np.ndarray, tiling: Tiling, device: torch.device) -> DeviceTables:
    """The tables of a mask, int64 ``[n, 6]``, on a device: those of a prepared batch, from the cache, or made."""
    key = (_facts_of(bands).digest, tiling, device)
    tables = _prepared.get(key) or _known.get(key)
    if tables is None:
        tables = DeviceTables(*upload(_arrays(bands, tiling, "auto"), device))
        _known.put(key, tables, tables.num_bytes)
    return tables


def is_narrow(bands: np.ndarray, num_rows: int) -> bool:
    """Whether queries see few keys, `tuning.NARROW` or fewer on average."""
    return _facts_of(bands).area <= NARROW * num_rows


def _facts_of(bands: np.ndarray) -> Facts:
    """Facts of a mask; remembered for read-only tables."""
    facts = _facts.get(bands)
    if facts is None:
        digest = hashlib.blake2b(np.ascontiguousarray(bands).tobytes(), digest_size=16).digest()
        facts = Facts(digest, int(bd.areas(bands).sum()))
        _facts.put(bands, facts)
    return facts


def _arrays(bands: np.ndarray, tiling: Tiling, planner: str) -> list[np.ndarray]:
    """The tables of a plan on the host; ``planner`` as `DispatchConfig.planner`."""
    of_keys, num_rows, rows, columns, align = tiling
    plan_tiles = cpp_tiles.plan_tiles if cpp_tiles.chosen(planner) else python_tiles.plan_tiles
    made: TilePlan = plan_tiles(
        bd.transpose(bands) if of_keys else bands, num_rows, rows, columns, align=align, hide_tail=of_keys, parts=1
    )
    return [made.tiles, made.passes, made.bounds]


@dataclass(frozen=True)
class MaskTables:
    """See `megatron_magi.backends.base.MaskTables`; tables of each tiling are three arrays."""

    facts: Facts
    tilings: tuple[Tiling, ...]

    @property
    def num_arrays(self) -> int:
        """See `megatron_magi.backends.base.MaskTables`."""
        return 3 * len(self.tilings)

    @property
    def num_plans(self) -> int:
        """See `megatron_magi.backends.base.MaskTables`."""
        return len(self.tilings)

    def keep(
        self, bands: np.ndarray, tensors: Sequence[Tensor], ready: Ready | None, plan_bytes: int
    ) -> Sequence[object]:
        """See `megatron_magi.backends.base.MaskTables`."""
        del plan_bytes
        _facts.put(bands, self.facts)
        kept = []
        for i, tiling in enumerate(self.tilings):
            made = DeviceTables(*(tensors[3 * i + j] for j in range(3)), ready)
            kept.append(_prepared.setdefault((self.facts.digest, tiling, made.tiles.device), made))
        return kept


class HostTables:
    """See `megatron_magi.backends.base.HostTables`."""

    def sm_count(self, device: torch.device) -> int:
        """Streaming multiprocessors of a device; 1 of a CPU."""
        return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def kind(self, device: torch.device) -> Kind:
        """See `megatron_magi.backends.triton.tuning`."""
        return kind_of(device)

    def make(self, masks: StageMasks, use: TableUse) -> StageTables:
        """See `megatron_magi.backends.base.HostTables`."""
        kernels: tuple[Kernel, ...] = ("forward", "query_gradient", "key_gradient")
        kernels = kernels[: None if use.needs_backward else 1]
        tables, arrays = [], []
        for bands, num_keys in zip(masks.bands, masks.num_keys, strict=True):
            narrow = is_narrow(bands, masks.num_rows)
            found = {k: sizes(k, use.kind, use.dims, use.dtype.itemsize, narrow=narrow) for k in kernels}
            tilings = dict.fromkeys(Tiling.of(k, s, masks.num_rows, num_keys) for k, s in found.items())
            for tiling in tilings:
                arrays += _arrays(bands, tiling, use.planner)
            tables.append(MaskTables(_facts_of(bands), tuple(tilings)))
        return StageTables(tuple(tables), arrays, None, None)
