"""Names of Transformer Engine, which does not import without a GPU's libraries: classes that nobody makes objects of.

Megatron Bridge imports `transformer_engine.pytorch` whatever the layers are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

from torch import nn


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
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_wanted = name.partition(".")[0] == "transformer_engine"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def provide() -> None:
    """For imports from now on; megatron-core, which would take them for real, has to be imported before."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert not HAVE_TE, "Megatron itself must not take what stands in for it"
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
