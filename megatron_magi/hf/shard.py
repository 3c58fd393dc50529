"""A batch over the ranks of a context-parallel group, as models of transformers take it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import masking_utils

from megatron_magi.api import (
    dispatch,
    magi_attn_flex_key,
    make_flex_key_for_new_mask_after_dispatch,
    undispatch,
)
from megatron_magi.api.functions import plans_at_hand
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.make_key import made_on_all_ranks
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.config import MagiConfig
from megatron_magi.hf.batch_positions import check_positions, document_positions, num_axes_of, read
from megatron_magi.hf.intervals import Intervals
from megatron_magi.hf.layer_kinds import check_kinds
from megatron_magi.hf.layer_masks import (
    WINDOWS,
    LayerMask,
    NoTensor,
    check_mask,
    check_no_window,
    document_bounds_of,
    is_of_one_head,
    rows_from,
)
from megatron_magi.hf.mask_functions import (
    Rows,
    Unknown,
    at_positions,
    padding_before,
    parts_of,
    places_of,
    to_numpy,
)
from megatron_magi.hf.numbering import check_ropes
from megatron_magi.mask import AttnMask
from megatron_magi.operands.options import check_tensor
from megatron_magi.plan import Plan
from megatron_magi.runtime.no_compile import outside_graphs

IGNORED = -100
"""The label that has no loss."""

PLANS = "magi_plans"
"""The name of what a batch was planned to in a data loader's worker (`hf.planning_collator`)."""

COMPARED = ("input_ids", "labels", "shift_labels", "position_ids")
"""What is compared over the ranks. ``inputs_embeds`` are not: ranks compute them, each with its own rounding."""


@dataclass(eq=False)
class ShardMask(NoTensor):
    """The mask argument of layers, for a sharded batch."""

    shard: Shard
    key: DistAttnRuntimeKey

    def __getitem__(self, index: Any) -> ShardMask:
        """All rows; see `LayerMask`, which has the last ones too."""
        if not is_of_one_head(index) and rows_from(index):
            raise ValueError("logits_to_keep: tokens are not in order under context parallelism; keep all logits")
        return self


