"""The example of Megatron Bridge on CPUs, with Megatron's local layers. A script.

Bridge imports `transformer_engine.pytorch` whatever the layers are, and that imports no further without a GPU's
libraries. What stands in for it here has classes that nobody makes objects of. Arguments: Bridge's folder, the example,
the model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import runpy
import sys
import types

from megatron_magi.mcore import install

FOLDER, EXAMPLE, NAME = sys.argv[1:4]
sys.argv = sys.argv[:1]
sys.path.append(FOLDER)
install()

import torch.distributed as dist  # noqa: E402
from megatron.core.extensions.transformer_engine import HAVE_TE  # noqa: E402
from torch import nn  # noqa: E402

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
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_wanted = name.partition(".")[0] == "transformer_engine"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if __name__ == "__main__":
    assert not HAVE_TE, "Megatron itself must not take what stands in for it"
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    train = runpy.run_path(EXAMPLE)["train"]
    from megatron.bridge.models.gpt_provider import local_layer_spec

    dist.init_process_group("gloo")
    train(NAME, transformer_layer_spec=local_layer_spec, **LOCAL)
