"""GPT models whose attention executes plans, and the builder that Megatron's trainer asks for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import megatron.training.models.gpt as stock
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megatron_magi.mcore.carrier import carrier_of
from megatron_magi.mcore.layer_spec import check_attention, replace_core_attention
from megatron_magi.mcore.rotary import LatentRotary, select_positions, unslice

# Where these are in what GPTModel._preprocess returns.
_ROTARY, _PADDING_MASK = 1, 5


class MagiModelMixin:
    """Makes a Megatron model attend by plan. To be put before the model's class.

    The model's ``forward`` must be given the `MagiSeqParams` of the microbatch as
    ``packed_seq_params``, on every pipeline stage. Parameters and checkpoint keys are those of
    the model without the mixin.
    """

    def __init__(
        self, config: Any, transformer_layer_spec: Any, *args: Any, mtp_block_spec: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(
            config,
            replace_core_attention(transformer_layer_spec),
            *args,
            mtp_block_spec=replace_core_attention(mtp_block_spec),
            **kwargs,
        )
        check_attention(self, self.pg_collection.cp.size())
        rotary = getattr(self, "rotary_pos_emb", None)
        if rotary is not None:
            unslice(rotary)
        for module in self.modules():
            if isinstance(module, MultiLatentAttention):
                LatentRotary(module)

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
            padding_mask = _split_sequence(padding_mask, self.pg_collection.tp)
        out[_PADDING_MASK] = padding_mask
        return tuple(out)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """As in Megatron, which takes gathered logits for a part of the vocabulary and returns a wrong loss.

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


def _split_sequence(mask: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """This tensor-parallel rank's part of ``[batch_size, seqlen]``."""
    return mask.chunk(tp_group.size(), dim=1)[tp_group.rank()].contiguous()


class MagiGPTModel(MagiModelMixin, GPTModel):
    """Megatron's GPT with plan-driven attention."""


class MagiGPTModelBuilder(stock.GPTModelBuilder):
    """Builds what Megatron's builder builds, as `MagiGPTModel`."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> MagiGPTModel:
        """One pipeline stage; arguments as in Megatron's builder."""
        # The stock builder names its model class as a global of its module, and no argument says it.
        with mock.patch.object(stock, "GPTModel", MagiGPTModel):
            return super().build_model(pg_collection, pre_process, post_process, vp_stage)


@dataclass(kw_only=True)
class MagiGPTModelConfig(stock.GPTModelConfig):
    """Megatron's GPT configuration with another builder; no fields of its own."""

    builder: ClassVar[str] = f"{__name__}.MagiGPTModelBuilder"
