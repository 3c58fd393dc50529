"""Hybrid models whose attention executes plans, over tokens that linear layers get in their order."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_magi.mcore import hybrid_pattern, mtp, seams
from megatron_magi.mcore.carrier import MagiSeqParams, carrier_of
from megatron_magi.mcore.hybrid_spec import local_stack_spec
from megatron_magi.mcore.model import MagiModelMixin, check_no_mask, split_sequence
from megatron_magi.mcore.rotary import select_positions
from megatron_magi.mcore.settings import is_magi

_BUILT = "training.models.hybrid:HybridModel"
_LOSS = "core.models.hybrid.hybrid_model:process_mtp_loss"
_NORM = "core.models.hybrid.hybrid_block:TENorm"


class MagiHybridModel(MagiModelMixin, HybridModel):
    """Megatron's hybrid model with plan-driven attention, of any layers that `hybrid_pattern.check` lets pass.

    Raises:
        ValueError: the pattern has other layers, or another core attention.
    """

    _params: MagiSeqParams | None = None
    _padding_mask: torch.Tensor | None = None

    def __init__(self, config: Any, hybrid_stack_spec: Any, *args: Any, **kwargs: Any) -> None:
        hybrid_pattern.check(kwargs.get("hybrid_layer_pattern"))
        super().__init__(config, hybrid_stack_spec, *args, **kwargs)
        rotary = getattr(self, "rotary_pos_emb", None)
        if rotary is not None:
            self._select_from(rotary)
        if self.mtp_process:
            self.mtp.register_forward_pre_hook(self._mask_padding, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls Megatron's with the carrier as ``packed_seq_params``; raises ValueError for masks of attention."""
        check_no_mask(args, kwargs)
        kwargs = self._completed(kwargs)
        padding_mask = kwargs.get("padding_mask")
        if padding_mask is not None and self.config.sequence_parallel:
            padding_mask = split_sequence(padding_mask, self.pg_collection.tp)
        self._params = carrier_of(kwargs.get("packed_seq_params"), type(self).__name__)
        self._padding_mask = padding_mask
        try:
            return HybridModel.forward(self, *args, **{**kwargs, "padding_mask": padding_mask})
        finally:
            self._params = self._padding_mask = None

    def _select_from(self, rotary: nn.Module) -> None:
        """Megatron asks for angles inside its ``forward``: they are those of the microbatch's positions."""
        whole = rotary.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._params is not None, "called outside of the model's forward"
            out = whole(*args, **kwargs)
            if isinstance(out, tuple):
                return select_positions(out[0], self._params.layout), *out[1:]
            return select_positions(out, self._params.layout)

        rotary.forward = forward

    def _mask_padding(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # Megatron gives its decoder the mask of padding, but not multi-token prediction.
        return args, {**kwargs, "padding_mask": self._padding_mask}


def install() -> None:
    """Megatron's builder builds `MagiHybridModel` where the command line asks for it. Idempotent.

    Without Transformer Engine, of whose layers Megatron's own spec is made, hybrid models of any attention backend get
    Megatron's local layers and torch's last norm.
    """
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as of_te

    stock = seams.original(_BUILT)

    # The builder names its model class as a global of its module, and no argument says it.
    @functools.wraps(stock, updated=())
    def build(config: Any, hybrid_stack_spec: Any, *args: Any, **kwargs: Any) -> HybridModel:
        if not HAVE_TE and hybrid_stack_spec is of_te:
            hybrid_stack_spec = local_stack_spec(config)
        return (MagiHybridModel if is_magi() else stock)(config, hybrid_stack_spec, *args, **kwargs)

    seams.put(_BUILT, build)
    seams.put(_LOSS, mtp.process_mtp_loss)
    if not HAVE_TE:
        seams.put(_NORM, _torch_norm)


def _torch_norm(config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:
    """The last norm of a stack, which Megatron makes with Transformer Engine whatever the spec says."""
    return WrappedTorchNorm(config=config, hidden_size=hidden_size, eps=eps)
