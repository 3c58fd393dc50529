"""What travels with a microbatch into every layer: its token distribution and its plans.

Megatron hands `packed_seq_params` to every layer, and recomputation and multi-token
prediction capture it, so a microbatch that is replayed or still in flight has its own plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.comm.roll import RollArgs, make_roll_args
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mcore.planner import Fields, PlannedBatch, Planner
from megatron_magi.mcore.token_order import TokenOrder
from megatron_magi.mcore.tree_roll import TreeRoll
from megatron_magi.plan import RankPlan

Window = tuple[int, int] | None
"""Keys visible to the left and right of a query, or None for a layer without a window."""


class LayerPlans:
    """The plans of one microbatch, by layer.

    Args:
        planner: that made them.
        fields: of the microbatch, for masks that were not prepared.
        planned: what was made ahead.
        successors: made of its arrays, if it has them.
        order: likewise.
        visible: likewise, by the text of their masks; see `visible_keys`.

    Attributes:
        stats: of the plan that decided the distribution of tokens.
        dispatch: the distribution.
        chosen_keys: by the numbers of layers that share them, lists of keys, int ``[num_rows, topk]``.
    """

    def __init__(
        self,
        planner: Planner,
        fields: Fields,
        planned: PlannedBatch,
        successors: RollArgs | None,
        order: TokenOrder | None,
        visible: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._planner = planner
        self._order = order
        self._visible = dict(visible or {})
        self._key: DistAttnRuntimeKey | None = None
        self.chosen_keys: dict[int, torch.Tensor] = {}
        self._fields = fields
        self._plans = planned.prepared.plans
        self._successors = successors
        self.stats = planned.stats
        self.dispatch = planned.dispatch

    @property
    def config(self) -> MagiConfig:
        """How the plans were made and are executed."""
        return self._planner.config

    @property
    def named(self) -> dict[str, RankPlan]:
        """The plans made so far, by the text of their masks."""
        return self._plans

    def text_of(self, layer_number: int, window: Window) -> str:
        """The text of a layer's mask."""
        return self._planner.masks.of(layer_number, window).text

    def for_layer(self, layer_number: int, window: Window) -> RankPlan:
        """This rank's plan for a layer, counted from 1, that has a window or none.

        Raises:
            ValueError: a mask that no layer of the command line has does not fit the microbatch.
        """
        source = self._planner.masks.of(layer_number, window)
        if source.text not in self._plans:
            self._plans[source.text] = self._planner.plan_of(source, self._fields, self.dispatch)
        return self._plans[source.text]

    def visible_keys(self, layer_number: int, device: torch.device) -> torch.Tensor:
        """The keys from which a layer may choose, as `layout.visible_keys`, of this rank's tokens without padding.

        Made on first use where they were not prepared.
        """
        source = self._planner.masks.of(layer_number, None)
        if source.text not in self._visible:
            bounds = self._planner.visible_keys(source, self._fields, self.dispatch)
            self._visible[source.text] = torch.from_numpy(bounds).to(device)
        return self._visible[source.text]

    def key_of(self, cp_group: dist.ProcessGroup) -> DistAttnRuntimeKey:
        """A key of this distribution of tokens, for functions of `megatron_magi.api` that do not look at its mask."""
        if self._key is None:
            dispatch = self.dispatch
            self._key = DistAttnRuntimeKey(
                AttnMask([], dispatch.total_seqlen),
                num_heads_q=None,
                num_heads_kv=None,
                head_dim=None,
                cp_group=cp_group,
                config=self.config,
                layout=dispatch,
                total_seqlen=dispatch.padded_seqlen,
                pad_size=dispatch.padded_seqlen - dispatch.total_seqlen,
            )
        return self._key

    def order(self, device: torch.device) -> TokenOrder | None:
        """For linear layers; None where each sequence is a document, by itself on this rank, as to Megatron.

        Made on first use where it was not prepared.
        """
        if self._order is None and not self._planner.has_linear_layers:
            arrays = self._planner.order_arrays(self._fields, self.dispatch)
            named = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
            self._order = TokenOrder.from_arrays(named, self.dispatch.padded_seqlen)
        return self._order

    def successors(self, device: torch.device) -> RollArgs:
        """How each row gets the content of the next token's row; made on first use where it was not prepared."""
        if self._successors is None:
            dispatch, rank = self.dispatch, self._planner.cp_rank
            arrays = make_roll_args(dispatch.global_indices(), -1, dispatch.total_seqlen, rank)
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
        tree: of rows of a prefix tree that are shifted.
    """

    batch_size: int
    num_rows: int
    positions: torch.Tensor
    roll_keeps: torch.Tensor
    tree: TreeRoll | None = None

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
    number of rotary positions. Megatron has code that makes a new `PackedSeqParams` of the fields that it knows; the
    plans travel in ``qkv_format`` too, so that `find_carrier` finds them there.
    """

    plans: LayerPlans = field(default=None, repr=False)
    layout: ShardLayout = field(default=None, repr=False)
    num_loss_tokens: float | torch.Tensor = 0.0
    """Sum of the loss mask over the whole microbatch; fp32 ``[]`` on the device where it changes in captured graphs."""
    sums_gradients: bool = False
    """Gradients are summed over context-parallel ranks; Megatron's trainer averages them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.qkv_format = _Format(self.qkv_format)
        own = ("plans", "layout", "num_loss_tokens", "sums_gradients")
        self.qkv_format.cargo = {name: getattr(self, name) for name in own}


class _Format(str):
    """A name of a format, to which the fields of a `MagiSeqParams` are tied that Megatron does not know."""

    cargo: dict[str, Any]


def find_carrier(packed_seq_params: Any) -> MagiSeqParams | None:
    """The carrier, also of a `PackedSeqParams` that was made of its fields; None of anything else."""
    if isinstance(packed_seq_params, MagiSeqParams):
        return packed_seq_params
    qkv_format = getattr(packed_seq_params, "qkv_format", None)
    if not isinstance(qkv_format, _Format):
        return None
    known = {f.name: getattr(packed_seq_params, f.name) for f in fields(PackedSeqParams)}
    return MagiSeqParams(**known, **qkv_format.cargo)


def carrier_of(packed_seq_params: PackedSeqParams | None, where: str) -> MagiSeqParams:
    """The carrier, or an error that says who called the model without one.

    Raises:
        ValueError: ``packed_seq_params`` is not a `MagiSeqParams`, nor made of one.
    """
    found = find_carrier(packed_seq_params)
    if found is None:
        raise ValueError(
            f"packed_seq_params: {where} needs the MagiSeqParams that megatron_magi.mcore.batch makes, got "
            f"{type(packed_seq_params).__name__}; a script of your own calls megatron_magi.mcore.install() before it "
            "imports anything of megatron; to generate text load the checkpoint with another --attention-backend"
        )
    return found
