"""Triton's interpreter in this process, before anything imports the kernels: they then run on the CPU, in numpy."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    """NumPy from 2.5 on converts no array of one dimension to a number, of which Triton 3.6 makes bounds of loops."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched

_dot = interpreter.InterpreterBuilder.create_dot


def _dot_with_bf16(builder, a, b, *rest):
    """NumPy has no bf16: Triton keeps its bits, which it would multiply as integers."""
    return _dot(builder, *map(_widened, (a, b)), *rest)


def _widened(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


interpreter.InterpreterBuilder.create_dot = _dot_with_bf16

_masked_load = interpreter.InterpreterBuilder.create_masked_load


def _load_with_any_mask(builder, pointers, mask, *rest, **named):
    """Triton 3.9 makes an integer of ``block & scalar``, and takes booleans alone for a mask."""
    return _masked_load(builder, pointers, _as_bool(mask), *rest, **named)


_masked_store = interpreter.InterpreterBuilder.create_masked_store


def _store_with_any_mask(builder, pointers, values, mask, *rest):
    return _masked_store(builder, pointers, values, _as_bool(mask), *rest)


def _as_bool(mask):
    if isinstance(mask, np.ndarray):  # that of what is loaded by a descriptor is none of Triton's
        return mask
    return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)


interpreter.InterpreterBuilder.create_masked_load = _load_with_any_mask
interpreter.InterpreterBuilder.create_masked_store = _store_with_any_mask
