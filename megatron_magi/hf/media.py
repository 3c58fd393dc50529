"""Images, videos and audio in a batch: the model embeds them on every rank, then the embeddings are sharded.

What a model computes before its language model is computed by its own forward, from the whole batch, up to the call
of the language model. Its arguments are then sharded, and the forward runs again with embeddings in place of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from megatron_magi.hf.shard import is_media

if TYPE_CHECKING:
    from megatron_magi.hf.shard import Shard

_OF_TEXT = ("inputs_embeds", "position_ids", "attention_mask")
_OF_LAYERS = ("visual_pos_masks", "deepstack_visual_embeds")
"""Arguments of a language model that its first layers add to the rows of images (Qwen3-VL)."""
_NOT_BEFORE = {"labels", "shift_labels", "num_items_in_batch", "magi_mask", "cu_seq_lens_q", "cu_seq_lens_k"}
_NOT_BEFORE |= {"max_length_q", "max_length_k"}
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Kinds of tokens, which processors also make where there is text alone."""


@dataclass
class Embedded:
    """A batch of text and embeddings.

    Attributes:
        batch: as `shard_batch` takes it.
        compared: what it was made from, by name.
        of_layers: further arguments of the language model, of the whole batch.
    """

    batch: Mapping[str, Any]
    compared: dict[str, Tensor] = field(default_factory=dict)
    of_layers: dict[str, Any] = field(default_factory=dict)

    def attach(self, shard: Shard, local: Mapping[str, Any]) -> None:
        """Keeps for the language model what it is to be given in addition to ``local``, this rank's rows."""
        if not self.compared:
            return
        shard.of_decoder = {name: local[name] for name in ("inputs_embeds", "position_ids")}, {}
        seen = self.of_layers.get("visual_pos_masks")
        if seen is None:
            return
        # Rows of images are in another order on a rank, so they find their places as rows of the whole batch.
        own = shard.dispatch(seen)
        features = []
        for x in self.of_layers["deepstack_visual_embeds"]:
            rows = x.new_zeros((*seen.shape, x.shape[-1])).masked_scatter(seen[..., None].to(x.device), x)
            features.append(shard.dispatch(rows, is_partial_grad=True)[own.to(x.device)])
        shard.of_decoder[1].update(visual_pos_masks=own, deepstack_visual_embeds=features)


class _Reached(Exception):
    """Ends a forward where it calls the language model."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.num_args, self.kwargs = len(args), kwargs


def embedded(model: PreTrainedModel, batch: Mapping[str, Any]) -> Embedded:
    """The batch with images, videos and audio embedded, if there are any and the model has a language model inside.

    Raises:
        ValueError: named is the first of their arguments: the model gives its language model more than embeddings and
            positions, such as masks of its own or states to attend to; or a unit of FSDP is around both.
    """
    given = {name: value for name, value in batch.items() if value is not None}
    media = [name for name in given if is_media(name) or name in _TYPES]
    # First what it is about, then its kinds and sizes.
    media.sort(key=lambda name: (name in _TYPES, not name.startswith(("pixel_values", "input_"))))
    if not media or decoder_of(model) is None:
        return Embedded(batch)
    _check_units(model, media[0])
    reached = _arguments_of_decoder(model, {n: x for n, x in given.items() if n not in _NOT_BEFORE}, media[0])
    own = {name: value for name, value in given.items() if name not in (*media, "input_ids", *_OF_TEXT)}
    own["attention_mask"] = batch.get("attention_mask")
    own |= {name: reached.get(name) for name in ("inputs_embeds", "position_ids")}
    compared = {name: given[name] for name in ("input_ids", *media) if isinstance(given.get(name), Tensor)}
    return Embedded(own, compared, {name: reached[name] for name in _OF_LAYERS if reached.get(name) is not None})


def _check_units(model: PreTrainedModel, name: str) -> None:
    """Refuses a unit of FSDP around the language model and what embeds, which is not the whole model.

    It would add up its gradients when the language model's backward is done, before those of what embeds are there.
    """
    decoder = decoder_of(model)
    path = next(path for path, module in model.named_modules() if module is decoder).split(".")
    for end in range(1, len(path)):
        around = ".".join(path[:end])
        if isinstance(model.get_submodule(around), FSDPModule):
            raise ValueError(
                f"{name}: {around} is a unit of FSDP around the language model and what embeds for it; make each of "
                "them a unit, or none, besides the whole model; batches of text alone can be sharded, without it"
            )


def _arguments_of_decoder(model: PreTrainedModel, batch: dict[str, Any], name: str) -> dict[str, Any]:
    decoder, mask = decoder_of(model), batch.get("attention_mask")
    assert decoder is not None

    def stop(_module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    handle = decoder.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        model.forward(**batch)
    except _Reached as reached:
        num_args, found = reached.num_args, reached.kwargs
    else:
        raise ValueError(f"{name}: {type(model).__name__} does not call its language model by get_decoder()")
    finally:
        handle.remove()
    if found.get("attention_mask") is not mask:
        raise ValueError(
            f"{name}: {type(model).__name__} makes attention masks for it, which need the whole sequence, and no rank "
            "has it under context parallelism; batches of text alone can be sharded, without it"
        )
    others = {n for n, x in found.items() if any(isinstance(y, Tensor) for y in tree_leaves(x))}
    others -= {*_OF_TEXT, *_OF_LAYERS}
    if num_args or others or not isinstance(found.get("inputs_embeds"), Tensor):
        what = ", ".join(sorted(others)) or "no embeddings alone"
        raise ValueError(
            f"{name}: {type(model).__name__} gives its language model {what}, which cannot be sharded; batches of text "
            "alone can, without it"
        )
    return found


def decoder_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The language model inside a model that takes more than text; None in one for text."""
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) and decoder is not model.base_model else None


def give_to_decoder(model: PreTrainedModel) -> None:
    """Hooks the language model, so that it is given what `Embedded.attach` kept, and nothing else than that."""
    decoder = decoder_of(model)
    if decoder is None:
        return

    def give(_module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        shard = getattr(kwargs.get("attention_mask"), "magi_shard", None)
        if shard is None or shard.of_decoder is None:
            return None
        expected, more = shard.of_decoder
        for name, x in expected.items():
            if not _is_given_on(x, kwargs.get(name)):
                raise ValueError(
                    f"{name}: {type(model).__name__} changes it before its language model, so images, videos and audio "
                    "cannot be sharded; batches of text alone can"
                )
        return args, {**kwargs, **more}

    decoder.register_forward_pre_hook(give, with_kwargs=True)


def _is_given_on(x: Tensor, got: Any) -> bool:
    """Whether ``got`` is ``x``, or what FSDP makes of it: a view, for a hook in the backward, or another dtype."""
    if got is x:
        return True
    is_alike = isinstance(got, Tensor) and got.shape == x.shape
    return is_alike and (got.dtype != x.dtype or (got.data_ptr() == x.data_ptr() and got.stride() == x.stride()))
