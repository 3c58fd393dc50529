"""This package under the names `magi_attention` and `magi_attn_extensions`, for frameworks that import those.

A finder serves their public modules, with the names that are here. A name that is not here raises an ImportError that
says what replaces it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_magi.compat.package_names import MODULES

PACKAGES = {"magi_attention": "megatron_magi.api", "magi_attn_extensions": "megatron_magi.extensions"}
"""Packages whose place is taken, and the module here that has their names."""

VERSION = "1.1.1+megatron.magi"
"""``__version__`` of the modules: that of MagiAttention whose names they have."""

WHY_MISSING = {
    "magi_attention": "a key is enough, and kernels are compiled when first used",
    "magi_attention.api": "a key is enough: its plan is made when it is needed, and clear_cache drops plans",
    "magi_attention.benchmarking": "measure with your own tools",
    "magi_attention.comm": "megatron_magi.comm.group_collective has the collectives",
    "magi_attention.common": "masks are megatron_magi.AttnMask; kernels and buffers need no calls",
    "magi_attention.config": "megatron_magi.MagiConfig has the settings",
    "magi_attention.dist_attn_runtime_mgr": "a key is enough: its plan is made when it is needed",
    "magi_attention.env": "megatron_magi.envs.load() has all variables",
    "magi_attention.functional": "dispatch, undispatch, roll and calc_attn of magi_attention.api take a key",
    "magi_attention.functional.fa4": "there are no kernels of FlashAttention 4",
    "magi_attention.functional.utils": "correct_attn_out_lse is safe for rows that see nothing, and differentiable",
    "magi_attention.meta": "megatron_magi.make_plan plans for all ranks",
    "magi_attention.testing": "torch.testing and slice_attention(..., impl='reference') compare results",
    "magi_attention.utils": "torch and Python have such tools",
    "magi_attention.utils.sparse_utils": "megatron_magi.block_sparse_attention and index_sparse_attention take lists",
    "magi_attn_extensions": "its functions are here, not the parts that they are made of",
}
"""Why names of a module and of those inside it are not here, unless a longer entry says more."""


def as_magi_attention() -> None:
    """Let `magi_attention` and `magi_attn_extensions`, imported from now on, be this package in this process.

    For frameworks that import MagiAttention by its name: call it before they are imported. Every public module of
    v1.1.1 can be imported; a public name that is not here raises an ImportError that says why. Where MagiAttention is
    installed too, this package takes its place. A second call changes nothing.

    Raises:
        ImportError: another `magi_attention` or `magi_attn_extensions` has been imported already.
    """
    for package in PACKAGES:
        module = sys.modules.get(package)
        if module is not None and not is_ours(module):
            raise ImportError(
                f"another {package} has been imported already, from {getattr(module, '__file__', None)}: call "
                "megatron_magi.as_magi_attention() before what imports it"
            )
    if not any(isinstance(finder, PackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PackageFinder())


def is_ours(module: ModuleType) -> bool:
    """Whether ``module`` is one of those that `fill_module` has filled."""
    return vars(module).get("__provided_by__") == "megatron_magi"


class PackageFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of `PACKAGES`."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of ``fullname``, None if it is of another package.

        Raises:
            ModuleNotFoundError: ``fullname`` is inside one of the packages and no public module of v1.1.1.
        """
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} is no public module of MagiAttention 1.1.1; megatron_magi, which stands for it here, has "
                f"its public modules alone: {why_missing(fullname)}",
                name=fullname,
            )
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, self, origin="megatron_magi", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        fill_module(module)


def fill_module(module: ModuleType) -> None:
    """Give ``module`` the names that the public module of its name has here; they are looked up when first used."""
    name = module.__name__
    home = PACKAGES[name.partition(".")[0]]

    def get(attribute: str) -> Any:
        value = find_value(name, attribute, home)
        setattr(module, attribute, value)
        return value

    names = [attribute for attribute in sorted(MODULES[name]) if is_here(name, attribute, home)]
    module.__doc__ = f"`{name}` of MagiAttention {VERSION.partition('+')[0]} as `megatron_magi` provides it."
    module.__version__ = VERSION
    module.__provided_by__ = "megatron_magi"
    module.__all__ = names
    module.__getattr__ = get
    module.__dir__ = lambda: sorted({*vars(module), *names})


def is_here(module: str, name: str, home: str) -> bool:
    """Whether ``name`` of ``module`` is a submodule, or a name of ``home``."""
    in_comm = name == "dsink_all_reduce_op" and module.endswith("comm")
    return f"{module}.{name}" in MODULES or in_comm or name in importlib.import_module(home).__all__


def find_value(module: str, name: str, home: str) -> Any:
    """What ``name`` of ``module`` is here.

    Raises:
        ImportError: MagiAttention has the name, and it is not here.
        AttributeError: MagiAttention has no such name.
    """
    if f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    if name not in MODULES[module]:
        raise AttributeError(f"module {module!r} (of megatron_magi) has no attribute {name!r}")
    if not is_here(module, name, home):
        raise ImportError(
            f"{name} of {module} is not in megatron_magi, which stands for MagiAttention here: {why_missing(module)}. "
            "See docs/migration.md, names that are replaced",
            name=module,
        )
    owner = importlib.import_module(home)
    return owner.comm.dsink_all_reduce_op if name == "dsink_all_reduce_op" else getattr(owner, name)


def why_missing(module: str) -> str:
    """The entry of `WHY_MISSING` for ``module`` or the nearest package around it."""
    while module not in WHY_MISSING:
        module = module.rpartition(".")[0]
    return WHY_MISSING[module]
