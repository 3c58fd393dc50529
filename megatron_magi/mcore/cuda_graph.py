"""`--cuda-graph-impl full_iteration`: forward and backward of an iteration are one CUDA graph, for new masks each time.

Megatron captures an iteration after some that warm up, and replays it on tensors that stay. Here these are those of
microbatches whose plans stay too (`StaticPlans`). One that does not fit its place gets a larger one, and the graph is
captured again, with a notice. Another number of microbatches, as while the batch size ramps up, makes the iteration an
eager one, on its own tensors. All ranks decide alike: what NCCL prepares for captured collectives it does on all ranks
of a group.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, get_shared_capture_stream
from megatron.core.tensor_parallel.random import get_all_rng_states

from megatron_magi.attention import StaticPlans, load_together
from megatron_magi.comm.agreement import start_agreement
from megatron_magi.comm.group_collective import forget_graphs
from megatron_magi.config import MagiConfig
from megatron_magi.mcore import seams
from megatron_magi.mcore.batch import LocalBatch, ReadBatches
from megatron_magi.mcore.carrier import Window
from megatron_magi.mcore.look_ahead import look_ahead_of
from megatron_magi.mcore.settings import is_magi
from megatron_magi.plan import RankPlan
from megatron_magi.plan.types import Runtime

Plans = Mapping[str, RankPlan]
_MOST_GROWTHS = 8
_WRAPPER = "training.training:FullCudaGraphWrapper"
logger = logging.getLogger(__name__)


class StaticLayerPlans:
    """`LayerPlans` of a `StaticBatch`."""

    def __init__(self, of_first: Any, static: StaticPlans) -> None:
        self._first, self._static = of_first, static
        self.stats, self.dispatch = of_first.stats, of_first.dispatch

    @property
    def config(self) -> MagiConfig:
        """How the plans are executed."""
        return self._first.config

    def for_layer(self, layer_number: int, window: Window) -> RankPlan:
        """This rank's plan for a layer, counted from 1, that has a window or none.

        Raises:
            ValueError: the command line does not name the layer's mask.
        """
        text = self._first.text_of(layer_number, window)
        if text not in self._static.plans:
            raise ValueError(f"cuda_graph_impl: layer {layer_number} has a mask that the command line does not name")
        return self._static.plans[text]


class StaticBatch:
    """Place of a microbatch in captured iterations.

    Args:
        batch: the first there.
        group: the context-parallel ranks.
        samples: plans of other microbatches for which there is to be room.

    Attributes:
        batch: tensors and plans that stay; those of the microbatch that was loaded.
        static: the plans.
        group: the ranks.
        has_run: in eager mode, so that it can be captured.
    """

    def __init__(self, batch: LocalBatch, group: dist.ProcessGroup, samples: Sequence[Plans]) -> None:
        plans = batch.params.plans
        device = batch.tokens.device
        self.group, self.has_run = group, False
        self.static = StaticPlans(plans.named, device, group if group.size() > 1 else None, samples=samples)
        params = replace(
            batch.params,
            plans=StaticLayerPlans(plans, self.static),
            layout=_copy_of(batch.params.layout),
            num_loss_tokens=torch.tensor(batch.params.num_loss_tokens, dtype=torch.float32, device=device),
        )
        self.batch: LocalBatch = replace(_copy_of(batch), params=params)

    @staticmethod
    def sample_of(batch: LocalBatch) -> Plans:
        """Plans of a microbatch, without what they keep on a device."""
        return {name: replace(plan, runtime=Runtime()) for name, plan in batch.params.plans.named.items()}

    def differs(self, batch: LocalBatch) -> str | None:
        """Why a microbatch does not fit here, apart from its plans; None if it fits. The same on all ranks."""
        static, given = _tensors(self.batch), _tensors(batch)
        if {name: x.shape for name, x in static.items()} != {name: x.shape for name, x in given.items()}:
            return "its tensors have other shapes"
        if batch.params.max_seqlen_q != self.batch.params.max_seqlen_q:
            return f"it has {batch.params.max_seqlen_q} rotary positions"
        return None

    def take(self, batch: LocalBatch) -> None:
        """Makes this the place of another microbatch, all but its plans."""
        given = _tensors(batch)
        for name, x in _tensors(self.batch).items():
            x.copy_(given[name], non_blocking=True)
        self.batch.params.num_loss_tokens.fill_(batch.params.num_loss_tokens)

    @staticmethod
    def load(places: Sequence[StaticBatch], batches: Sequence[LocalBatch]) -> tuple[LocalBatch, str] | None:
        """Makes places those of other microbatches, all or none; which one does not fit, and why. Collective."""
        for place, batch in zip(places, batches, strict=True):
            if reason := place.differs(batch):
                return batch, f"a microbatch does not fit, {reason}"
        pairs = [(place.static, batch.params.plans.named) for place, batch in zip(places, batches, strict=True)]
        if large := load_together(pairs):
            return batches[large[0]], f"a microbatch does not fit, {large[1]}"
        for place, batch in zip(places, batches, strict=True):
            place.take(batch)
        return None


class GraphedIterations(FullCudaGraphWrapper):
    """Megatron's wrapper of schedules, with graphs of dispatched microbatches.

    Megatron makes one for training and one for each evaluation; they share graphs and counts of iterations, which are
    attributes of its class. What belongs to a graph is kept in the same way.
    """

    _places: ClassVar[dict[str, list[StaticBatch]]] = {}
    """Places of the microbatches of an iteration, by stage: training or validation."""
    _samples: ClassVar[dict[str, list[Plans]]] = {}
    """Sample plans by stage: of the first microbatch, for which kernels are chosen, and of those that did not fit."""
    _growths: ClassVar[dict[str, int]] = {}
    """How often the graph of a stage gave way to one with more room."""

    def __call__(self, **kwargs: Any) -> Any:
        """Runs an iteration as Megatron's wrapper does, with `--attention-backend magi` on dispatched microbatches.

        Raises:
            ValueError: the forward step is not the one of `megatron_magi.mcore.entry`.
        """
        if not is_magi():
            return super().__call__(**kwargs)
        stage, step = "validation" if kwargs["forward_only"] else "training", kwargs["forward_step_func"]
        if not getattr(step, "takes_read_batches", False):
            raise ValueError(
                "cuda_graph_impl: full_iteration needs the forward step of pretrain_scripts/pretrain_gpt.py"
            )
        model, iterator = (x[0] if isinstance(x, list) else x for x in (kwargs["model"], kwargs["data_iterator"]))
        ahead = look_ahead_of(iterator)
        batches = [step.read(iterator, model) for _ in range(kwargs["num_microbatches"])]
        places = self._places_for(stage, batches, step.group)
        reason = None
        if len(places) != len(batches):
            reason = f"it has {len(batches)} microbatches, the graph {len(places)}"
        elif large := _agreed(StaticBatch.load(places, batches), step.group):
            reason = large[1]
            if self._has_grown(stage, *large):
                places, reason = self._places_for(stage, batches, step.group), None
        static = {**kwargs, "data_iterator": [ReadBatches([place.batch for place in places])]}
        graph, can_capture = FullCudaGraphWrapper.cuda_graph[stage], all(place.has_run for place in places)
        if graph is None and can_capture and self.curr_iter(stage) >= self.cuda_graph_warmup_steps:
            graph = self._capture(stage, static)
        self.next_iter(stage)
        if reason is not None:
            logger.warning("an iteration runs without its CUDA graph: %s", reason)
            return self.forward_backward_func(**{**kwargs, "data_iterator": [ReadBatches(batches)]})
        if graph is None:
            for place in places:
                place.has_run = True
            return self.forward_backward_func(**static)
        graph.replay()
        if ahead is not None:
            step.look(ahead)
        return FullCudaGraphWrapper.result[stage]

    def _places_for(self, stage: str, batches: Sequence[LocalBatch], group: dist.ProcessGroup) -> list[StaticBatch]:
        """Places of an iteration: those of the graph, if there is one, else as many as there are microbatches."""
        places = self._places.setdefault(stage, [])
        if FullCudaGraphWrapper.cuda_graph[stage] is None:
            del places[len(batches) :]
            samples = self._samples.setdefault(stage, [StaticBatch.sample_of(batches[0])])
            places += [StaticBatch(batch, group, samples) for batch in batches[len(places) :]]
        return places

    def _has_grown(self, stage: str, large: LocalBatch | None, reason: str) -> bool:
        """Drops places, and their graph, for others with room for a microbatch too, if it is one here; not for ever."""
        if self._growths.get(stage, 0) == _MOST_GROWTHS:
            return False
        self._growths[stage] = self._growths.get(stage, 0) + 1
        if large is not None:
            self._samples[stage].append(StaticBatch.sample_of(large))
        if FullCudaGraphWrapper.cuda_graph[stage] is not None:
            logger.warning("the graph of a %s iteration is captured again, with more room: %s", stage, reason)
        self.reset_cuda_graph(stage)
        return True

    def reset_cuda_graph(self, stage: str | None = None) -> None:
        """Drops the graph, as Megatron's does, and the places of its microbatches."""
        super().reset_cuda_graph(stage)
        gone = [place for name in list(self._places) if stage in (None, name) for place in self._places.pop(name)]
        if not any(FullCudaGraphWrapper.cuda_graph.values()):
            for group in {place.group for place in gone}:
                forget_graphs(group)

    def _capture(self, stage: str, static: Mapping[str, Any]) -> torch.cuda.CUDAGraph:
        """Captures an iteration; nothing of it runs."""
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        dist.barrier()
        torch.cuda.synchronize()
        # Not Megatron's own pool: torch refuses one that all graphs have left.
        others = [known for known in FullCudaGraphWrapper.cuda_graph.values() if known is not None]
        shared = self.use_single_mempool and bool(others)
        pool, stream = others[0].pool() if shared else torch.cuda.graph_pool_handle(), get_shared_capture_stream()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            FullCudaGraphWrapper.result[stage] = self.forward_backward_func(**static)
        FullCudaGraphWrapper.cuda_graph[stage] = graph
        torch.cuda.synchronize()
        dist.barrier()
        logger.info("captured a %s iteration in a CUDA graph", stage)
        return graph


