"""Megatron's own data loader: its workers plan what they load."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from megatron_magi.mcore import seams
from megatron_magi.mcore.arguments import is_magi
from megatron_magi.mcore.planner import Fields, PlannedBatch, Planner
from megatron_magi.upload import PackedArrays, pack

_PACKED = (torch.int64, torch.int32, torch.float32, torch.bool)
_BUILD = "training.training:build_pretraining_data_loader"


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A microbatch as the data loader returns it, and its plan.

    A copy is the microbatch alone. Megatron copies what it keeps to replay an iteration, and saves that in checkpoints;
    a microbatch that is replayed is planned again.

    Attributes:
        fields: as Megatron collates them.
        planned: or why there is none.
    """

    fields: Fields
    planned: PlannedBatch | Exception

    def __copy__(self) -> dict[str, Any]:
        return dict(self.fields)

    def __reduce__(self) -> tuple:
        # From process to process a tensor costs an exchange of file descriptors, so they go side by side.
        together = {n: x for n, x in self.fields.items() if isinstance(x, torch.Tensor) and x.dtype in _PACKED}
        others = {name: x for name, x in self.fields.items() if name not in together}
        return _arrived, (tuple(together), pack([x.numpy() for x in together.values()]), others, self.planned)

    def pin_memory(self) -> LoadedBatch:
        """Copies what goes to the device into page-locked memory, as data loaders ask for it."""
        planned = self.planned if isinstance(self.planned, Exception) else self.planned.pin_memory()
        return LoadedBatch(self.fields, planned)  # fields are read on the CPU


def _arrived(names: tuple[str, ...], packed: PackedArrays, others: Fields, planned: Any) -> LoadedBatch:
    return LoadedBatch({**dict(zip(names, packed.to("cpu"), strict=True)), **others}, planned)


@dataclass(frozen=True, eq=False)
class PlanningCollate:
    """Collates samples and plans for the microbatch that they make; runs where the data loader collates.

    Attributes:
        planner: of this rank.
        collate: the data loader's own.
        needs_backward: False for data of evaluations.
    """

    planner: Planner
    collate: Callable[[Sequence], Fields]
    needs_backward: bool = True

    def __call__(self, samples: Sequence) -> LoadedBatch:
        """An error of the plan travels with the microbatch, to be raised in its step."""
        fields = self.collate(samples)
        planned = self.planner.attempt(fields, needs_backward=self.needs_backward)
        if isinstance(planned, Exception) and get_worker_info() is not None:
            planned = _portable(planned)
        return LoadedBatch(fields if isinstance(fields, Mapping) else {}, planned)


def _portable(error: Exception) -> Exception:
    """An error that can be sent to another process, with its traceback as a note."""
    is_value = isinstance(error, ValueError)
    kept = ValueError(str(error)) if is_value else RuntimeError(f"{type(error).__name__}: {error}")
    kept.add_note("In a worker of the data loader:\n" + "".join(traceback.format_exception(error)))
    return kept


def install(planner: Planner) -> None:
    """Makes data loaders that Megatron builds from now on plan with ``planner``; a user's own stay as they are."""
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    stock = seams.original(_BUILD)

    @functools.wraps(stock)
    def build_pretraining_data_loader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        loader = stock(dataset, *args, **kwargs)
        if is_magi() and isinstance(loader, DataLoader) and get_args().dataloader_type != "external":
            split = getattr(dataset, "split", getattr(dataset, "index_split", None))
            trains = split not in (Split.valid, Split.test)
            loader.collate_fn = PlanningCollate(planner, loader.collate_fn, trains)
        return loader

    seams.put(_BUILD, build_pretraining_data_loader)
