"""The functions by which NeMo Automodel uses MagiAttention, with their names, over what is here.

A `MagiState` is the whole state: of one model, held by the training loop. Nothing is kept in the process, so several
models train side by side. Docs: docs/hugging_face.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.api import (
    calc_attn,
    dispatch,
    get_position_ids,
    magi_attn_flex_key,
    make_varlen_key_for_new_mask_after_dispatch,
)
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.make_key import made_on_all_ranks
from megatron_magi.checks import flag, instance, int_array, int_at_least
from megatron_magi.comm.agreement import told
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.hf.attention import NAME, check_implementation
from megatron_magi.hf.mask_spec import AttnMaskSpec
from megatron_magi.hf.registration import register
from megatron_magi.hf.shard import IGNORED, heads_of, shard_batch
from megatron_magi.mask import AttnMask, builders
from megatron_magi.operands.options import check_tensor
from megatron_magi.ops.slice_attention import slice_attention

__all__ = [
    "DEFAULT_CHUNK_SIZE",
    "AttnMaskSpec",
    "MagiAttnFunc",
    "MagiState",
    "build_flex_key",
    "get_cp_group",
    "is_magi_available",
    "magi_prepare_batch",
    "magi_prepare_packed_cp",
    "magi_prepare_vlm",
    "make_magi_attn_func",
    "register_magi_attention",
    "setup_magi",
]

DEFAULT_CHUNK_SIZE = None
"""Tokens a chunk: chosen for the mask."""

_SAID = {"max_seqlen", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_kv", "qkv_format", "cp_size", "cp_rank"}
"""Arguments of attention that say what is known from others."""

_ROWS = ("input_ids", "labels", "position_ids")
"""What a packed batch has for each token."""

logger = logging.getLogger(__name__)
register_magi_attention = register


@dataclass
class MagiState:
    """How one model is trained; made by `setup_magi`. When not ``enabled`` the recipe leaves batches as they are.

    Attributes:
        enabled: the model attends by this package.
        custom: by a function of `make_magi_attn_func`, not by ``attn_implementation="magi"``.
        cp_group: the ranks of a sequence; None is one.
        cp_size: their number.
        domain: "llm" or "vlm", for `make_cp_batch`.
        attn_spec: the mask of the batch for attention functions of this state on one rank; causal when None.
        key: of the batch that was dispatched last, for the same functions on several ranks. The backward of a batch
            comes before the next is prepared, if layers are recomputed.
        num_functions: of attention, that were made with the state.
    """

    enabled: bool = False
    custom: bool = False
    cp_group: dist.ProcessGroup | None = None
    cp_size: int = 1
    domain: str = "llm"
    attn_spec: AttnMaskSpec | None = None
    key: DistAttnRuntimeKey | None = None
    num_functions: int = field(default=0, compare=False)

    @property
    def hf_dispatch(self) -> bool:
        """Batches are dispatched for a model of transformers."""
        return self.enabled and not self.custom

    def prepare_llm_batch(
        self,
        model: Any,
        batch: dict[str, Any],
        *,
        device_mesh: Any = None,
        is_thd: bool = False,
        pad_id: int = 0,
        num_chunks: int = 1,
    ) -> tuple[Callable, dict[str, Any]]:
        """``(nullcontext, batch)``: this rank's part of a batch.

        Args:
            model: whose configuration has the attention's heads.
            batch: as `magi_prepare_batch` or, of a custom model with ``is_thd``, `magi_prepare_packed_cp` takes it;
                ``prefix_tree``, a pair of node lengths and sample paths, is its mask.
            device_mesh, pad_id, num_chunks: without effect: the group is the state's, no padding is added.

        Raises:
            ValueError: a custom model on several ranks whose batch is not packed, or that has no attention of
                `make_magi_attn_func`; ``prefix_tree`` is no pair; as these two functions.
        """
        with made_on_all_ranks(self.cp_group, None):
            batch, is_thd = dict(batch), flag(is_thd, "is_thd")
            tree = batch.pop("prefix_tree", None)
            if tree is not None and not (isinstance(tree, tuple | list) and len(tree) == 2):
                raise ValueError(f"prefix_tree: expected a pair of node lengths and sample paths, got {tree!r}")
            self.attn_spec = None if tree is None else AttnMaskSpec.prefix_tree(*tree)[0]
            self.key = None
            if self.custom:
                _bind(model, self)
                if self.cp_size > 1 and not is_thd:
                    raise ValueError("is_thd: a custom model on several ranks takes packed batches")
        if self.hf_dispatch:
            if self.attn_spec is not None:
                batch["magi_mask"] = self.attn_spec.mask
            batch, self.key = magi_prepare_batch(model, batch, self.cp_group)
        elif self.custom and self.cp_size > 1:
            batch, self.key = magi_prepare_packed_cp(model, batch, self.cp_group, self.attn_spec)
        elif self.custom and is_thd:
            batch = _flat(batch)
        return nullcontext, batch

    def prepare_vlm_batch(self, model: Any, batch: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
        """``(nullcontext, batch)``; see `magi_prepare_vlm`."""
        if self.hf_dispatch:
            batch, _ = magi_prepare_vlm(model, batch, self.cp_group)
        return nullcontext, batch

    def make_cp_batch(
        self,
        cp_mesh: Any,
        batch: dict[str, Any],
        *,
        padding_token_id: int = 0,
        num_chunks: int = 1,
        is_thd: bool = False,
        model: Any = None,
        return_local_indices: bool = False,
    ) -> dict[str, Any] | tuple[dict[str, Any], Tensor | None]:
        """The batch that `prepare_llm_batch` or `prepare_vlm_batch` makes, by ``domain``.

        With ``return_local_indices`` also the place of each local token in the sequence, int64 ``[num_rows]``; None
        where nothing was dispatched.
        """
        if self.domain == "vlm":
            self.key, batch = None, self.prepare_vlm_batch(model, batch)[1]
        else:
            batch = self.prepare_llm_batch(model, batch, is_thd=is_thd)[1]
        if not flag(return_local_indices, "return_local_indices"):
            return batch
        return batch, None if self.key is None else get_position_ids(self.key)


def setup_magi(cfg: Any, device_mesh: Any, *, domain: str = "llm", label: str = "") -> MagiState:
    """The state of a model, from a recipe's configuration.

    Args:
        cfg: nested mappings, or an object whose ``get`` takes dotted names. ``model.attn_implementation`` or
            ``model.backend.attn`` is "magi" where this package is asked for.
        device_mesh: its dimension "cp" is the ranks of a sequence; one rank without one.
        domain: "llm" or "vlm".
        label: of the model, for the log.

    Raises:
        ValueError: there is no such domain.
    """
    if domain not in ("llm", "vlm"):
        raise ValueError(f"domain: expected 'llm' or 'vlm', got {domain!r}")
    custom = _setting(cfg, "model.backend.attn") == NAME
    if not custom and _setting(cfg, "model.attn_implementation") != NAME:
        return MagiState(domain=domain)
    group = get_cp_group(device_mesh)
    size = 1 if group is None else group.size()
    logger.info("attention by megatron_magi%s on %d rank(s) a sequence", f" in {label}" if label else "", size)
    return MagiState(enabled=True, custom=custom, cp_group=group, cp_size=size, domain=domain)


def get_cp_group(device_mesh: Any) -> dist.ProcessGroup | None:
    """The group of the dimension "cp" of a mesh; None where there is none."""
    names = getattr(device_mesh, "mesh_dim_names", None) or ()
    return device_mesh["cp"].get_group() if "cp" in names else None


def is_magi_available() -> bool:
    """True."""
    return True


def build_flex_key(
    spec: AttnMaskSpec, num_heads_q: int, num_heads_kv: int, head_dim: int, cp_group: Group
) -> DistAttnRuntimeKey:
    """The key of a mask; padding is computed, on one rank there is none."""
    return magi_attn_flex_key(*_slices(spec), num_heads_q, num_heads_kv, head_dim, cp_group_or_mesh=cp_group)


def _slices(spec: AttnMaskSpec) -> tuple:
    return spec.q_ranges, spec.k_ranges, spec.mask_types, spec.total_seqlen, spec.total_seqlen


def magi_prepare_batch(
    model: Any, batch: dict[str, Any], cp_group: Group, chunk_size: int | None = DEFAULT_CHUNK_SIZE
) -> tuple[dict[str, Any], DistAttnRuntimeKey]:
    """This rank's part of a batch for a model of transformers with ``attn_implementation="magi"``. Collective.

    Args:
        model: wrapped or not.
        batch: as `shard_batch` takes it. Labels are dispatched as they are: those of a loss that does not shift.
        cp_group: the ranks, a group or a mesh; None is one.
        chunk_size: tokens a chunk; chosen when None.

    Returns:
        ``(new_batch, key)``. The mask of attention is in ``new_batch["attention_mask"]``.

    Raises:
        ValueError: as `shard_batch`.
    """
    config = None if chunk_size is None else MagiConfig(dispatch=DispatchConfig(chunk_size=chunk_size))
    local, shard = shard_batch(batch, cp_group, _config_of(model), config)
    for name in ("shift_labels", "num_items_in_batch"):
        if batch.get(name) is None:
            local.pop(name, None)
    return local, shard.key


def magi_prepare_packed_cp(
    model: Any, batch: dict[str, Any], cp_group: Group, spec: AttnMaskSpec | None = None
) -> tuple[dict[str, Any], DistAttnRuntimeKey]:
    """This rank's part of a packed batch for a model that attends by `make_magi_attn_func`. Collective.

    Args:
        model: its configuration has the attention's heads.
        batch: ``input_ids`` and, where given, ``labels`` and ``position_ids``, flat or ``[batch_size, seqlen]``;
            ``cu_seqlens_padded`` or ``cu_seqlens``, bounds of the documents over all tokens, or their lengths
            ``seq_lens_padded`` or ``seq_lens``; negative numbers are filling.
        cp_group: the ranks, a group or a mesh.
        spec: the mask, in place of causal documents.

    Returns:
        ``(new_batch, key)``: ``input_ids``, ``position_ids`` and, if they were given, ``labels`` ``[num_rows]``, and
        ``qkv_format``.

    Raises:
        ValueError: the documents, labels, positions or ``spec`` do not fit the tokens, or there are none.
    """
    with made_on_all_ranks(cp_group, None):
        flat = _flat(batch)
        tokens = flat["input_ids"]
        if spec is None:
            spec = AttnMaskSpec.of(builders.varlen(flat["cu_seqlens"], causal=True))
        instance(spec, "spec", AttnMaskSpec)
        if spec.total_seqlen != len(tokens):
            raise ValueError(f"spec: expected a mask of {len(tokens)} tokens, got {spec.total_seqlen}")
    positions = flat.get("position_ids")
    compare = {name: 0 if flat.get(name) is None else flat[name] for name in _ROWS}
    key = magi_attn_flex_key(*_slices(spec), *heads_of(_config_of(model)), cp_group_or_mesh=cp_group, compare=compare)
    new_batch = {
        "input_ids": dispatch(tokens, key),
        "position_ids": get_position_ids(key).to(tokens.device) if positions is None else dispatch(positions, key),
        "qkv_format": "thd",
    }
    if flat.get("labels") is not None:
        new_batch["labels"] = dispatch(flat["labels"], key, pad_value=IGNORED)
    return new_batch, key


def magi_prepare_vlm(model: Any, batch: dict[str, Any], cp_group: Group) -> tuple[dict[str, Any], None]:
    """``(batch, None)``, as it is: masks of models with images are read off the model where it attends.

    Raises:
        ValueError: there are several ranks, or the language model attends otherwise.
    """
    group = group_of(cp_group, "cp_group")
    if group is not None and group.size() > 1:
        raise ValueError(f"cp_group: images are not spread over ranks, got {group.size()} ranks")
    check_implementation(_config_of(model))
    return batch, None


class MagiAttnFunc:
    """Attention for models that take theirs as a function; made by `make_magi_attn_func`.

    Attributes:
        softmax_scale: ``head_dim ** -0.5`` when None.
        state: of the model, whose batches it attends over; None until one is prepared for the model that has it.
    """

    def __init__(self, softmax_scale: float | None, state: MagiState | None) -> None:
        self.softmax_scale, self.state = softmax_scale, state

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        magi_attn_spec: AttnMaskSpec | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        window_size: Any = None,
        **options: Any,
    ) -> Tensor:
        """Attention of q, k, v ``[num_rows, num_heads, head_dim]`` or ``[batch_size, seqlen, num_heads, head_dim]``.

        Its mask is ``magi_attn_spec`` if there is one; else that of the batch which ``state`` dispatched; else the
        documents of ``cu_seqlens`` or ``cu_seqlens_q``; else ``state.attn_spec``; else causal.

        Args:
            window_size: (left, right), or left alone, narrows causal documents; -1 and None for no bound.

        Returns:
            As q, with the head dim of v.

        Raises:
            ValueError: a mask or an option that cannot be expressed.
        """
        state, spec = self.state or MagiState(), magi_attn_spec
        key = state.key if magi_attn_spec is None else None
        with told(None if key is None else key.cp_group):
            _check_call(q, k, v, options)
            shape, window = q.shape[:-1], _window(window_size)
            lengths: dict[str, Any] = {"doc_lengths": [shape[1]] * shape[0] if q.ndim == 4 else [shape[0]]}
            bounds = cu_seqlens if cu_seqlens is not None else cu_seqlens_q
            if spec is not None:
                instance(spec, "magi_attn_spec", AttnMaskSpec)
            if bounds is not None:
                lengths = {"cu_seqlens": _numbers(bounds, "cu_seqlens_q" if cu_seqlens is None else "cu_seqlens")}
            elif spec is None:
                spec = state.attn_spec
        q, k, v = (x.flatten(0, -3) for x in (q, k, v))
        if key is not None:
            out, _ = calc_attn(q, k, v, _window_key(key, window), softmax_scale=self.softmax_scale)
        else:
            mask = _documents(window, **lengths) if spec is None else _spec_mask(spec, window)
            out, _ = slice_attention(q, k, v, mask, softmax_scale=self.softmax_scale)
        return out.view(*shape, out.shape[-1])


def _check_call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    for name in options.keys() - _SAID:
        if options[name] is not None:
            raise ValueError(f"{name}: not supported, got {options[name]!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim not in (3, 4) or x.ndim != q.ndim:
            raise ValueError(f"{name}: expected 3 or 4 dimensions, the same for q, k and v, got {list(x.shape)}")


def make_magi_attn_func(softmax_scale: float | None = None, state: MagiState | None = None) -> MagiAttnFunc:
    """Attention for models that take theirs as a function ``attend(q, k, v, ...)``.

    Args:
        softmax_scale: ``head_dim ** -0.5`` when None.
        state: of the model. Where it is not known yet, it is found when a batch is prepared for a model whose modules
            have the function as an attribute; until then it attends on one rank.

    Raises:
        ValueError: ``state`` is none.
    """
    if state is not None:
        instance(state, "state", MagiState)
        state.num_functions += 1
    return MagiAttnFunc(softmax_scale, state)


def _bind(model: Any, state: MagiState) -> None:
    """Gives the state to the attention functions of a model.

    Raises:
        ValueError: there are several ranks, and no function that would know.
    """
    modules = model.modules() if hasattr(model, "modules") else ()
    found = [f for module in modules for f in vars(module).values() if isinstance(f, MagiAttnFunc)]
    for function in found:
        function.state = state
    if state.cp_size > 1 and not found and not state.num_functions:
        raise ValueError("model: has no attention of make_magi_attn_func; give that the state, state=...")


def _documents(window: tuple[int, int] | None, **lengths: Any) -> AttnMask:
    if window is None:
        return builders.varlen(**lengths, causal=True)
    return builders.sliding_window(**lengths, left=window[0], right=window[1])


def _spec_mask(spec: AttnMaskSpec, window: tuple[int, int] | None) -> AttnMask:
    if window is not None:
        raise ValueError("window_size: not together with a mask of its own; put the window into the mask")
    return spec.mask


def _window(window_size: Any) -> tuple[int, int] | None:
    """``(left, right)``; None where causal attention sees all."""
    if window_size is None:
        return None
    sides = window_size if isinstance(window_size, tuple | list) else (window_size, 0)
    if len(sides) != 2:
        raise ValueError(f"window_size: expected an integer or a pair (left, right), got {window_size!r}")
    left, right = (-1 if side is None else int_at_least(side, "window_size", -1) for side in sides)
    if right > 0:
        raise ValueError(f"window_size: attention is causal, so nothing is seen to the right, got {window_size!r}")
    return None if left < 0 and right <= 0 else (left, max(right, 0))


def _window_key(key: DistAttnRuntimeKey, window: tuple[int, int] | None) -> DistAttnRuntimeKey:
    """The key of the window inside the documents of a key's mask."""
    if window is None:
        return key
    table, total = key.mask.table, key.mask.total_seqlen_q
    bounds = [0, *table[:, 1].tolist()]
    if key.mask != builders.varlen(bounds, causal=True) or bounds[-1] != total:
        raise ValueError("window_size: the mask of the batch is not one of causal documents; put the window into it")
    return make_varlen_key_for_new_mask_after_dispatch(bounds, bounds, key, window_size=window)


