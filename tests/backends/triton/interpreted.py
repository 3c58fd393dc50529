"""Triton's interpreter in this process, before anything imports the kernels: they then run on the CPU, in numpy."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    """NumPy from 2.5 on converts no array of one dimension to a number, of which Triton 3.6 makes bounds of loops."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
