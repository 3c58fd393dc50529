"""Plans a microbatch before its step: its masks, this rank's plans and shard, and a fingerprint.

A `Planner` is pure and can be pickled, so that worker processes of the data loader plan ahead of the step. It knows
ranks as numbers and needs neither process groups nor a GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_magi.attention import AttnShape, PreparedBatch, PreparedPlans, prepare_plans
from megatron_magi.comm.dispatch import dispatch
from megatron_magi.comm.roll import RollFacts, make_roll_args
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask.microbatch import Microbatch, document_bounds, sequence_bounds
from megatron_magi.mask.source import LayerMasks, MaskSource
from megatron_magi.mcore import tree_roll
from megatron_magi.mcore.layout import bounds_of_documents, dispatch_in, positions_of_rows, visible_keys
from megatron_magi.plan import Dispatch, PlanSet, PlanStats, RankPlan, make_plan

SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields of a microbatch that are dispatched, ``[batch_size, seqlen]``."""
BOUNDS = ("cu_seqlens_padded", "cu_seqlens")
"""Fields with bounds of documents; the first that there is counts."""
FAILED = (1 << 63) - 1
"""Compared in place of a fingerprint by a rank that could not plan."""

Fields = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """Made by a `Planner`; can be sent from one process to another.

    Attributes:
        prepared: plans by the text of their masks. Its arrays are this rank's rows of `SEQUENCES`, ``[num_rows]``;
            ``positions`` and ``roll_keeps`` of `ShardLayout`; ``padding``, bool, where a rank has some; ``documents``,
            their bounds in the whole microbatch, where they confine attention; ``order_bounds`` and, where rows are
            not in order, ``order_positions`` of `TokenOrder`, where linear layers need it; ``visible0`` and on, of each
            mask `layout.visible_keys` of this rank's tokens, where layers choose keys; the fields of `TreeRoll` in a
            prefix tree whose rows are shifted; ``roll0`` and on, see `roll`.
        dispatch: the distribution of tokens that all plans share.
        stats: of the plan that decided it.
        fingerprint: 63 bits that ranks compare; below `FAILED`.
        batch_size: sequences.
        num_positions: rotary positions.
        num_loss_tokens: sum of the loss mask over the whole microbatch.
        roll: of the arrays that shift rows by one token, None where rows are not shifted.
    """

    prepared: PreparedBatch
    dispatch: Dispatch
    stats: PlanStats
    fingerprint: int
    batch_size: int
    num_positions: int
    num_loss_tokens: float
    roll: RollFacts | None

    def pin_memory(self) -> PlannedBatch:
        """A copy in page-locked memory."""
        return replace(self, prepared=self.prepared.pin_memory())


