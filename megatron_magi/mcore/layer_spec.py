"""Layer specs with Megatron's core attention replaced, wherever in the spec it is."""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from megatron_magi.mcore.core_attention import MagiCoreAttention

_FIELD = "core_attention"


def _replaceable() -> tuple[type, ...]:
    if not HAVE_TE:
        return (DotProductAttention,)
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return (DotProductAttention, TEDotProductAttention)


def replace_core_attention(spec: Any) -> Any:
    """A copy of a layer spec in which local and TE core attention are `MagiCoreAttention`.

    Any other core attention is left where it is; `check_attention` finds it in the model. The
    spec itself is not touched: Megatron shares parts of specs between models.

    Args:
        spec: a `ModuleSpec`, a dataclass of submodules, a list or dict of such, a partial, or None.
    """
    return _copy(spec, _replaceable())


def _copy(node: Any, replaceable: tuple[type, ...]) -> Any:
    if isinstance(node, (list, tuple)):
        items = [_copy(item, replaceable) for item in node]
        return items if isinstance(node, list) else tuple(items)
    if isinstance(node, dict):
        return {key: _copy(value, replaceable) for key, value in node.items()}
    if isinstance(node, functools.partial):
        kwargs = {key: _copy(value, replaceable) for key, value in node.keywords.items()}
        return functools.partial(node.func, *(_copy(value, replaceable) for value in node.args), **kwargs)
    if not is_dataclass(node) or isinstance(node, type):
        return node
    out = copy.copy(node)
    for item in fields(node):
        value = getattr(node, item.name)
        if item.name == _FIELD and _names_one_of(value, replaceable):
            value = MagiCoreAttention
        else:
            value = _copy(value, replaceable)
        object.__setattr__(out, item.name, value)
    return out


def _names_one_of(value: Any, classes: tuple[type, ...]) -> bool:
    """Is ``value`` one of ``classes``, or a spec or a partial of one?"""
    if isinstance(value, ModuleSpec):
        value = value.module
    if isinstance(value, functools.partial):
        value = value.func
    return value in classes


def check_attention(model: nn.Module, cp_size: int) -> None:
    """Refuses a model with layers that would mix tokens without knowing where they are.

    Args:
        model: a pipeline stage.
        cp_size: number of context-parallel ranks.

    Raises:
        ValueError: an attention layer has another core attention, or a layer that needs the
            tokens in their order (Mamba, gated delta net) is used with context parallelism.
    """
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            core = getattr(module, "core_attention", None)
            if not isinstance(core, MagiCoreAttention):
                raise ValueError(
                    f"transformer_layer_spec: {name} ({type(module).__name__}) has the core attention "
                    f"{type(core).__name__}, which --attention-backend magi cannot replace"
                )
        if cp_size > 1 and type(module).__module__.startswith("megatron.core.ssm"):
            raise ValueError(
                f"context_parallel_size: {name} ({type(module).__name__}) needs the tokens in their order, "
                f"--attention-backend magi dispatches them over {cp_size} ranks; use 1"
            )