class Shard:
    """The distribution of a batch over the ranks. Made by `shard_batch`.

    Attributes:
        group: the ranks.
        batch_size, seqlen: of the batch before it was dispatched.
        num_predictions: of a sequence; one less than its tokens, unless labels were given shifted.
        is_of_model: a context-parallel model made it from a whole batch; else who calls the model did.
        key: of the dispatch; for functions of `megatron_magi.api`.
        num_calls: of attention so far.
        is_summed: losses of ranks are added up, as ``num_items_in_batch`` was given; else averaged.
        router_loss: of the batch, once the model has computed it; see `hf.router_losses`.
        of_decoder: what a language model inside a model gets, and what it gets in addition; see `hf.media`.
    """

    def __init__(
        self, model_config: Any, batch: Mapping[str, Any], group: dist.ProcessGroup | None, compared: list[str]
    ) -> None:
        tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch["inputs_embeds"]
        self.group, self.num_calls = group, 0
        self.is_summed, self.router_loss = "num_items_in_batch" in batch, None
        self._asks_routers, self._weights = asks_routers(model_config, batch), None
        self._plans: Mapping[Hashable, Plan] = {}
        self.batch_size, self.seqlen = int(tokens.shape[0]), int(tokens.shape[1])
        self.num_predictions, self.is_of_model = self.seqlen, False
        self._model_config = model_config
        self.of_decoder: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._positions: Tensor | None = None
        self._magi_mask: AttnMask | None = batch.get("magi_mask")
        self._padding = _padding(batch.get("attention_mask"), self.batch_size, self.seqlen)
        positions = document_positions(batch["position_ids"], num_axes_of(model_config))
        if positions is None:
            positions = torch.arange(self.seqlen, device=tokens.device)[None]
        on_cpu, self._checksums = read(positions, {name: batch[name] for name in compared})
        # Documents by positions, which padding hides from transformers, and those that are given in addition.
        shape, said = (self.batch_size, self.seqlen), None
        own = np.broadcast_to(on_cpu, shape) if self._padding is None else None
        if batch.get("cu_seq_lens_q") is not None:
            said = document_bounds_of(None, batch["cu_seq_lens_q"], *shape)
        self._places = places_of(own, said, shape)
        if group is not None and group.size() > 1:
            check_kinds(model_config)
            check_ropes(model_config)
        self._first_mask = self._mask(_widest(model_config.get_text_config()))

    def plan(self, config: MagiConfig | None, names: Iterable[str], plans: Mapping[Hashable, Plan]) -> None:
        """Makes the key; collective. Compares over the ranks what was read under ``names``; 0 where none was given.

        ``plans``: those that a worker has made.
        """
        self._plans = plans
        with plans_at_hand(plans):
            self.key = magi_attn_flex_key(
                *self._first_mask.to_ranges(),
                *heads_of(self._model_config),
                cp_group_or_mesh=self.group,
                dist_attn_config=config,
                compare={
                    **{name: self._checksums.get(name, 0) for name in names},
                    "output_router_logits": int(self._asks_routers),
                },
            )

    def masks(self) -> list[AttnMask]:
        """The masks of the kinds of layers that the model's configuration names, that of the key first."""
        found = {self._first_mask: None}
        if self._magi_mask is None:
            for mask_function in _of_kinds(self._model_config.get_text_config()):
                found[self._mask(mask_function)] = None
        return list(found)

    def positions(self, device: torch.device) -> Tensor:
        """The places of this rank's rows in their documents, ``[1, num_rows]``."""
        if self._positions is None:
            whole = torch.from_numpy(np.stack([place.positions for place in self._places]))
            self._positions = self.dispatch(whole.to(device))
        return self._positions

    def weights(self, device: torch.device) -> Tensor:
        """1 for this rank's rows of tokens, 0 for padding, fp32 ``[num_rows]``."""
        if self._weights is None:
            seen = np.ones((self.batch_size, self.seqlen)) if self._padding is None else self._padding
            self._weights = self.dispatch(torch.from_numpy(seen).to(device, torch.float32))[0]
        return self._weights

    def layer_mask(self, mask_function: Callable) -> ShardMask:
        """The mask of a kind of layer, which is asked for with the shard's own lengths. Collective.

        Raises:
            ValueError: the function is none that transformers composes of the model's configuration alone.
        """
        mask = self._mask(mask_function)
        if mask == self.key.mask:
            return ShardMask(self, self.key)
        with plans_at_hand(self._plans):
            key = make_flex_key_for_new_mask_after_dispatch(*mask.to_ranges()[:3], self.key)
        return ShardMask(self, key)

    def dispatch(self, x: Tensor, pad_value: float = 0, is_partial_grad: bool = False) -> Tensor:
        """Returns this rank's rows ``[1, num_rows, ...]`` of ``[batch_size, seqlen, ...]``, the same on all ranks.

        See `megatron_magi.api.dispatch` for the gradient of ``x``.
        """
        rows = x.reshape(-1, *x.shape[2:])
        return dispatch(rows, self.key, pad_value=pad_value, is_partial_grad=is_partial_grad)[None]

    def undispatch(self, x: Tensor, is_partial_grad: bool = False) -> Tensor:
        """The inverse of `dispatch`; collective. See `megatron_magi.api.undispatch`."""
        whole = undispatch(x[0], self.key, is_partial_grad=is_partial_grad)
        return whole.view(self.batch_size, self.seqlen, *x.shape[2:])

    def _mask(self, mask_function: Callable) -> AttnMask:
        if self._magi_mask is not None:
            check_no_window(not WINDOWS.isdisjoint(parts_of(mask_function)))
            return self._magi_mask
        try:
            parts = [self._intervals(mask_function, i) for i in range(self.batch_size)]
        except Unknown as unknown:
            raise ValueError(
                f"attention_mask: {unknown} needs the whole sequence, which no rank has under context parallelism; "
                "give the mask as slices, magi_mask=AttnMask(...)"
            ) from None
        return LayerMask(parts, self.seqlen).mask

    def _intervals(self, mask_function: Callable, sequence: int) -> Intervals:
        index = np.arange(self.seqlen)
        # Windows and chunks count a document's own tokens.
        place, seen = self._places[sequence], None if self._padding is None else self._padding[sequence]
        left = 0 if seen is None else padding_before(seen, place.bounds)
        out = at_positions(mask_function, Rows(sequence, index, left_padding=left, is_shard=True), *place)
        return out if seen is None else out & Intervals.of_runs(seen, self.seqlen)


