"""Layer specs with Megatron's core attention replaced, wherever in the spec it is."""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from megatron_magi.mcore.core_attention import MagiCoreAttention, MagiTECoreAttention
from megatron_magi.mcore.linear_layers import FAMILIES, REPLACEMENTS, LinearLayerMixin
from megatron_magi.mcore.sparse_attention import MagiDSAttention

_FIELD, _MODULE = "core_attention", "module"
_MODULES: dict[type, type[nn.Module]] = {**REPLACEMENTS, DSAttention: MagiDSAttention}
"""Modules of specs, whose submodules stay: what takes their place."""


def _replacements() -> dict[type, type[MagiCoreAttention]]:
    """Megatron's core attention: what takes its place."""
    found: dict[type, type[MagiCoreAttention]] = {DotProductAttention: MagiCoreAttention}
    if HAVE_TE:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        found[TEDotProductAttention] = MagiTECoreAttention
    return found


def replace_core_attention(spec: Any) -> Any:
    """A copy of a layer spec in which local and TE core attention are `MagiCoreAttention` or its variant for TE, and
    linear layers those of `megatron_magi.mcore.linear_layers`; DeepSeek's sparse attention is `MagiDSAttention`.

    Any other core attention is left where it is; `check_attention` finds it in the model. The
    spec itself is not touched: Megatron shares parts of specs between models.

    Args:
        spec: a `ModuleSpec`, a dataclass of submodules, a list or dict of such, a partial, or None.
    """
    return _copy(spec, _replacements())


def _copy(node: Any, replacements: dict[type, type[MagiCoreAttention]]) -> Any:
    if isinstance(node, (list, tuple)):
        items = [_copy(item, replacements) for item in node]
        return items if isinstance(node, list) else tuple(items)
    if isinstance(node, dict):
        return {key: _copy(value, replacements) for key, value in node.items()}
    if isinstance(node, functools.partial):
        kwargs = {key: _copy(value, replacements) for key, value in node.keywords.items()}
        return functools.partial(node.func, *(_copy(value, replacements) for value in node.args), **kwargs)
    if not is_dataclass(node) or isinstance(node, type):
        return node
    out = copy.copy(node)
    for item in fields(node):
        value = getattr(node, item.name)
        named = replacements.get(_named_class(value)) if item.name == _FIELD else None
        if item.name == _MODULE and isinstance(value, type):
            named = _MODULES.get(value)
        value = _copy(value, replacements) if named is None else named
        object.__setattr__(out, item.name, value)
    return out


def _named_class(value: Any) -> type | None:
    """The class that ``value`` is, or of which it is a spec or a partial."""
    if isinstance(value, ModuleSpec):
        value = value.module
    if isinstance(value, functools.partial):
        value = value.func
    return value if isinstance(value, type) else None


def check_attention(model: nn.Module) -> None:
    """Refuses a model with layers that would mix tokens without knowing where they are.

    Args:
        model: a pipeline stage.

    Raises:
        ValueError: an attention layer has another core attention, or a linear layer is none of
            `megatron_magi.mcore.linear_layers`.
    """
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            core = getattr(module, "core_attention", None)
            if not isinstance(core, (MagiCoreAttention, MagiDSAttention)):
                raise ValueError(
                    f"transformer_layer_spec: {name} ({type(module).__name__}) has the core attention "
                    f"{type(core).__name__}, which --attention-backend magi cannot replace"
                )
        if isinstance(module, FAMILIES) and not isinstance(module, LinearLayerMixin):
            raise ValueError(
                f"hybrid_stack_spec, transformer_layer_spec: {name} ({type(module).__name__}) needs the tokens in "
                "their order, and --attention-backend magi does not know it; it knows Megatron's MambaMixer and "
                "GatedDeltaNet"
            )
