"""Positions of a batch: of each token in its document, and where a model has them the rotary ones of several axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.comm.checksum import checksums


def num_axes_of(model_config: Any) -> int:
    """Axes of a model's rotary positions (time, height and width in Qwen2-VL); 0 where a position is one number."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, Mapping) and rope.get("mrope_section"):
            return len(rope["mrope_section"])
    return 0


def check_positions(positions: Tensor, shape: Sequence[int], num_axes: int) -> None:
    """Raises ValueError for positions of another shape than the batch's, or of axes that the model does not have."""
    found, rows = list(positions.shape), [list(shape), [1, shape[1]]]
    if found in rows:
        return
    if positions.ndim == 3 and not num_axes:
        raise ValueError(
            f"position_ids: expected {list(shape)}, got {found}; the model's rotary positions have one axis, as no "
            "mrope_section is configured"
        )
    if positions.ndim != 3 or found[0] not in (num_axes, num_axes + 1) or found[1:] not in rows:
        more = f", or {num_axes} or {num_axes + 1} of these" if num_axes else ""
        raise ValueError(f"position_ids: expected {list(shape)}{more}, got {found}")


def document_positions(positions: Tensor, num_axes: int) -> Tensor | None:
    """``[batch_size or 1, seqlen]``, by which documents are told apart; None where positions of axes alone are given.

    As in transformers: positions of axes may come after those of documents, ``[1 + num_axes, batch_size, seqlen]``.
    """
    if positions.ndim == 2:
        return positions
    return positions[0] if len(positions) == num_axes + 1 else None


def read(positions: Tensor, compared: Mapping[str, Tensor]) -> tuple[np.ndarray, dict[str, int]]:
    """Positions on the CPU, and checksums of what is compared: from a GPU they come in the same copy."""
    sums = checksums(list(compared.values()), positions.device)
    together = torch.cat([sums, positions.reshape(-1).to(torch.int64)]).cpu().numpy()
    found = together[len(sums) :].reshape(tuple(positions.shape))
    return found, dict(zip(compared, together[: len(sums)].tolist(), strict=True))
