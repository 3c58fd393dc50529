"""One JSON line an iteration: exact losses, and how well the work was spread."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_magi.mcore import seams
from megatron_magi.plan import PlanStats

_LOG = "training.training:training_log"


class LossLog:
    """Writes what Megatron logs of each iteration, unrounded, to a file of JSON lines.

    Only the last rank writes: it is on the last pipeline stage, where losses are. Keys:

    - ``iteration``, the losses by their names, ``grad_norm``, ``skipped``; ``max_attention_logit`` if
      Megatron was asked for it;
    - of the iteration's microbatches, with plans: ``num_plans``; ``balance``, the worst ratio of a
      rank's area to the mean; ``areas``, the sum for each rank; ``degree``, the largest number of
      stages; ``received_rows`` and ``lower_bound_rows``, rows of k and v that all ranks together
      fetch in the forward pass of one layer, and must.

    Args:
        path: appended to; it and its folder are made.

    Raises:
        ValueError: it cannot be written to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("a").close()
        except OSError as error:
            raise ValueError(f"magi_loss_log: cannot append to {path}: {error.strerror}") from None
        self._plans: list[PlanStats] = []

    def add_plan(self, stats: PlanStats) -> None:
        """Notes the plan of a training microbatch of the current iteration; not again when it is replayed."""
        self._plans.append(stats)

    def install(self) -> None:
        """Makes Megatron's trainer report to this log each time it logs an iteration."""
        stock = seams.original(_LOG)

        @functools.wraps(stock)
        def training_log(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self._write(loss_dict, stock, args, kwargs)
            return stock(loss_dict, *args, **kwargs)

        seams.put(_LOG, training_log)

    def _write(self, loss_dict: dict[str, Any], stock: Any, args: tuple, kwargs: dict) -> None:
        plans, self._plans = self._plans, []
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        bound = inspect.signature(stock).bind(loss_dict, *args, **kwargs).arguments
        grad_norm = bound["grad_norm"]
        line: dict[str, Any] = {"iteration": bound["iteration"]}
        line |= {name: float(value) for name, value in loss_dict.items()}
        line |= {"grad_norm": None if grad_norm is None else float(grad_norm), "skipped": int(bound["skipped_iter"])}
        if bound["max_attention_logit"]:
            line["max_attention_logit"] = float(bound["max_attention_logit"])
        line |= _summary(plans)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _summary(stats: list[PlanStats]) -> dict[str, Any]:
    if not stats:
        return {}
    return {
        "num_plans": len(stats),
        "balance": max(s.balance for s in stats),
        "areas": [sum(areas) for areas in zip(*(s.areas for s in stats), strict=True)],
        "received_rows": sum(sum(s.received_rows) for s in stats),
        "lower_bound_rows": sum(sum(s.lower_bound_rows) for s in stats),
        "degree": max(s.degree for s in stats),
    }
