"""The backends by name, and which one computes a call; nothing else imports their folders."""

from __future__ import annotations

import logging
from functools import cache

import torch

from megatron_magi.backends.base import Backend, Kernels, Sparse
from megatron_magi.backends.blocked.backend import Blocked
from megatron_magi.backends.reference.backend import Reference
from megatron_magi.backends.sm90.backend import Sm90
from megatron_magi.backends.triton.backend import TritonKernels

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Reference(), Blocked(), Sm90(), TritonKernels())}
"""Backends by the value of ``impl`` that selects them."""

SPARSE: dict[str, Sparse] = {name: backend.sparse for name, backend in BACKENDS.items() if backend.sparse is not None}
"""Attention over lists of keys, likewise."""

_FASTEST = ("ffa", "triton")
"""Where ``auto`` looks on a GPU, in this order; otherwise it is `_ANYWHERE`."""

_ANYWHERE = "torch"


def choose(impl: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Backend:
    """The backend that computes: the one asked for, or for ``auto`` the fastest that takes such tensors.

    Where that is not the fastest that GPUs have, the reason is logged, once.

    Args:
        impl: ``auto`` or a name.
        device, dtype: of q, k and v.
        dims: head dims of q and k, and of v.

    Raises:
        ValueError: there is no backend of that name. (One that does not take the tensors says so itself when it is
            called.)
    """
    if not isinstance(impl, str) or impl not in ("auto", *BACKENDS):
        raise ValueError(f"impl: {impl!r} is not available; use one of {', '.join(['auto', *BACKENDS])}")
    if impl != "auto":
        return BACKENDS[impl]
    found = fastest(device, dtype, dims) if device.type == "cuda" else None
    if found is None and device.type == "cuda":
        _warn_once(device, dtype, dims)
    return found or BACKENDS[_ANYWHERE]


def fastest(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Backend | None:
    """The fastest backend with kernels of its own that takes such tensors; None if there is none."""
    known = (BACKENDS[name] for name in _FASTEST)
    return next((backend for backend in known if backend.takes(device, dtype, dims)), None)


def backend_that(offers: str, name: str | None) -> Backend:
    """The backend of a name that offers something; the first that does when None.

    Args:
        offers: ``tables``, ``programs`` or ``capture``, an attribute of `Backend`.
        name: of the backend.

    Raises:
        ValueError: the named one is not there, or does not offer it.
    """
    able = {known: backend for known, backend in BACKENDS.items() if getattr(backend, offers) is not None}
    if name is None:
        return next(iter(able.values()))
    if name not in able:
        raise ValueError(f"backend: expected one of {', '.join(able)}, which have {offers}, got {name!r}")
    return able[name]


@cache
def _warn_once(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    reasons = "; ".join(str(BACKENDS[name].why_not(device, dtype, dims)) for name in _FASTEST)
    logger.warning("attention falls back to the blocked implementation, which is slower: %s", reasons)


def choose_sparse(impl: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Sparse:
    """`choose` of attention over lists of keys; its slowest is the reference."""
    if impl != "auto":
        return SPARSE[impl]
    found = fast_sparse(device, dtype, dims)
    if found is None and device.type == "cuda":
        _warn_sparse_once(device, dtype, dims)
    return found or SPARSE["reference"]


def fast_sparse(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Sparse | None:
    """Kernels for attention over lists of keys that take such tensors; None if there are none."""
    known = (SPARSE[name] for name in _FASTEST if name in SPARSE)
    return next((sparse for sparse in known if sparse.why_not(device, dtype, dims) is None), None)


@cache
def _warn_sparse_once(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    reasons = "; ".join(str(SPARSE[name].why_not(device, dtype, dims)) for name in _FASTEST if name in SPARSE)
    logger.warning("sparse attention falls back to the dense definition: %s", reasons)


def common_kernels() -> Kernels:
    """Kernels of all backends that are compiled into the package."""
    return [kernel for backend in BACKENDS.values() for kernel in backend.common_kernels()]
