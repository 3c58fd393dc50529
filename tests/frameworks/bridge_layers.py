"""Megatron Bridge on CPUs, with Megatron's local layers.

Bridge imports `transformer_engine.pytorch` whatever the layers are, and that imports no further without a GPU's
libraries. What stands in for it here has classes that nobody makes objects of.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

from torch import nn

LOCAL = {
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
}


class _Class(type(nn.Module)):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Class(name, (nn.Module,), {})


class _Names(types.ModuleType):
    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> type:
        return getattr(_Class(self.__name__, (nn.Module,), {}), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_wanted = any(name == one or name.startswith(f"{one}.") for one in self._names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(*others: str) -> None:
    """From now on Transformer Engine, and other modules, are what stands in for them. Megatron is imported already."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert not HAVE_TE, "Megatron itself must not take what stands in for it"
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(("transformer_engine", *others)))
