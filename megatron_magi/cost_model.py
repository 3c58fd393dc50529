"""What a step of attention takes on a GPU: the few rates that dispatches are compared with, and the kernels' tiles.

`python -m megatron_magi calibrate` measures the rates; without that those of the kind of GPU hold
(`megatron_magi.backends.costs`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

_POSITIVE = (
    "forward_tflops",
    "backward_tflops",
    "memory_gbytes_per_s",
    "gbytes_per_s",
    "far_gbytes_per_s",
)


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU and of what connects it to others. "us" are microseconds, a rate in GB/s is 1e9 bytes a second.

    Attributes:
        device: the GPU that they are of.
        forward_tflops, backward_tflops: of the pairs that kernels compute, hidden ones included.
        tile_columns: what a tile of the forward costs besides the columns it computes, in columns; likewise one of dq.
        tile_rows: what a tile of keys costs in the backward besides the rows it computes, in rows.
        forward_us, backward_us: launches of one stage on the GPU.
        memory_gbytes_per_s: bytes read and written by what copies, casts, zeros and adds.
        collective_us: an all-to-all of nothing, with what packs and unpacks its rows.
        gbytes_per_s: an all-to-all's bytes that a rank sends or receives, whichever are more, between ranks of a node.
        far_collective_us, far_gbytes_per_s: the same between nodes.
        ranks_per_node: context-parallel ranks that are neighbours in the group and share a node.
        hidden: share of a transfer's time that kernels which run at the same time hide, 0 to 1.
        host_forward_us, host_backward_us: of the host, to issue a pass without remote rows, or all in one launch.
        host_stage_forward_us, host_stage_backward_us: and for each remote stage, where these follow each other.
        host_one_way_us: of these, what is saved in each pass on a rank that sends no rows, or fetches none.
    """

    device: str
    forward_tflops: float
    backward_tflops: float
    tile_columns: float
    tile_rows: float
    forward_us: float
    backward_us: float
    memory_gbytes_per_s: float
    collective_us: float
    gbytes_per_s: float
    far_collective_us: float
    far_gbytes_per_s: float
    ranks_per_node: int
    hidden: float
    host_forward_us: float
    host_backward_us: float
    host_stage_forward_us: float
    host_stage_backward_us: float
    host_one_way_us: float

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{field.name}: expected a number that is not negative, got {value!r}")
            if field.name in _POSITIVE and not value:
                raise ValueError(f"{field.name}: expected a positive rate, got {value!r}")
        if not isinstance(self.device, str):
            raise ValueError(f"device: expected the name of a GPU, got {self.device!r}")
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node: expected at least 1, got {self.ranks_per_node!r}")
        if self.hidden > 1:
            raise ValueError(f"hidden: expected a share of at most 1, got {self.hidden!r}")

    def host_us(self, is_backward: bool) -> tuple[float, float]:
        """Microseconds of the host to issue a pass, and in addition for each remote stage."""
        if is_backward:
            return self.host_backward_us, self.host_stage_backward_us
        return self.host_forward_us, self.host_stage_forward_us

    @cached_property
    def digest(self) -> bytes:
        """A digest of the rates without the GPU's name, which ranks compare."""
        return hashlib.sha256(replace(self, device="").to_json().encode()).digest()

    def to_json(self) -> str:
        """The rates as a calibration file holds them."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """The rates of `to_json`.

        Raises:
            ValueError: the text is no such thing; the message names what is wrong with it.
        """
        try:
            found: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"calibration: no JSON: {error}") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or set(found) != names:
            wrong = sorted(names ^ set(found)) if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"calibration: expected the fields of Rates, other or missing are {wrong}")
        return cls(**found)


@dataclass(frozen=True)
class KernelCosts:
    """What the predicted time of a step must know of the kernels of a backend, apart from `Rates`.

    Attributes:
        num_sms: streaming multiprocessors of the GPU.
        tail: their mean idle time at the end of a kernel, as a fraction of a work item.
        forward_tile: queries of a tile and keys of a block of the forward.
        tall_forward_tile: the same where heads are packed, or where a query sees many keys (``tall_tile_keys``).
        tall_tile_keys: least keys that a query sees on average for tall tiles, by head dims (of q and k, of v): with
            packed heads, without.
        key_tile, query_block: keys of a tile and queries of a block of the backward.
        dq_tile, dq_block: queries of a tile and keys of a block of a separate kernel for dq.
        most_packed_heads: query heads that share a tile at most.
        short_rows: heads are packed where documents have fewer rows than this on average.
        separate_dq_packed: where heads are packed: from so many bytes of fp32 dq on, a separate kernel for dq is faster
            if a query sees fewer keys than this.
        separate_dq: likewise where heads are not packed, with head dim 128.
        most_forward_bytes: keys and values that a rank fetches up to which the forward of more than two ranks is one
            launch.
        stage_tflops: attention rate while keys are fetched and stages are merged, TFLOP/s, for the number of stages.
        stage_latency_us: fixed cost of one more stage (launches, merge), microseconds, likewise.
    """

    num_sms: int
    tail: float
    forward_tile: tuple[int, int]
    tall_forward_tile: tuple[int, int]
    tall_tile_keys: Mapping[tuple[int, int], tuple[int, int]]
    key_tile: int
    query_block: int
    dq_tile: int
    dq_block: int
    most_packed_heads: int
    short_rows: int
    separate_dq_packed: tuple[tuple[int, int], ...]
    separate_dq: tuple[tuple[int, int], ...]
    most_forward_bytes: int
    stage_tflops: float
    stage_latency_us: float
