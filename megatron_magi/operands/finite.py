"""The optional check that attention's tensors are finite: a pass over memory and a device synchronization."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_magi.mask import bands as bd

Describe = Callable[[str, int], str]


def require_finite(tensors: dict[str, Tensor | None], describe: Describe) -> None:
    """Raises for the first tensor with a row that holds NaN or inf.

    A sink may be infinite: its weight is then 0 or 1.

    Args:
        tensors: by name, ``[num_rows, ...]``; None is left out.
        describe: describes a row in words, from the tensor's name and the row.

    Raises:
        ValueError: the message begins with the tensor's name and says which row, what it is, and on which rank.
    """
    for name, x in tensors.items():
        if x is None or x.numel() == 0:
            continue
        good = ~x.isnan() if name == "sink" else x.isfinite()
        if not good.all():
            row = int((~good.flatten(1).all(dim=1)).nonzero()[0])
            value = x[row][~good[row]].flatten()[0].item()
            raise ValueError(f"{name}: row {row} holds {value}; {describe(name, row)}{_where()}")


def describe_by_bands(bands: np.ndarray) -> Describe:
    """Distinguishes visible rows of q and dout, and visible keys, from hidden ones."""

    def describe(name: str, row: int) -> str:
        return "" if name == "sink" else kind_of_row(name, is_visible(bands, row, by_key=name in ("k", "v")))

    return describe


def kind_of_row(name: str, visible: bool) -> str:
    """Description of a row."""
    if visible:
        return "it is visible"
    return "it is hidden: no query sees it" if name in ("k", "v") else "it is hidden: it sees no key"


def is_visible(bands: np.ndarray, row: int, *, by_key: bool) -> bool:
    """Whether a query sees any key, or ``by_key`` any query sees a key."""
    tight = bd.tighten(bands)
    first, end = (bd.K0, bd.K1) if by_key else (bd.Q0, bd.Q1)
    return bool(((tight[:, first] <= row) & (row < tight[:, end])).any())


def _where() -> str:
    return f" (global rank {dist.get_rank()})" if dist.is_available() and dist.is_initialized() else ""