class _PlannedMasks(NamedTuple):
    """What depends on masks alone; ``key``: the masks, and whether there is a backward."""

    key: tuple[tuple[AttnMask, ...], bool]
    prepared: PreparedPlans
    dispatch: Dispatch
    stats: PlanStats
    fingerprint: int
    roll: RollFacts | None
    roll_tables: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class Planner:
    """Makes `PlannedBatch` from a microbatch as the data loader collates it.

    Attributes:
        config: how to plan.
        cp_rank, cp_size: for which of how many context-parallel ranks.
        shape: of the attention, on one tensor-parallel rank.
        masks: which layer attends by which mask; documents for all if not given.
        own_positions: rotary positions are the ``position_ids`` of the batch; else those in the sequence, or in the
            document where the batch has ``cu_seqlens``, as in Megatron.
        eod: token that ends a document, if attention is confined to documents by it.
        seq_length: tokens a sequence in Megatron's tensors, all ranks together, if that is fixed.
        rolls: rows will be shifted by one token, as in multi-token prediction.
        num_depths: layers of multi-token prediction, for the rows of prefix trees.
        compares: ranks compare what they read; without it the fingerprint is of the plans alone.
        has_linear_layers: layers run through the tokens of documents in their order.
        has_sparse_layers: layers choose keys by an indexer.
        layout: of the tokens, ``zigzag`` or ``contiguous``; the planner's own when None.
    """

    config: MagiConfig
    cp_rank: int
    cp_size: int
    shape: AttnShape
    masks: LayerMasks = field(default_factory=LayerMasks)
    own_positions: bool = False
    eod: int | None = None
    seq_length: int | None = None
    rolls: bool = False
    num_depths: int = 0
    compares: bool = True
    has_linear_layers: bool = False
    has_sparse_layers: bool = False
    layout: str | None = None
    _last: list[_PlannedMasks] = field(default_factory=list, repr=False)  # the one made last, or none

    def __call__(self, fields: Fields, *, needs_backward: bool = True) -> PlannedBatch:
        """Plans for ``fields``, whose sequences are tensors ``[batch_size, seqlen]`` on the CPU.

        Raises:
            ValueError: they do not have the shape for which Megatron has been set up, or a mask does not fit them.
        """
        microbatch, masks = self.masks_of(fields)
        # A data set may have another dtype; the loss of multi-token prediction knows a loss mask by its own.
        fields = {**fields, "loss_mask": fields["loss_mask"].float()}
        made = self._planned(masks, needs_backward)
        dispatched = made.dispatch
        self._check_length(fields, dispatched)
        shape, index = fields["tokens"].shape, dispatched.global_index(self.cp_rank)
        rows = torch.from_numpy(index)
        arrays = {name: dispatch(fields[name].reshape(-1), rows).numpy() for name in SEQUENCES}
        # Rotary positions and rolling follow stock: they know no documents by eod.
        has_bounds = any(name in fields for name in BOUNDS)
        segments = microbatch.cu_seqlens if has_bounds else sequence_bounds(*shape)
        arrays["positions"], arrays["roll_keeps"] = _layout(index, segments)
        num_positions = shape[1]
        if self.own_positions:
            arrays["positions"] = arrays["position_ids"].astype(np.int64)
            num_positions = max(num_positions, int(fields["position_ids"].max()) + 1)
        # Whether there is padding must not depend on the rank: layers reduce over what it leaves.
        if dispatched.padded_seqlen > dispatched.total_seqlen:
            arrays["padding"] = index >= dispatched.total_seqlen
        if has_bounds or self.eod is not None:
            arrays["documents"] = microbatch.cu_seqlens
        if self.has_linear_layers:
            arrays |= _order_arrays(microbatch, dispatched)
        if self.has_sparse_layers:
            arrays |= {f"visible{i}": _visible(mask, index) for i, mask in enumerate(masks.values())}
        if self.rolls and any(source.text == tree_roll.MASK for source in masks):
            arrays |= tree_roll.tree_arrays(microbatch, dispatched, self.cp_rank, self.num_depths)
        arrays |= {f"roll{i}": table for i, table in enumerate(made.roll_tables)}
        return PlannedBatch(
            made.prepared.batch(arrays),
            dispatched,
            made.stats,
            self._fingerprint(fields, made.fingerprint),
            shape[0],
            num_positions,
            float(fields["loss_mask"].sum()),
            made.roll,
        )

    def attempt(self, fields: Fields, *, needs_backward: bool = True) -> PlannedBatch | Exception:
        """Calls the planner and returns what it raises, for the step that the microbatch belongs to."""
        try:
            return self(fields, needs_backward=needs_backward)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must not wait)
            return error

    def masks_of(self, fields: Fields) -> tuple[Microbatch, dict[MaskSource, AttnMask]]:
        """The microbatch and all masks of its layers, the primary one first; errors as of a call."""
        microbatch = self._microbatch(fields)
        return microbatch, {source: source(microbatch) for source in self.masks.sources}

    def _planned(self, masks: dict[MaskSource, AttnMask], needs_backward: bool) -> _PlannedMasks:
        """Made unless the last microbatch had the same masks, as where nothing confines attention."""
        key = (tuple(masks.values()), needs_backward)
        if not self._last or self._last[0].key != key:
            self._last[:] = [self._make_plans(masks, key)]
        return self._last[0]

    def _make_plans(self, masks: dict[MaskSource, AttnMask], key: tuple[tuple[AttnMask, ...], bool]) -> _PlannedMasks:
        given = None
        if self.layout is not None:
            total = next(iter(masks.values())).total_seqlen_q
            given = dispatch_in(self.layout, total, self.cp_size, self.config.dispatch)
        plans = PlanSet(masks.__getitem__, masks, self.config, self.cp_rank, self.cp_size, given)
        of_layers = {source.text: plans.of(source) for source in masks}
        prepared = prepare_plans(of_layers, self.shape, self.config, needs_backward=key[1])
        roll, tables = None, []
        if self.rolls:
            indices = plans.dispatch.global_indices()
            roll, tables = make_roll_args(indices, -1, plans.dispatch.total_seqlen, self.cp_rank).tables()
        return _PlannedMasks(key, prepared, plans.dispatch, plans.plan.stats(), plans.fingerprint, roll, tables)

    def order_arrays(self, fields: Fields, dispatch: Dispatch) -> dict[str, np.ndarray]:
        """Arrays of a microbatch's `TokenOrder`; none where each sequence is a document, by itself on this rank."""
        return _order_arrays(self._microbatch(fields), dispatch)

    def visible_keys(self, source: MaskSource, fields: Fields, dispatch: Dispatch) -> np.ndarray:
        """`layout.visible_keys` of this rank's tokens, without padding, in a mask of a microbatch."""
        return _visible(source(self._microbatch(fields)), dispatch.global_index(self.cp_rank))

    def _check_length(self, fields: Fields, dispatched: Dispatch) -> None:
        batch_size, seqlen = fields["tokens"].shape
        padded = dispatched.padded_seqlen
        if self.seq_length is not None and padded != self.seq_length * batch_size:
            raise ValueError(
                f"tokens: {batch_size} sequences of {seqlen} become {padded} tokens over all ranks, "
                f"Megatron is set up for {self.seq_length} each"
            )

    def plan_of(self, source: MaskSource, fields: Fields, dispatch: Dispatch) -> RankPlan:
        """This rank's plan for one more mask of a microbatch, over its dispatch.

        Raises:
            ValueError: the mask could not be made or does not fit the microbatch.
        """
        plan = make_plan(source(self._microbatch(fields)), self.config, self.cp_size, dispatch)
        return plan.for_rank(self.cp_rank)

    def _microbatch(self, fields: Fields) -> Microbatch:
        if not isinstance(fields, Mapping):
            raise ValueError(f"dataset_provider: its items must be dicts, got a {type(fields).__name__} of them")
        missing = [name for name in SEQUENCES if name not in fields]
        if missing:
            raise ValueError(f"dataset_provider: its items have no {' and no '.join(missing)}, only {sorted(fields)}")
        tokens = fields["tokens"]
        for name in SEQUENCES:
            _check_sequences(fields[name], name)
            if fields[name].shape != tokens.shape:
                raise ValueError(f"{name}: expected shape {list(tokens.shape)}, got {list(fields[name].shape)}")
        if self.own_positions and fields["position_ids"].min() < 0:
            raise ValueError(f"position_ids: must not be negative, got {int(fields['position_ids'].min())}")
        if all(source.is_named for source in self.masks.sources):
            check_no_mask_field(
                fields,
                "which no mask of attention is made of; leave it out (Megatron's own: create_attention_mask=False, or "
                "args.create_attention_mask_in_dataloader, which is off), or make the mask of it in a function for "
                "--magi-mask",
            )
        bounds = next((fields[name] for name in BOUNDS if name in fields), None)
        return Microbatch(tokens, document_bounds(tokens, bounds, self.eod), fields)

    def _fingerprint(self, fields: Fields, of_plans: int) -> int:
        if not self.compares:
            return of_plans % FAILED
        # Reading 8 bytes a token takes its time, and position ids follow from tokens otherwise.
        names = SEQUENCES if self.own_positions else SEQUENCES[:-1]
        return (of_plans ^ (checksum(fields, names) << 31)) % FAILED


