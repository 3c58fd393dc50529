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
from megatron_magi.mcore.planner import Fields, PlannedBatch, Planner
from megatron_magi.runtime.shm_transport import Sendable

_BUILD = "training.training:build_pretraining_data_loader"


class LoadedBatch(Sendable[tuple[Fields, "PlannedBatch | Exception"]]):
    """A microbatch as the data loader returns it, and its plan.

    A copy is the microbatch alone. Megatron copies what it keeps to replay an iteration, and saves that in checkpoints;
    a microbatch that is replayed is planned again.

    Args:
        fields: as Megatron collates them.
        planned: or why there is none.
    """

    begun: Any = None
    """What `megatron_magi.mcore.batch` has made of it before it is due."""
    _brought: dict[str, torch.Tensor] | None = None

    def __init__(self, fields: Fields, planned: PlannedBatch | Exception) -> None:
        super().__init__((fields, planned))

    @property
    def fields(self) -> Fields:
        """The microbatch as Megatron collates it."""
        return self.parts[0]

    @property
    def planned(self) -> PlannedBatch | Exception:
        """The plan, or the error of planning."""
        return self.parts[1]

    def bring(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Arrays of the plan on ``device``, made ready to run there; raises why there is no plan.

        Called again it returns the same: for the device of the first call.
        """
        planned = self.planned
        if isinstance(planned, Exception):
            raise planned
        if self._brought is None:
            self._brought = planned.prepared.to(device)
        return self._brought

    def __copy__(self) -> dict[str, Any]:
        # Tensors from a worker lie in one block with the plan, of which torch saves all, or refuses to.
        return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in self.fields.items()}

    def _pinned(self, parts: tuple[Fields, PlannedBatch | Exception]) -> tuple[Fields, PlannedBatch | Exception]:
        fields, planned = parts  # fields are read on the CPU
        return fields, planned if isinstance(planned, Exception) else planned.pin_memory()


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

    from megatron_magi.mcore.settings import is_magi

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
