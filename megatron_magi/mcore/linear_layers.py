"""Megatron's linear layers over dispatched tokens: in the order of the sequence, with a new state for each document."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor, nn

from megatron_magi.mcore import seams
from megatron_magi.mcore.carrier import carrier_of
from megatron_magi.mcore.hybrid_pattern import check_delta_rule, check_mamba_path, check_shared_norm
from megatron_magi.mcore.token_order import TokenOrder

_UNDO = "core.ssm.mamba_context_parallel:_undo_attention_load_balancing"
_REDO = "core.ssm.mamba_context_parallel:_redo_attention_load_balancing"
_PERMUTE = [f"core.ssm.gated_delta_net.{module}:_build_thd_cp_a2a_perm" for module in ("gdn", "common")]
"""Where it is, by release."""
_ORDER = "magi_order"


class LinearLayerMixin:
    """Makes a linear layer of Megatron's run through dispatched tokens. To be put before the layer's class.

    ``forward`` takes the `MagiSeqParams` of the microbatch as ``packed_seq_params``. Parameters and checkpoint keys are
    those of the layer without the mixin.
    """

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and bias.

        Args:
            hidden_states: ``[seqlen, batch_size, hidden_size]``, this rank's; with sequence parallelism a part of it.
            *args: of the layer.
            packed_seq_params: the carrier.
            **kwargs: of the layer.

        Raises:
            ValueError: there is no carrier, or an option of the layer knows no documents.
        """
        params = carrier_of(packed_seq_params, type(self).__name__)
        order = params.plans.order(hidden_states.device)
        if order is None:  # each sequence is a document, by itself on this rank
            return super().forward(hidden_states, *args, packed_seq_params=None, **kwargs)
        self._check_order()
        seqlen, batch_size, _ = hidden_states.shape
        rows = hidden_states.reshape(seqlen * batch_size, 1, -1)
        self._prepare(order)
        with self._sorted(order):
            out, bias = super().forward(rows, *args, packed_seq_params=order, **kwargs)
        return out.reshape(seqlen, batch_size, -1), bias

    def _check_order(self) -> None:
        """Raises ValueError for options with which the layer cannot take a `TokenOrder`."""

    def _prepare(self, order: TokenOrder) -> None:
        """Adds to the order what the layer reads of it."""

    @contextmanager
    def _sorted(self, order: TokenOrder) -> Iterator[None]:
        """On one context-parallel rank the layer has no exchange that sorts rows, so its two products do."""
        if self.pg_collection.cp.size() > 1 or order.positions is None:
            yield
            return
        hooks = (
            self.in_proj.register_forward_hook(lambda module, args, out: (order.sort(out[0]), *out[1:])),
            self.out_proj.register_forward_pre_hook(lambda module, args: (order.unsort(args[0]), *args[1:])),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class MagiMambaMixer(LinearLayerMixin, MambaMixer):
    """Mamba over dispatched tokens."""

    def _check_order(self) -> None:
        check_mamba_path(is_efficient=self.use_mem_eff_path)

    def _prepare(self, order: TokenOrder) -> None:
        order.number_documents()


class MagiGatedDeltaNet(LinearLayerMixin, GatedDeltaNet):
    """A gated delta net over dispatched tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_shared_norm(self.tp_size, is_split=self.config.sequence_parallel)
        for name in ("num_key_heads", "num_value_heads"):
            parts = self.tp_size * self.cp_size
            if getattr(self, name) % parts:
                raise ValueError(
                    f"linear_{name}: {getattr(self, name)} heads cannot be split over {self.tp_size} tensor- times "
                    f"{self.cp_size} context-parallel ranks"
                )

    def _check_order(self) -> None:
        check_delta_rule(is_deterministic=self.config.deterministic_mode)

    def _resolve_cu_seqlens(self, padded: Tensor | None, actual: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Made for all tokens. Megatron wants lengths that its zigzag in each document divides, and waits for the GPU.
        return actual

    def _prepare(self, order: TokenOrder) -> None:
        # All that reaches the function that makes Megatron's permutation are the bounds.
        if self.cp_size > 1:
            same = order.positions is None
            rows = torch.arange(order.num_tokens, device=order.cu_seqlens_q.device) if same else None
            setattr(order.cu_seqlens_q, _ORDER, (rows, rows) if same else (order.places, order.positions))


REPLACEMENTS: dict[type, type[nn.Module]] = {MambaMixer: MagiMambaMixer, GatedDeltaNet: MagiGatedDeltaNet}
"""Megatron's linear layers: what takes their place in layer specs."""


FAMILIES = tuple(
    [base for base in layer.__mro__ if base.__module__.startswith("megatron.core.ssm")][-1] for layer in REPLACEMENTS
)
"""What Megatron's linear layers derive from, those of `REPLACEMENTS` and others."""


def install() -> None:
    """Lets linear layers of Megatron's sort the rows of a `TokenOrder`. Idempotent; all else is as it was."""
    seams.put(_UNDO, _undo)
    seams.put(_REDO, _redo)
    for target in filter(seams.needed, _PERMUTE):
        seams.put(target, functools.partial(_permutations, target))


def _undo(input_: Tensor, cp_size: int, packed_seq_params: Any = None) -> Tensor:
    if isinstance(packed_seq_params, TokenOrder):
        return packed_seq_params.sort(input_)
    return seams.original(_UNDO)(input_, cp_size, packed_seq_params)


def _redo(input_: Tensor, cp_size: int, packed_seq_params: Any = None) -> Tensor:
    if isinstance(packed_seq_params, TokenOrder):
        return packed_seq_params.unsort(input_)
    return seams.original(_REDO)(input_, cp_size, packed_seq_params)


def _permutations(target: str, cu_seqlens: Tensor, cp_size: int, t_global: int) -> tuple[Tensor, Tensor]:
    given = getattr(cu_seqlens, _ORDER, None)
    return seams.original(target)(cu_seqlens, cp_size, t_global) if given is None else given
