"""What must be other in Megatron itself where the CPU answers for a GPU; the rest is `megatron_magi.cpu_device`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron_magi.mcore import seams

_MOVE = "core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu"
_WARMUP = "training.initialize:_warmup_jit_function"


def install() -> None:
    """Lets Megatron run where `cpu_device.install` has answered for a GPU. Idempotent."""
    original = seams.original(_MOVE)
    # Other modules have imported it by name.
    for module in [m for name, m in sys.modules.items() if name.startswith("megatron.")]:
        if getattr(module, "maybe_move_tensor_to_cpu", None) is original:
            module.maybe_move_tensor_to_cpu = move_to_cpu
    seams.put(_MOVE, move_to_cpu)
    seams.put(_WARMUP, _no_warmup)


def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The original leaves a tensor that is on the CPU alone and forgets ``as_numpy``: moe_utils.py:1184."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _no_warmup(*args: Any, **kwargs: Any) -> None:
    """The warm-up draws from the generator that weights are initialised with, as often as the local sequence is long.

    Weights would depend on the context-parallel size.
    """
