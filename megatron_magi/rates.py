"""What a step of attention takes on a GPU: the few rates that dispatches are compared with.

`python -m megatron_magi calibrate` measures them; without that those of the kind of GPU hold (`RATES`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
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

    @property
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


H100 = Rates(
    device="H100",
    forward_tflops=763.0,
    backward_tflops=621.0,
    tile_columns=94.6,
    tile_rows=2.09,
    forward_us=34.0,
    backward_us=16.1,
    memory_gbytes_per_s=2900.0,
    collective_us=37.1,
    gbytes_per_s=250.0,
    far_collective_us=146.0,
    far_gbytes_per_s=50.0,
    ranks_per_node=8,
    hidden=0.455,
    host_forward_us=115.0,
    host_backward_us=180.0,
    host_stage_forward_us=215.0,
    host_stage_backward_us=610.0,
    host_one_way_us=115.0,
)
"""Memory: measured by `calibrate` on 2 H100s. Bytes inside a node: by bench_group_collective.py of
benchmarks/collectives on 8. The host: by bench_new_masks.py of benchmarks/distributed on two. Between nodes: by
assumption, a link of 400 Gbit/s a GPU. The others: fitted to the steps in predict_2gpu.csv and
distributed_ways_{2,4,8}gpu.csv, of H100s."""

RATES = {"H100": H100, "H200": replace(H100, device="H200")}
"""Rates by kind of GPU, a part of its name. Those of an H200 are an H100's: with these the steps of 4 H200s in
benchmarks/results/current/distributed_4gpu.csv are predicted. Other GPUs, and CPUs that plan for a GPU they do not see,
take H100's too."""


def rates_of(device_name: str) -> Rates:
    """The rates of a kind of GPU, by its name as CUDA has it; those of an H100 where the kind is not known."""
    return next((rates for kind, rates in RATES.items() if kind in device_name), H100)
