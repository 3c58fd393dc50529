"""Options of an attention call, and checks of arguments for all implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.checks import check_local, flag, int_at_least, real
from megatron_magi.mask import bands as bd
from megatron_magi.operands.frozen import FrozenMemo

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_checked: FrozenMemo[tuple[int, int]] = FrozenMemo()
"""Numbers of queries and keys for which tables of bands have been checked."""


@dataclass(frozen=True)
class AttnOptions:
    """Numbers and switches of one attention call.

    Attributes:
        softmax_scale: factor of q @ k.
        softcap: 0 for none; else logits become ``softcap * tanh(logit / softcap)``.
        deterministic: bitwise repeatable results.
        sm_margin: streaming multiprocessors left free for communication.
        sanity_check: check the tensors of each pass for NaN and inf.
    """

    softmax_scale: float
    softcap: float = 0.0
    deterministic: bool = False
    sm_margin: int = 0
    sanity_check: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.softmax_scale) and self.softmax_scale > 0):
            raise ValueError(f"softmax_scale: expected a positive finite number, got {self.softmax_scale}")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap: expected 0 (none) or a positive finite number, got {self.softcap}")
        if self.sm_margin < 0:
            raise ValueError(f"sm_margin: must not be negative, got {self.sm_margin}")


def make_options(
    q: Tensor,
    softmax_scale: float | None,
    softcap: float,
    deterministic: bool,
    sm_margin: int,
    sanity_check: bool = False,
) -> AttnOptions:
    """`AttnOptions` with the default scale, ``1 / sqrt(head_dim)``.

    Results are also deterministic if ``torch.use_deterministic_algorithms`` is on.
    """
    softmax_scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else real(softmax_scale, "softmax_scale")
    softcap = real(softcap, "softcap")
    deterministic = flag(deterministic, "deterministic") or torch.are_deterministic_algorithms_enabled()
    sm_margin = int_at_least(sm_margin, "sm_margin", 0)
    return _options(softmax_scale, softcap, deterministic, sm_margin, flag(sanity_check, "sanity_check"))


@lru_cache(maxsize=256)
def _options(
    softmax_scale: float, softcap: float, deterministic: bool, sm_margin: int, sanity_check: bool
) -> AttnOptions:
    return AttnOptions(softmax_scale, softcap, deterministic, sm_margin, sanity_check)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError, naming the argument, unless q, k and v fit together."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t)
    of_q, of_k, of_v, dtype, device = q.shape, k.shape, v.shape, q.dtype, q.device
    if (
        len(of_q) == len(of_k) == len(of_v) == 3
        and dtype is k.dtype is v.dtype
        and dtype in FLOAT_DTYPES
        and device == k.device == v.device
        and of_k[0] == of_v[0]
        and of_k[1] == of_v[1]
        and of_k[2] == of_q[2] > 0
        and of_k[1] > 0
        and of_v[2] > 0
        and of_q[1] > 0
        and of_q[1] % of_k[1] == 0
    ):
        return  # fast path: all checks pass; below finds the error
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 3:
            raise ValueError(f"{name}: expected [num_tokens, num_heads, head_dim], got shape {list(t.shape)}")
        if t.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}: expected a floating-point dtype of 16 to 64 bits, got {t.dtype}")
        if t.dtype != q.dtype:
            raise ValueError(f"{name}: expected the dtype of q, {q.dtype}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {t.device}")
    if k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(f"v: expected the tokens and heads of k, {list(k.shape[:2])}, got {list(v.shape[:2])}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: expected the head_dim of q, {q.shape[2]}, got {k.shape[2]}")
    if min(q.shape[1], k.shape[1], q.shape[2], v.shape[2]) < 1:
        raise ValueError(f"q, k, v: heads and head_dim must be positive, got {list(q.shape)}, {list(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: expected num_heads_q to be a multiple of num_heads_kv, {k.shape[1]}, got {q.shape[1]}")


def check_tensor(name: str, t: Any) -> None:
    """Raises ValueError, naming the argument, unless it is a tensor, not a sparse, nested or distributed one."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(t).__name__}")
    if type(t) is not Tensor:
        check_local(t, name)
    if t.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got one of layout {t.layout}")


def written_out(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, or copies in which the sign that torch only notes is in the memory that kernels read."""
    for t in tensors:
        if isinstance(t, Tensor) and t.is_neg():
            return tuple(x.resolve_neg() if isinstance(x, Tensor) else x for x in tensors)
    return tensors


def check_like(name: str, t: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises ValueError, naming the argument, unless it is a float tensor of this shape and device."""
    check_tensor(name, t)
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(t.shape)}")
    if t.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}: expected a floating-point dtype of 16 to 64 bits, got {t.dtype}")
    if t.device != device:
        raise ValueError(f"{name}: expected the device of q, {device}, got {t.device}")


def check_sink(sink: Tensor, q: Tensor) -> None:
    """Raises ValueError unless ``sink`` has one of the two layouts and the device of q."""
    check_tensor("sink", sink)
    num_rows, num_heads_q = q.shape[:2]
    if not sink.dtype.is_floating_point:
        raise ValueError(f"sink: expected a floating-point dtype, got {sink.dtype}")
    if sink.device != q.device:
        raise ValueError(f"sink: expected the device of q, {q.device}, got {sink.device}")
    shared = sink.ndim == 2 and sink.shape[1] == num_heads_q
    per_row = sink.ndim == 3 and sink.shape[0] == num_rows and sink.shape[2] == num_heads_q
    if not (shared or per_row):
        raise ValueError(
            f"sink: expected shape [num_sinks, {num_heads_q}] or [{num_rows}, num_sinks, {num_heads_q}], "
            f"got {list(sink.shape)}"
        )


def check_bands(bands: np.ndarray, num_rows: int, num_keys: int, name: str = "bands") -> np.ndarray:
    """The table, if it lies inside ``num_rows`` x ``num_keys``; else ValueError, in which it is called ``name``."""
    known = _checked.get(bands)
    if known is not None and known[0] <= num_rows and known[1] <= num_keys:
        return bands
    if not isinstance(bands, np.ndarray) or bands.ndim != 2 or bands.shape[1] != bd.NUM_COLUMNS:
        got = list(bands.shape) if hasattr(bands, "shape") else type(bands).__name__
        raise ValueError(f"{name}: expected an int64 array [n, {bd.NUM_COLUMNS}], got {got}")
    if bands.dtype != np.int64:
        raise ValueError(f"{name}: expected dtype int64, got {bands.dtype}")
    for what, lo, hi, total in (("queries", bd.Q0, bd.Q1, num_rows), ("keys", bd.K0, bd.K1, num_keys)):
        bad = (bands[:, lo] < 0) | (bands[:, lo] > bands[:, hi]) | (bands[:, hi] > total)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{name}: {what} of band {i}, [{bands[i, lo]}, {bands[i, hi]}), are not a range in [0, {total})"
            )
    _checked.put(bands, (num_rows, num_keys))
    return bands