def _order_arrays(microbatch: Microbatch, dispatch: Dispatch) -> dict[str, np.ndarray]:
    documents, sequences = microbatch.cu_seqlens, sequence_bounds(microbatch.batch_size, microbatch.seqlen)
    # Padding follows the last of several packed sequences: a column of Megatron's batch then has parts of several.
    is_each_by_itself = microbatch.batch_size == 1 or dispatch.padded_seqlen == dispatch.total_seqlen
    if dispatch.cp_size == 1 and is_each_by_itself and np.array_equal(documents, sequences):
        return {}
    arrays = {"order_bounds": bounds_of_documents(documents, dispatch.padded_seqlen)}
    positions = positions_of_rows(dispatch, microbatch.batch_size)
    return arrays if positions is None else {**arrays, "order_positions": positions}


def _visible(mask: AttnMask, index: np.ndarray) -> np.ndarray:
    return visible_keys(mask, index[index < mask.total_seqlen_q])


def check_no_mask_field(fields: Fields, why: str) -> None:
    """Refuses a mask of attention in what a data set returns, where nothing reads it.

    Args:
        why: what happens to it, and what to do.

    Raises:
        ValueError: there is one.
    """
    if fields.get("attention_mask") is not None:
        raise ValueError(f"attention_mask: the data set returns one, {why}")


def _check_sequences(x: Any, name: str) -> None:
    is_tensor = isinstance(x, torch.Tensor)
    if not is_tensor or x.dim() != 2 or x.device.type != "cpu":
        found = f"{list(x.shape)} on {x.device}" if is_tensor else f"a {type(x).__name__}"
        raise ValueError(f"{name}: expected a tensor [batch_size, seqlen] on the CPU, got {found}")


def checksum(fields: Fields, names: Sequence[str] = SEQUENCES) -> int:
    """A checksum of 32 bits that differs between batches of the same mask."""
    value = 0
    for name in names:
        value = zlib.crc32(fields[name].contiguous().numpy(), value)
    return value


def _layout(index: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the rows ``index``, which count from the start of a segment; whether a row has a successor there."""
    segment = np.searchsorted(segments, index, side="right") - 1
    is_padding = index >= segments[-1]
    positions = np.where(is_padding, 0, index - segments[np.minimum(segment, len(segments) - 1)])
    is_last = np.isin(index + 1, segments)
    return positions, ~(is_last | is_padding)
