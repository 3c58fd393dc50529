"""GPT models whose attention executes plans."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megatron_magi.mcore import seams
from megatron_magi.mcore.batch import LocalBatch
from megatron_magi.mcore.carrier import carrier_of, find_carrier
from megatron_magi.mcore.layer_spec import check_attention, replace_core_attention
from megatron_magi.mcore.rotary import LatentRotary, select_positions, unslice
from megatron_magi.mcore.settings import is_magi
from megatron_magi.mcore.validate import check_dispatched_experts

_BUILT = ("training.models.gpt:GPTModel", "core.models.gpt:GPTModel")
# Where these are in what GPTModel._preprocess returns.
_ROTARY, _PADDING_MASK = 1, 5
# Where it is among the arguments of a model's forward.
_ATTENTION_MASK = 2


class MagiModelMixin:
    """Makes a Megatron model attend by plan. To be put before the model's class.

    The model's ``forward`` must be given the `MagiSeqParams` of the microbatch as
    ``packed_seq_params``, on every pipeline stage, or be called inside `given`. Parameters and checkpoint
    keys are those of the model without the mixin.
    """

    _given: LocalBatch | None = None

    def __init__(self, config: Any, spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, replace_core_attention(spec), *args, **kwargs)
        self._take_positions()

    def _take_positions(self) -> None:
        """Angles are asked for all positions; of these a shard's are selected.

        Raises:
            ValueError: a layer has attention of another class, or multi-latent attention with fused RoPE.
        """
        check_attention(self)
        rotary = getattr(self, "rotary_pos_emb", None)
        if rotary is not None:
            unslice(rotary)
        for module in self.modules():
            if isinstance(module, (MultiLatentAttention, AbsorbedMLASelfAttention)):
                if module.config.apply_rope_fusion:
                    raise ValueError(
                        "apply_rope_fusion: with multi-latent attention the fused kernel rotates rows by their places, "
                        "which are not positions where tokens are dispatched; leave it off"
                    )
                LatentRotary(module)

    @contextmanager
    def given(self, batch: LocalBatch) -> Iterator[None]:
        """A context in which the model runs on ``batch``, whatever calls it."""
        self._given = batch
        try:
            yield
        finally:
            self._given = None

    def _completed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, with what `given` adds to a caller's who knows nothing of plans.

        Raises:
            ValueError: layers of experts cannot take the microbatch, or the caller says what `given` would replace.
        """
        packed = arguments.get("packed_seq_params")
        params = find_carrier(packed)
        has_experts = bool(self.config.num_moe_experts)
        if self._given is not None and params is None:
            _check_replaced(packed, arguments.get("padding_mask"), self._given)
            params = self._given.params
            # Only the router of experts reads the mask of padding.
            padding = self._given.padding_mask if has_experts else None
            arguments = {**arguments, "packed_seq_params": params, "padding_mask": padding}
        if has_experts and params is not None:
            dispatch, is_masked = params.plans.dispatch, arguments.get("padding_mask") is not None
            sizes = (params.layout.batch_size, dispatch.total_seqlen, dispatch.padded_seqlen)
            check_dispatched_experts(self.config, *sizes, is_masked=is_masked, is_training=self.training)
        return arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls Megatron's with the carrier as ``packed_seq_params``; raises ValueError for masks of attention."""
        check_no_mask(args, kwargs)
        return super().forward(*args, **self._completed(kwargs))

    def build_schedule_plan(self, *args: Any, **kwargs: Any) -> Any:
        """Calls Megatron's with the carrier as ``packed_seq_params``; raises ValueError for masks of attention."""
        check_no_mask(args, kwargs)
        return super().build_schedule_plan(*args, **self._completed(kwargs))

    def _preprocess(
        self,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple:
        params = carrier_of(packed_seq_params, type(self).__name__)
        out = list(super()._preprocess(*args, packed_seq_params=params, **kwargs))
        if out[_ROTARY] is not None and self.position_embedding_type != "mrope":
            out[_ROTARY] = select_positions(out[_ROTARY], params.layout)
        if padding_mask is not None and self.config.sequence_parallel:
            # Megatron's first stage splits it over the global tensor-parallel group, the others forget to.
            padding_mask = split_sequence(padding_mask, self.pg_collection.tp)
        out[_PADDING_MASK] = padding_mask
        return tuple(out)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Calls Megatron's after a check: it would take gathered logits for a part of the vocabulary and return a wrong
        loss.

        Raises:
            ValueError: the logits are those of the whole vocabulary, the loss needs this rank's part.
        """
        part = self.vocab_size // self.pg_collection.tp.size()
        if logits.shape[-1] != part:
            raise ValueError(
                f"parallel_output, runtime_gather_output: the loss needs the {part} logits of a tensor-parallel rank, "
                f"got {logits.shape[-1]}; leave logits sharded where there are labels"
            )
        return super().compute_language_model_loss(labels, logits)


def check_no_mask(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses a mask of attention among the arguments of a model's forward, as no layer would read it.

    Raises:
        ValueError: there is one.
    """
    mask = args[_ATTENTION_MASK] if len(args) > _ATTENTION_MASK else kwargs.get("attention_mask")
    if mask is not None:
        raise ValueError(
            "attention_mask: plans say which token sees which, and none is made of this mask; give None, and say it by "
            "--magi-mask or by bounds of documents"
        )


def _check_replaced(packed_seq_params: Any, padding_mask: Any, batch: LocalBatch) -> None:
    """Raises ValueError for what a caller says of documents and padding, in whose place that of ``batch`` comes."""
    if getattr(packed_seq_params, "cu_seqlens_q", None) is not None:
        raise ValueError(
            "packed_seq_params: its bounds of documents would have no effect, as plans are made before the model is "
            "called; the data set has to return them (cu_seqlens)"
        )
    if padding_mask is not None and padding_mask is not batch.padding_mask:
        raise ValueError("padding_mask: it would have no effect, as the microbatch has its own; leave it out")


def split_sequence(mask: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """This tensor-parallel rank's part of ``[batch_size, seqlen]``."""
    return mask.chunk(tp_group.size(), dim=1)[tp_group.rank()].contiguous()


class MagiGPTModel(MagiModelMixin, GPTModel):
    """Megatron's GPT with plan-driven attention."""

    def __init__(
        self, config: Any, transformer_layer_spec: Any, *args: Any, mtp_block_spec: Any = None, **kwargs: Any
    ) -> None:
        mtp_block_spec = replace_core_attention(mtp_block_spec)
        super().__init__(config, transformer_layer_spec, *args, mtp_block_spec=mtp_block_spec, **kwargs)


def install() -> None:
    """Megatron's builder builds `MagiGPTModel` where the command line asks for it. Idempotent."""
    for target in _BUILT:
        if seams.needed(target):
            _build_ours_at(target)


def _build_ours_at(target: str) -> None:
    stock = seams.original(target)

    # The builder names its model class as a global of its module, and no argument says it.
    @functools.wraps(stock, updated=())
    def build(*args: Any, **kwargs: Any) -> GPTModel:
        return (MagiGPTModel if is_magi() else stock)(*args, **kwargs)

    seams.put(target, build)
