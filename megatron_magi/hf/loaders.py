"""Data loaders of accelerate and the Trainer, for ranks that share batches: what they do by rank is done by batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import accelerate.data_loader
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import seed_worker

from megatron_magi.hf.planning_collator import PlanAhead, PlanningCollator

if TYPE_CHECKING:
    from accelerate import Accelerator, ParallelismConfig


class BatchRank(NamedTuple):
    """The number of batches that ranks read at a time, and which of them this rank reads."""

    count: int
    index: int

    @classmethod
    def of(cls, parallel: ParallelismConfig, process_index: int) -> BatchRank:
        """Ranks that share a batch are neighbours, as in accelerate's meshes."""
        sharing = parallel.tp_size * parallel.cp_size
        return cls(parallel.total_size // sharing, process_index // sharing)


def prepare_by_batch(accelerator: Accelerator, parallel: ParallelismConfig, ahead: PlanAhead) -> None:
    """Has an accelerator prepare data loaders by `BatchRank`, streams among them, whose workers plan ``ahead``."""
    prepare, rank = accelerator.prepare_data_loader, BatchRank.of(parallel, accelerator.process_index)
    # By its name, as it makes new ones to skip batches when training is resumed.
    accelerate.data_loader.DataLoaderDispatcher = BatchDispatcher

    @functools.wraps(prepare)
    def prepare_data_loader(data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        if not getattr(data_loader, "_is_accelerate_prepared", False):
            _draw_by_batch(data_loader, rank)
        prepared = prepare(data_loader, *args, **kwargs)
        if rank.count == 1:
            _draw_alike(prepared)
        _plan_in_workers(prepared, ahead)
        return prepared

    accelerator.prepare_data_loader = prepare_data_loader


def _draw_by_batch(loader: DataLoader, rank: BatchRank) -> None:
    """The Trainer seeds workers by rank, and balances lengths between ranks."""
    seed = loader.worker_init_fn
    if isinstance(seed, functools.partial) and seed.func is seed_worker:
        loader.worker_init_fn = functools.partial(seed_worker, *seed.args, **{**seed.keywords, "rank": rank.index})
    sampler = loader.batch_sampler
    if isinstance(sampler, BatchRebalanceSampler):
        size = sampler.effective_batch_size // sampler.dp_size * rank.count
        options = {name: getattr(sampler, name) for name in ("grad_accum", "shuffle", "seed", "drop_last")}
        sampler.__init__(sampler.lengths, size, dp_size=rank.count, rank=rank.index, **options)


def _draw_alike(loader: DataLoader) -> None:
    """Where all ranks read the same batches they draw orders of samples, and seeds of workers, from rank 0's state."""
    if isinstance(loader, DataLoaderShard) and "torch" not in (loader.rng_types or ()):
        loader.rng_types = [*(loader.rng_types or ()), "torch"]


def _plan_in_workers(loader: DataLoader, ahead: PlanAhead) -> None:
    """Not where rank 0 reads for others, and sends them tensors alone."""
    inner = getattr(loader, "base_dataloader", None)
    has_workers = isinstance(loader, DataLoaderShard) and inner is not None and inner.num_workers > 0
    if has_workers and not isinstance(inner.collate_fn, PlanningCollator):
        inner.collate_fn = PlanningCollator(inner.collate_fn, ahead)


class BatchDispatcher(DataLoaderDispatcher):
    """accelerate's loader that reads on rank 0 alone and sends; ranks of a context-parallel group get the same batch.

    With other configurations it is accelerate's own.
    """

    def __init__(self, *args: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        parallel = AcceleratorState._shared_state.get("parallelism_config")
        if not hasattr(parallel, "magi_config") or parallel.cp_size == 1:
            return
        if use_stateful_dataloader:
            raise ValueError(
                "use_stateful_dataloader: what rank 0 has read for others is not in its state under context "
                "parallelism; set dispatch_batches=False"
            )
        rank = BatchRank.of(parallel, self.state.process_index)
        self.state = _StateOfBatches(self.state, rank.count)
        self.slice_fn = _part_of_batch(self.slice_fn, rank.index)
        self.submesh_tp = None  # its ranks share batches in the same way


class _StateOfBatches:
    """accelerate's state, in which batches are counted and not ranks. The rank stays: 0 reads."""

    def __init__(self, state: PartialState, count: int) -> None:
        self._state, self.num_processes = state, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _part_of_batch(slice_fn: Callable, index: int) -> Callable:
    """``slice_fn`` that takes the part of what was sent that is of ``index``, not of the rank."""

    def sliced(data: Any, part: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
        # A part that begins at 0 is rank 0's, or the first samples, which complete the last batch.
        if part.start:
            size = part.stop - part.start
            part = slice(index * size, (index + 1) * size)
        return slice_fn(data, part, process_index=process_index, num_processes=num_processes)

    return sliced