class ShardOnes(Tensor):
    """A mask of ones with its `Shard` as ``magi_shard``, which views that a model makes of it have too (GPT-2 does).

    Results of operations with other tensors are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **kwargs)
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            is_new = function not in torch.overrides.get_default_nowrap_functions()  # else an attribute, such as _base
            if type(out) is Tensor and is_new and len(tensors) == 1 and hasattr(tensors[0], "magi_shard"):
                out = out.as_subclass(cls)
                out.magi_shard = tensors[0].magi_shard
        return out


@outside_graphs
def shard_batch(
    batch: Mapping[str, Any],
    cp_group_or_mesh: Group,
    model_config: Any,
    config: MagiConfig | None = None,
) -> tuple[dict[str, Any], Shard]:
    """Returns the model's arguments for this rank's part of a batch. Collective.

    Args:
        batch: arguments of the model's forward, the same on all ranks: ``input_ids`` int ``[batch_size, seqlen]`` or
            ``inputs_embeds``, and where they are given ``labels``, ``shift_labels``, ``position_ids`` (else from 0 in
            each row; of several axes where the model has them), ``attention_mask`` (of padding, ``[batch_size,
            seqlen]``), the flattening collator's
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, and ``magi_mask``, an `AttnMask` over all tokens in place of the
            model's own masks.
        cp_group_or_mesh: the ranks.
        model_config: the model's configuration.
        config: how masks are planned and attention runs; None for the defaults.

    Returns:
        ``(arguments, shard)``. The arguments are those of one sequence, this rank's rows. Where labels are given,
        ``shift_labels`` is the next token's label, and ``num_items_in_batch``, unless it is given, the number of these
        labels in the batch divided by the number of ranks: the mean over ranks of a causal language model's losses is
        then the loss of the batch. What is not known here, such as options, is passed on. The gradient of
        ``inputs_embeds`` is this rank's part, as those of the model's parameters are.

    Raises:
        ValueError: an argument, named in the message, is wrong or cannot be sharded.
        RuntimeError: when the ranks attend for the first time: their tokens, labels or positions differ.
    """
    return sharded(batch, cp_group_or_mesh, model_config, config)


def sharded(
    batch: Mapping[str, Any],
    cp_group_or_mesh: Group,
    model_config: Any,
    config: MagiConfig | None,
    others: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Any], Shard]:
    """`shard_batch`, which also compares ``others``, tensors by name, over the ranks."""
    group = group_of(cp_group_or_mesh, "cp_group_or_mesh")
    others = others or {}
    with made_on_all_ranks(group, config):
        given = {name: value for name, value in batch.items() if value is not None}
        planned = given.pop(PLANS, None)
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if tokens is None:
            raise ValueError("input_ids: none were given, and no inputs_embeds")
        _check(given, num_axes_of(model_config))
        is_compared = group is not None and group.size() > 1 and (config is None or config.comm.verify)
        compared = [name for name in (*COMPARED, *others) if is_compared and name in {**given, **others}]
        if "position_ids" not in given:
            given["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        is_shifted_here = "labels" in given and "shift_labels" not in given
        if is_shifted_here:
            given["shift_labels"] = torch.nn.functional.pad(given["labels"][:, 1:], (0, 1), value=IGNORED)
        shard = Shard(model_config, {**others, **given}, group, compared)
        plans = {} if planned is None else planned.at_hand(tokens.device)
    shard.plan(config, (*COMPARED, *others), plans)
    shard.num_predictions -= is_shifted_here
    return _rows_of(given, shard), shard


def masks_of(model_config: Any, batch: Mapping[str, Any]) -> list[AttnMask]:
    """The masks of a batch for `shard_batch`, that of the key first; without a group.

    Raises:
        ValueError: an argument, named in the message, is wrong or cannot be sharded.
    """
    given = {name: value for name, value in batch.items() if value is not None}
    _check(given, num_axes_of(model_config))
    if "position_ids" not in given:
        given["position_ids"] = torch.arange(given["input_ids"].shape[1], device="cpu")[None]
    return Shard(model_config, given, None, []).masks()


def _rows_of(given: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """The model's arguments for this rank's rows."""
    group, tokens = shard.group, given.get("input_ids", given.get("inputs_embeds"))
    out = {name: value for name, value in given.items() if name not in _CONSUMED}
    shape = (shard.batch_size, shard.seqlen)
    for name, pad_value in (("input_ids", 0), ("inputs_embeds", 0), ("labels", IGNORED), ("shift_labels", IGNORED)):
        if name in given:
            # What comes before the model has a rank's part of the gradient, as the model's parameters have.
            out[name] = shard.dispatch(given[name], pad_value, is_partial_grad=True)
    if "labels" in given and "num_items_in_batch" not in given:
        # So that the mean of ranks' losses is the mean over tokens.
        out["num_items_in_batch"] = (given["shift_labels"] != IGNORED).sum() / (1 if group is None else group.size())
    positions = given["position_ids"].expand(*given["position_ids"].shape[:-2], *shape)
    if positions.ndim == 3:  # of several axes
        out["position_ids"] = shard.dispatch(positions.permute(1, 2, 0)).permute(2, 0, 1)
    else:
        out["position_ids"] = shard.dispatch(positions)
    # Transformers hands it to the makers of masks, which find the shard on it.
    ones = torch.ones(out["position_ids"].shape[-2:], dtype=torch.bool, device=tokens.device)
    out["attention_mask"] = ones.as_subclass(ShardOnes)
    out["attention_mask"].magi_shard = shard
    return out


_MEDIA = (
    "pixel_",
    "image_",
    "video_",
    "audio_",
    "mm_",
    "input_features",
    "input_values",
    "feature_",
    "second_per_grid",
)
_CONSUMED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "magi_mask"}


def _check(given: Mapping[str, Any], num_axes: int) -> None:
    for name in ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "cu_seq_lens_q"):
        if name in given:
            check_tensor(name, given[name])
    name = "input_ids" if "input_ids" in given else "inputs_embeds"
    shape = list(given[name].shape[:2])
    if given[name].ndim != (2 if name == "input_ids" else 3):
        raise ValueError(f"{name}: expected [batch_size, seqlen], or embeddings of that, got {list(given[name].shape)}")
    for name in ("input_ids", "labels", "shift_labels"):
        if name in given and list(given[name].shape) != shape:
            raise ValueError(f"{name}: expected {shape}, got {list(given[name].shape)}")
    if "position_ids" in given:
        check_positions(given["position_ids"], shape, num_axes)
    if "attention_mask" in given and "magi_mask" in given:
        raise ValueError("attention_mask: give padding in magi_mask, not in addition to it")
    _check_order(given)
    total = shape[0] * shape[1]
    mask = given.get("magi_mask")
    if mask is not None:
        check_mask(mask, total)
    for name in given:
        if is_media(name) or name in ("token_type_ids", "cache_position"):
            more = "; images, videos and audio are embedded by context-parallel models that take them"
            raise ValueError(f"{name}: cannot be sharded; text alone can, without it{more * is_media(name)}")


def _check_order(given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that mean the last tokens, which a rank's last rows are not."""
    for name in ("cache", "past_key_values"):  # since transformers 5.24, and until then
        if name in given:
            raise ValueError(f"{name}: a cache cannot be sharded")
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ValueError("logits_to_keep: tokens are not in order in a shard; keep all logits")


