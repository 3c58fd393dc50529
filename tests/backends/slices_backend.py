"""A second backend, added without an edit of what uses backends: dense attention slice by slice, with host tables.

Its table of a mask is the list of its bands, which is copied to the device with a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_magi import config
from megatron_magi.backends import registry
from megatron_magi.backends.base import Backend, HostTables, MaskTables, Ready, StageMasks, StageTables, TableUse
from megatron_magi.operands.merge import accumulate_dtype, merge_, write_result_
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients

NAME = "slices"


class Table:
    """The bands of a mask on a device."""

    def __init__(self, bands: Tensor) -> None:
        self.bands = bands


brought: WeakValueDictionary[bytes, Table] = WeakValueDictionary()
"""Tables of prepared batches, by content of the bands."""
used: list[str] = []
"""For each pass, where its table came from."""


class SliceTables:
    """See `MaskTables`."""

    num_arrays = num_plans = 1

    def keep(
        self, bands: np.ndarray, tensors: Sequence[Tensor], ready: Ready | None, plan_bytes: int
    ) -> Sequence[object]:
        assert ready is None
        assert plan_bytes > 0
        (table,) = map(Table, tensors)
        return [brought.setdefault(bands.tobytes(), table)]


class Tables:
    """See `HostTables`."""

    def sm_count(self, device: torch.device) -> int:
        return 1

    def kind(self, device: torch.device) -> None:
        return None

    def make(self, masks: StageMasks, use: TableUse) -> StageTables:
        assert not masks.is_fused
        assert not masks.is_alone
        tables: tuple[MaskTables, ...] = tuple(SliceTables() for _ in masks.bands)
        return StageTables(tables, [bands.copy() for bands in masks.bands], None, None)


def table_of(bands: np.ndarray) -> Tensor:
    """The bands on the device, from a prepared batch if it brought them."""
    known = brought.get(bands.tobytes())
    used.append("made" if known is None else "brought")
    return torch.from_numpy(bands.copy()) if known is None else known.bands


def visible_logits(q: Tensor, k: Tensor, band: list[int], options: AttnOptions) -> tuple[Tensor, Tensor]:
    """Logits of a band, [heads, rows, keys], -inf where hidden; and the derivative of the cap."""
    first, last, first_key, last_key, low, high = band
    group = q.shape[1] // k.shape[1]
    keys = k[first_key:last_key].repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q[first:last], keys) * options.softmax_scale
    slope = torch.ones_like(logits)
    if options.softcap:
        slope = 1 - torch.tanh(logits / options.softcap) ** 2
        logits = options.softcap * torch.tanh(logits / options.softcap)
    distance = torch.arange(first_key, last_key) - torch.arange(first, last)[:, None]
    return logits.masked_fill((distance < low) | (distance >= high), -torch.inf), slope


class Slices(Backend):
    """Attention slice by slice."""

    name: ClassVar[str] = NAME
    tables: ClassVar[HostTables | None] = Tables()

    def why_not(
        self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "'torch'"
    ) -> str | None:
        return None if device.type == "cpu" else f"q: impl {NAME!r} computes on CPUs; use {instead}"

    @staticmethod
    def forward(
        inputs: ForwardInputs, bands: np.ndarray, options: AttnOptions, output: ForwardOutput, **hints: Any
    ) -> None:
        q, k, v, sink_lse = inputs
        dtype = accumulate_dtype(q.dtype)
        whole = torch.zeros(output.out.shape, dtype=dtype)
        sums = torch.full(output.lse.shape, -torch.inf, dtype=dtype)
        largest = torch.full((q.shape[1],), -torch.inf, dtype=dtype)
        for band in table_of(bands).tolist():
            logits, _ = visible_logits(q.to(dtype), k.to(dtype), band, options)
            values = v[band[2] : band[3]].to(dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
            part_lse = torch.logsumexp(logits, -1)
            weights = torch.exp(logits - part_lse.masked_fill(part_lse == -torch.inf, 0)[..., None])
            part = torch.einsum("hqk,khd->qhd", weights, values)
            rows = slice(band[0], band[1])
            merge_(whole[rows], sums[rows], part, part_lse.t())
            largest = torch.maximum(largest, logits.amax((1, 2)))
        write_result_(output, whole, sums, sink_lse)
        if output.max_logits is not None:
            output.max_logits.copy_(largest)

    @staticmethod
    def backward(
        inputs: BackwardInputs, bands: np.ndarray, options: AttnOptions, grads: Gradients, **hints: Any
    ) -> None:
        q, k, v, dout, lse, delta = inputs
        dtype, group = accumulate_dtype(q.dtype), q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros(t.shape, dtype=dtype) for t in (q, k, v))
        for band in table_of(bands).tolist():
            rows, keys = slice(band[0], band[1]), slice(band[2], band[3])
            logits, slope = visible_logits(q.to(dtype), k.to(dtype), band, options)
            row_lse = lse[rows].t()[..., None].to(dtype)
            p = torch.exp(logits - row_lse.masked_fill(row_lse == -torch.inf, 0))
            grad = dout[rows].to(dtype)
            dp = torch.einsum("qhd,khd->hqk", grad, v[keys].to(dtype).repeat_interleave(group, 1))
            ds = p * (dp - delta[rows].t()[..., None].to(dtype)) * slope * options.softmax_scale
            dq[rows] += torch.einsum("hqk,khd->qhd", ds, k[keys].to(dtype).repeat_interleave(group, 1))
            for into, weights, of_rows in ((dk, ds, q[rows].to(dtype)), (dv, p, grad)):
                part = torch.einsum("hqk,qhd->khd", weights, of_rows)
                into[keys] += part.unflatten(1, (k.shape[1], group)).sum(2)
        grads.put((dq, dk, dv))


def add() -> None:
    """Adds the backend in this process: to the registry, and to the configuration's list of names."""
    registry.BACKENDS[NAME] = Slices()
    config.AttendImpl = Literal["auto", *registry.BACKENDS]
