"""What travels with a microbatch into every layer: its token distribution and its plans.

Megatron hands `packed_seq_params` to every layer, and recomputation and multi-token
prediction capture it, so a microbatch that is replayed or still in flight has its own plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_magi.comm.dispatch import RollArgs, make_roll_args
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask.builders import sliding_window, varlen
from megatron_magi.plan import Dispatch, Plan, PlanCache, RankPlan

Window = tuple[int, int] | None
"""Keys visible to the left and right of a query, or None for a layer without a window."""


def document_mask(cu_seqlens: np.ndarray, window: Window) -> AttnMask:
    """Causal attention inside each document, restricted to ``window``.

    Args:
        cu_seqlens: int64 ``[num_documents + 1]``, in the tokens of the whole microbatch.
        window: as Megatron's ``window_size``; -1 is unlimited.
    """
    if window is None:
        return varlen(cu_seqlens)
    left, right = window
    return sliding_window(left=left, right=right, cu_seqlens=cu_seqlens)


class PlanSet:
    """The plans of one microbatch: one for each window, all over one distribution of tokens.

    Args:
        cu_seqlens: int64 ``[num_documents + 1]``, document bounds in the microbatch's tokens.
        primary: the window of the layers for which the tokens are balanced.
        config: how to plan.
        cp_rank: this rank.
        cp_size: number of ranks.
        cache: where plans are kept.
    """

    def __init__(
        self, cu_seqlens: np.ndarray, primary: Window, config: MagiConfig, cp_rank: int, cp_size: int, cache: PlanCache
    ) -> None:
        self._cu_seqlens = cu_seqlens
        self._config = config
        self._cp_rank = cp_rank
        self._cache = cache
        self._primary = primary
        plan = cache.get(document_mask(cu_seqlens, primary), config, cp_size)
        self._plans: dict[Window, Plan] = {primary: plan}
        self._successors: RollArgs | None = None

    @property
    def config(self) -> MagiConfig:
        """How the plans were made and are executed."""
        return self._config

    @property
    def plan(self) -> Plan:
        """The plan that decided the distribution of tokens."""
        return self._plans[self._primary]

    @property
    def dispatch(self) -> Dispatch:
        """The distribution of tokens that all plans share."""
        return self.plan.dispatch

    def for_window(self, window: Window) -> RankPlan:
        """This rank's plan for layers with ``window``; made on first use."""
        if window not in self._plans:
            mask = document_mask(self._cu_seqlens, window)
            self._plans[window] = self._cache.get(mask, self._config, self.dispatch.cp_size, self.dispatch)
        return self._plans[window].for_rank(self._cp_rank)

    def successors(self, device: torch.device) -> RollArgs:
        """How each row gets the content of the next token's row; made on first use."""
        if self._successors is None:
            arrays = make_roll_args(self.dispatch.global_indices(), -1, self.dispatch.total_seqlen, self._cp_rank)
            self._successors = RollArgs.build(arrays, device)
        return self._successors


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """How the rows of a rank's shard lie in Megatron's tensors.

    The ``batch_size`` sequences of a microbatch are dispatched as one packed sequence: the rank
    holds ``num_rows`` of its tokens in ascending order, and row r is at sequence position
    ``r % seqlen``, batch position ``r // seqlen`` of Megatron's ``[seqlen, batch_size, ...]``.
    One joint dispatch balances all sequences together, and lets them differ in shape.

    Attributes:
        batch_size: Megatron's micro-batch size.
        num_rows: rows of the shard, padding included, a multiple of ``batch_size``.
        positions: int64 ``[num_rows]`` on the device, position of each row for rotary embedding.
        roll_keeps: bool ``[num_rows]`` on the device, False where the next token is another
            sequence's (or document's) and on padding.
    """

    batch_size: int
    num_rows: int
    positions: torch.Tensor
    roll_keeps: torch.Tensor

    @property
    def seqlen(self) -> int:
        """Length of Megatron's sequence dimension on this rank."""
        return self.num_rows // self.batch_size

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[seqlen, batch_size, ...]`` to ``[num_rows, ...]``."""
        if self.batch_size == 1:
            return x.squeeze(1)
        return x.transpose(0, 1).reshape(self.num_rows, *x.shape[2:])

    def from_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, ...]`` to ``[seqlen, batch_size, ...]``."""
        if self.batch_size == 1:
            return x.unsqueeze(1)
        return x.view(self.batch_size, self.seqlen, *x.shape[1:]).transpose(0, 1)


@dataclass
class MagiSeqParams(PackedSeqParams):
    """`PackedSeqParams` that also carries the plans of its microbatch.

    ``qkv_format`` is ``sbhd``: to Megatron the tensors look unpacked. ``max_seqlen_q`` is the
    number of rotary positions.
    """

    plans: PlanSet = field(default=None, repr=False)
    layout: ShardLayout = field(default=None, repr=False)
    num_loss_tokens: float = 0.0
    """Sum of the loss mask over the whole microbatch."""


def carrier_of(packed_seq_params: PackedSeqParams | None, where: str) -> MagiSeqParams:
    """The carrier, or an error that says who called the model without one.

    Raises:
        ValueError: ``packed_seq_params`` is not a `MagiSeqParams`.
    """
    if not isinstance(packed_seq_params, MagiSeqParams):
        raise ValueError(
            f"packed_seq_params: {where} needs the MagiSeqParams that megatron_magi.mcore.batch makes, "
            f"got {type(packed_seq_params).__name__}"
        )
    return packed_seq_params