def is_media(name: str) -> bool:
    """Whether an argument of this name has to do with images, videos or audio."""
    return name.startswith(_MEDIA)


def _padding(attention_mask: Any, batch_size: int, seqlen: int) -> np.ndarray | None:
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or list(attention_mask.shape) != [batch_size, seqlen]:
        what = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask: expected [{batch_size}, {seqlen}] under context parallelism, got {what}; other masks are "
            "given as slices, magi_mask=AttnMask(...)"
        )
    seen = attention_mask.cpu()
    if not ((seen == 0) | (seen == 1)).all():
        raise ValueError(
            f"attention_mask: expected 0 and 1, got numbers from {seen.min()} to {seen.max()}; documents are given by "
            "position_ids that restart at 0, without an attention_mask"
        )
    return to_numpy(seen.to(torch.bool))


def asks_routers(model_config: Any, batch: Mapping[str, Any]) -> bool:
    """Whether a model of this configuration returns router logits for a batch of arguments, and adds their loss."""
    asked = batch.get("output_router_logits")
    return bool(getattr(model_config.get_text_config(), "output_router_logits", False) if asked is None else asked)


def heads_of(model_config: Any) -> tuple[int, int, int]:
    """Query heads, key heads and head dimension of a model's attention, from its configuration."""
    text = _widest_layer(model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config)
    heads = int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, int(getattr(text, "num_key_value_heads", None) or heads), int(head_dim)


def _widest_layer(text_config: Any) -> Any:
    """The configuration of a full layer, if there are any, where layers have their own (Gemma 4)."""
    if not getattr(text_config, "is_heterogeneous", False):
        return text_config
    kinds = list(getattr(text_config, "layer_types", None) or ())
    return text_config.per_layer_config[kinds.index("full_attention") if "full_attention" in kinds else 0]


def _of_kinds(text_config: Any) -> list[Callable]:
    """The mask functions of kinds of layers that see less than others."""
    kinds = set(getattr(text_config, "layer_types", None) or ())
    window, chunk = getattr(text_config, "sliding_window", None), getattr(text_config, "attention_chunk_size", None)
    found: list[Callable] = []
    if window and "sliding_attention" in kinds:
        found.append(masking_utils.sliding_window_causal_mask_function(window))
    if chunk and "chunked_attention" in kinds:
        left = torch.zeros(1, dtype=torch.int64, device="cpu")
        found.append(masking_utils.chunked_causal_mask_function(chunk, left))
    return found


def _widest(text_config: Any) -> Callable:
    """The mask function for which tokens are balanced: that of full layers, if there are any."""
    text_config = _widest_layer(text_config)
    if not getattr(text_config, "is_causal", True):
        return masking_utils.bidirectional_mask_function
    window, chunk = getattr(text_config, "sliding_window", None), getattr(text_config, "attention_chunk_size", None)
    kinds = set(getattr(text_config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if "full_attention" not in kinds and chunk and "chunked_attention" in kinds:
        return masking_utils.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64, device="cpu"))
    if "full_attention" not in kinds and window:
        return masking_utils.sliding_window_causal_mask_function(window)
    return masking_utils.causal_mask_function
