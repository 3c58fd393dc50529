"""From a microbatch of the data loader to this rank's shard of it and the plans that go with it.

Every tensor-parallel rank and every pipeline stage reads the data loader itself: all of them
need the plan, which depends on nothing but the batch, and so nothing is broadcast and no
rank waits for a GPU to learn where documents end. Workers of the data loader plan and cut
the shard (`planner`); a microbatch that comes without a plan is planned when it is due.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_magi.comm.agreement import Agreement, start_agreement
from megatron_magi.comm.roll import RollArgs
from megatron_magi.mcore.carrier import LayerPlans, MagiSeqParams, ShardLayout
from megatron_magi.mcore.loader import LoadedBatch
from megatron_magi.mcore.planner import FAILED, SEQUENCES, Fields, PlannedBatch, Planner
from megatron_magi.mcore.token_order import TokenOrder
from megatron_magi.mcore.tree_roll import TreeRoll
from megatron_magi.runtime.upload import current_device


@dataclass(frozen=True)
class LocalBatch:
    """This rank's shard of a microbatch, on the device.

    Attributes:
        tokens, labels, position_ids: int64 ``[batch_size, seqlen]``, the shard's sequence length.
        loss_mask: fp32, likewise; 0 on padding.
        padding_mask: bool, likewise, True on padding; None when the shard has none on any rank.
        params: the carrier.
        documents: int64 ``[num_documents + 1]``, bounds of the documents that confine attention in the
            whole microbatch; None when nothing does.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    padding_mask: torch.Tensor | None
    params: MagiSeqParams
    documents: torch.Tensor | None


class ReadBatches(Iterator[LocalBatch]):
    """Microbatches that have been read and dispatched, in the place of a data iterator."""

    def __init__(self, batches: Sequence[LocalBatch]) -> None:
        self._left = iter(batches)

    def __next__(self) -> LocalBatch:
        return next(self._left)


class _Begun(NamedTuple):
    """A microbatch in preparation: its shard, or why there is none, and the comparison of ranks if one is under way."""

    local: LocalBatch | None
    failure: Exception | None
    agreement: Agreement | None


class BatchDispatcher:
    """Makes `LocalBatch` from the data loader's batches.

    Args:
        planner: of this rank.
        agreement_group: all ranks that must read the same batch, on a CPU backend, to compare what they
            read and planned; None to trust.

    Attributes:
        sums_gradients: who trains sums gradients over context-parallel ranks; Megatron's trainer averages them.
    """

    def __init__(self, planner: Planner, agreement_group: dist.ProcessGroup | None) -> None:
        self.planner = planner
        self.sums_gradients = False
        self._agreement_group = agreement_group

    def next(self, data_iterator: Iterator[LoadedBatch | Fields] | None) -> LocalBatch:
        """Reads a microbatch and dispatches it; errors as in `dispatch`, and those of reading.

        Raises:
            ValueError: there is no data, or no more.
        """
        try:
            if data_iterator is None:
                raise ValueError(
                    "data: none to read here; with --attention-backend magi every rank reads it, so data sets are made "
                    "on all ranks, and --eval-iters 0 is to be given where there are none for evaluations"
                )
            batch = next(data_iterator)
        except StopIteration:
            batch = LoadedBatch({}, ValueError("data: has ended, the data set has fewer samples than are to be read"))
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must not wait)
            batch = LoadedBatch({}, error)
        return self.dispatch(batch)

    def dispatch(self, batch: LoadedBatch | Fields) -> LocalBatch:
        """This rank's shard of ``batch``; of one without a plan the tensors are ``[batch_size, seqlen]`` on the CPU.

        A batch that cannot be read or planned on one rank is an error on all ranks of the agreement group.

        Raises:
            RuntimeError: ranks of the agreement group read different data or made different plans, or
                one of them could not make its plan.
            ValueError: the batch does not have the shape for which Megatron has been set up, or a mask
                does not fit it.
        """
        if not isinstance(batch, LoadedBatch):
            batch = LoadedBatch(batch, self.planner.attempt(batch))
        if batch.begun is None:
            self.begin(batch)
        (local, failure, agreement), batch.begun = batch.begun, None
        if agreement is not None:
            self._settle(agreement, failure)
        if failure is not None:
            raise failure
        return local

    def begin(self, batch: LoadedBatch) -> None:
        """Does what `dispatch` does without raising errors; `dispatch` then does the rest.

        It waits for other ranks to begin, once for each group (`start_agreement`), and never for what they compute.
        All ranks of the agreement group begin the same microbatches in the same order.
        """
        planned, local, failure, agreement = None, None, None, None
        # Before the ranks compare: one that has agreed and then fails would leave the others in their first layer.
        try:
            planned = batch.planned
            if isinstance(planned, Exception):
                failure = planned
            else:
                local = self._local(batch, planned)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must not wait)
            failure = error
        if self._agreement_group is not None:
            fingerprint = FAILED if failure is not None else planned.fingerprint
            try:
                agreement = start_agreement(fingerprint, self._agreement_group, "tokens and plan of a microbatch")
            except RuntimeError as error:  # the group is broken, as the message says
                failure = failure or error
        batch.begun = _Begun(local, failure, agreement)

    def _settle(self, agreement: Agreement, failure: Exception | None) -> None:
        """Waits until all ranks agree. One that has failed tells the others why before all of them end."""
        # Not any error here is a disagreement: a data loader raises that a worker has died wherever the process is.
        if len(set(agreement.values())) == 1:
            return
        reports: list[str | None] = [None] * dist.get_world_size(self._agreement_group)
        dist.all_gather_object(reports, failure and _told(failure), group=self._agreement_group)
        told = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if not told:
            agreement.wait()
        ranks = dist.get_process_group_ranks(self._agreement_group)
        raise RuntimeError(
            f"{told[0][1]} (on {len(told)} of {len(reports)} ranks, first on global rank {ranks[told[0][0]]})"
        ) from failure

    def _local(self, batch: LoadedBatch, planned: PlannedBatch) -> LocalBatch:
        named = batch.bring(current_device())
        rows = {name: named[name].view(planned.batch_size, -1) for name in SEQUENCES}
        padding, roll = named.get("padding"), planned.roll
        successors = roll and RollArgs.from_uploaded(roll, [named[f"roll{i}"] for i in range(roll.num_arrays)])
        order = TokenOrder.from_arrays(named, planned.dispatch.padded_seqlen)
        sources = enumerate(self.planner.masks.sources)
        visible = {source.text: named[f"visible{i}"] for i, source in sources if f"visible{i}" in named}
        tree = TreeRoll(*(named[name] for name in TreeRoll._fields)) if TreeRoll._fields[0] in named else None
        params = MagiSeqParams(
            qkv_format="sbhd",
            max_seqlen_q=planned.num_positions,
            max_seqlen_kv=planned.num_positions,
            plans=LayerPlans(self.planner, batch.fields, planned, successors, order, visible),
            layout=ShardLayout(planned.batch_size, len(named["tokens"]), named["positions"], named["roll_keeps"], tree),
            num_loss_tokens=planned.num_loss_tokens,
            sums_gradients=self.sums_gradients,
        )
        return LocalBatch(
            **rows,
            padding_mask=None if padding is None else padding.view(planned.batch_size, -1),
            params=params,
            documents=named.get("documents"),
        )


def _told(error: Exception) -> str:
    """What other ranks are told of an error: its message, and its type where that says what the message does not."""
    if isinstance(error, (ValueError, RuntimeError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
