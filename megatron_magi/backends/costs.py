"""Rates by kind of GPU, and costs of the kernels that run there: what plans need to know of backends.

Apart from `registry`, as plans need no torch.
"""

from __future__ import annotations

from megatron_magi.backends.sm90 import cost as sm90
from megatron_magi.cost_model import KernelCosts, Rates

DEFAULT = sm90.H100
"""Rates for GPUs of another kind, and for CPUs that plan for a GPU they do not see."""

RATES: dict[str, Rates] = {rates.device: rates for rates in (sm90.H100, sm90.H200)}
"""Rates by kind of GPU, a part of its name."""

KERNELS: dict[str, KernelCosts] = dict.fromkeys(RATES, sm90.KERNELS)
"""Costs of the fastest kernels, likewise."""


def rates_of(device_name: str) -> Rates:
    """The rates of a kind of GPU, by its name as CUDA has it; `DEFAULT` where the kind is not known."""
    return next((rates for kind, rates in RATES.items() if kind in device_name), DEFAULT)


def kernel_costs_of(device_name: str) -> KernelCosts:
    """The costs of the fastest kernels on a kind of GPU; those on `DEFAULT` where the kind is not known."""
    return next((costs for kind, costs in KERNELS.items() if kind in device_name), KERNELS[DEFAULT.device])