def install() -> None:
    """Megatron's trainer wraps its schedules for dispatched microbatches. Idempotent."""
    seams.put(_WRAPPER, GraphedIterations)


def _agreed(large: tuple[LocalBatch, str] | None, group: dist.ProcessGroup) -> tuple[LocalBatch | None, str] | None:
    """What does not fit, on this or on other ranks; None if all fit. ``large``: the same on all ranks of ``group``."""
    if group.size() == dist.get_world_size():
        return large
    found = start_agreement(int(large is not None), None, "captured iterations").values()
    others = [rank for rank, is_large in enumerate(found) if is_large]
    return large or ((None, f"a microbatch of ranks {others} does not fit") if others else None)


def _tensors(batch: LocalBatch) -> dict[str, torch.Tensor]:
    """All tensors of a microbatch but those of its plans."""
    parts = {"": batch, "layout.": batch.params.layout}
    return {
        prefix + f.name: x
        for prefix, part in parts.items()
        for f in fields(part)
        if isinstance(x := getattr(part, f.name), torch.Tensor) and f.name != "documents"
    }


def _copy_of(part: Any) -> Any:
    """A copy of a dataclass with copies of its tensors."""
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    return replace(part, **{name: x.clone() for name, x in values.items() if isinstance(x, torch.Tensor)})
