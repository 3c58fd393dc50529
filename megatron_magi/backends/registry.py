"""The backends by name, and which one computes a call; nothing else imports their folders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import Backend, Kernels, Latent, LatentPart, Sparse
from megatron_magi.backends.blocked.backend import Blocked
from megatron_magi.backends.cudnn.backend import Cudnn
from megatron_magi.backends.reference.backend import Reference
from megatron_magi.backends.sm90.backend import Sm90
from megatron_magi.backends.triton.backend import TritonKernels
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Reference(), Blocked(), Sm90(), Cudnn(), TritonKernels())
}
"""Backends by the value of ``impl`` that selects them."""

SPARSE: dict[str, Sparse] = {name: backend.sparse for name, backend in BACKENDS.items() if backend.sparse is not None}
"""Attention over lists of keys, likewise."""


class Completed:
    """Attention over lists of latent keys by two backends; the second for delta, and for dtypes that the first has no
    backward for.
    """

    def __init__(self, first: LatentPart, second: Latent) -> None:
        self._first, self._second = first, second
        self.forward, self.row_delta = first.forward, second.row_delta

    def backward(
        self, inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """See `megatron_magi.backends.base.Latent`."""
        taken = self._first.takes_backward(inputs.q.dtype)
        return (self._first if taken else self._second).backward(inputs, pattern, softmax_scale, deterministic)

    def why_not(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
        return self._first.why_not(device, dtype, dims) or self._second.why_not(device, dtype, dims)


def _latent() -> dict[str, Latent]:
    found = {name: backend.latent for name, backend in BACKENDS.items() if backend.latent is not None}
    parts = {name: backend.latent_part for name, backend in BACKENDS.items() if backend.latent_part}
    return found | {name: Completed(part, found["triton"]) for name, part in parts.items()}


LATENT: dict[str, Latent] = _latent()
"""Attention over lists of latent keys, likewise. What a backend's part lacks is by the kernels in Triton."""

_FASTEST_SPARSE = ("ffa",)
"""The same for lists of keys. Those for blocks and keys in Triton are taken by name alone: not yet run on a GPU."""

_FASTEST_LATENT = ("ffa", "triton")
"""The same for lists of latent keys."""

_DEFINITION = "reference"
"""Where ``auto`` finds nothing among those, and on CPUs for latent keys."""

_FASTEST = ("ffa", "cudnn", "triton")
"""Where ``auto`` looks on a GPU, in this order: the first that takes the call. Which GPUs a backend serves is its own
matter (`Backend.why_not`). Where none does, it is `_ANYWHERE`."""

_ANYWHERE = "torch"
_said: set[tuple] = set()
"""What `_say_once` has logged."""


def choose(
    impl: str,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    options: AttnOptions | None = None,
    masks: Sequence[np.ndarray] = (),
) -> Backend:
    """The backend that computes: the one asked for, or for ``auto`` the first of the fastest that takes the call.

    Which one that is on a GPU is logged once, with the reasons against those before it.

    Args:
        impl: ``auto`` or a name.
        device, dtype: of q, k and v.
        dims: head dims of q and k, and of v.
        options: of the call; None where they are not known, or do not matter.
        masks: bands of the passes of the call, likewise.

    Raises:
        ValueError: there is no backend of that name. (One that does not take the call says so itself when it is
            called.)
    """
    if not isinstance(impl, str) or impl not in ("auto", *BACKENDS):
        raise ValueError(f"impl: {impl!r} is not available; use one of {', '.join(['auto', *BACKENDS])}")
    if impl != "auto":
        return BACKENDS[impl]
    if device.type != "cuda":
        return BACKENDS[_ANYWHERE]
    found = fastest(device, dtype, dims, options, masks) or BACKENDS[_ANYWHERE]
    if found.name != _FASTEST[0]:
        _say_once(found.name, device, dtype, dims, options, masks)
    return found


def fastest(
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    options: AttnOptions | None = None,
    masks: Sequence[np.ndarray] = (),
) -> Backend | None:
    """The first of the fastest backends that takes a call, see `choose`; None if there is none."""
    for name in _FASTEST:
        backend = BACKENDS[name]
        if backend.takes(device, dtype, dims) and refusal(backend, options, masks) is None:
            return backend
    return None


def faster_than_chosen(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> list[Backend]:
    """The backends that ``auto`` passes over for such tensors, before it takes one."""
    found = fastest(device, dtype, dims)
    before = _FASTEST if found is None else _FASTEST[: _FASTEST.index(found.name)]
    return [BACKENDS[name] for name in before]


def refusal(backend: Backend, options: AttnOptions | None, masks: Sequence[np.ndarray]) -> str | None:
    """The reason why a backend does not take options or masks; None if it does."""
    if options is None:
        return None
    reasons = (backend.why_not_call(options, bands) for bands in masks or (None,))
    return next(filter(None, reasons), None)


def _say_once(name: str, *call: Any) -> None:
    """Logs which backend ``auto`` took for calls like this one, and why those before it did not."""
    device, dtype, dims, options, masks = call
    key = name, device, dtype, dims, options is not None and options.softcap > 0
    if key in _said:
        return
    _said.add(key)
    before = _FASTEST[: _FASTEST.index(name)] if name in _FASTEST else _FASTEST
    passed_over = (BACKENDS[known] for known in before)
    reasons = "; ".join(str(b.why_not(device, dtype, dims) or refusal(b, options, masks)) for b in passed_over)
    if name == _ANYWHERE:
        logger.warning("attention falls back to the blocked implementation, which is slower: %s", reasons)
    else:
        logger.info("attention is computed by %r: %s", name, reasons)


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


def choose_sparse(impl: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Sparse:
    """`choose` of attention over lists of keys; its slowest is the reference."""
    if impl != "auto":
        return SPARSE[impl]
    found = fast_sparse(device, dtype, dims)
    if found is None and device.type == "cuda":
        _warn_sparse_once(device, dtype, dims)
    return found or SPARSE[_DEFINITION]


def fast_sparse(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Sparse | None:
    """Kernels for attention over lists of keys that take such tensors; None if there are none."""
    known = (SPARSE[name] for name in _FASTEST_SPARSE)
    return next((sparse for sparse in known if sparse.why_not(device, dtype, dims) is None), None)


@cache
def _warn_sparse_once(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    reasons = "; ".join(str(SPARSE[name].why_not(device, dtype, dims)) for name in _FASTEST_SPARSE)
    logger.warning("sparse attention falls back to the dense definition: %s", reasons)


def choose_latent(impl: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Latent:
    """`choose` of attention over lists of latent keys; its slowest is the reference."""
    if impl != "auto":
        return LATENT[impl]
    if device.type != "cuda":
        return LATENT[_DEFINITION]
    known = (LATENT[name] for name in _FASTEST_LATENT)
    found = next((latent for latent in known if latent.why_not(device, dtype, dims) is None), None)
    if found is None:
        _warn_latent_once(device, dtype, dims)
    return found or LATENT[_DEFINITION]


@cache
def _warn_latent_once(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    reasons = "; ".join(str(LATENT[name].why_not(device, dtype, dims)) for name in _FASTEST_LATENT)
    logger.warning("attention over lists of latent keys falls back to the definition, which is slow: %s", reasons)


def common_kernels() -> Kernels:
    """Kernels of all backends that are compiled into the package."""
    return [kernel for backend in BACKENDS.values() for kernel in backend.common_kernels()]