def _flat(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its sequences one after another, and their bounds as ``cu_seqlens``."""
    flat = dict(batch)
    if flat.get("input_ids") is None:
        raise ValueError("input_ids: none were given")
    for name in ("input_ids", "labels", "position_ids"):
        if flat.get(name) is not None:
            check_tensor(name, flat[name])
            flat[name] = flat[name].reshape(-1)
            if len(flat[name]) != len(flat["input_ids"]):
                raise ValueError(f"{name}: expected {len(flat['input_ids'])}, one a token, got {len(flat[name])}")
    bounds = _bounds(flat, len(flat["input_ids"]))
    for name in ("seq_lens", "seq_lens_padded", "cu_seqlens_padded"):
        flat.pop(name, None)
    return {**flat, "cu_seqlens": bounds, "qkv_format": "thd"}


def _bounds(batch: dict[str, Any], total: int) -> Tensor:
    """Bounds of the documents with their padding, which sees nothing of others and is seen by none."""
    for name in ("cu_seqlens_padded", "cu_seqlens", "seq_lens_padded", "seq_lens"):
        if batch.get(name) is None:
            continue
        numbers = _numbers(batch[name], name)
        numbers = numbers[numbers >= 0]
        bounds = numbers if name.startswith("cu_") else np.cumsum([0, *numbers])
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total:
            raise ValueError(f"{name}: expected documents of {total} tokens together, got {bounds.tolist()[:20]}")
        like = batch[name] if name.startswith("cu_") and isinstance(batch[name], Tensor) else batch["input_ids"]
        return torch.as_tensor(bounds, dtype=like.dtype, device=like.device)
    raise ValueError("cu_seqlens: a packed batch needs the bounds or the lengths of its documents")


def _numbers(values: Any, name: str) -> np.ndarray:
    """Integers of any shape, one after another."""
    return int_array(values.reshape(-1) if hasattr(values, "reshape") else values, name)


def _config_of(model: Any) -> Any:
    return getattr(model, "module", model).config


def _setting(cfg: Any, name: str) -> Any:
    """A setting by its dotted name; None where it is not there."""
    found = cfg.get(name) if hasattr(cfg, "get") else None
    for part in name.split(".") if found is None else ():
        cfg = cfg.get(part) if hasattr(cfg, "get") else getattr(cfg, part, None)
        found = cfg
    return found
