"""Several trainings of Megatron's trainer, one after another in the processes of one launch.

A launch of its own for every training costs half a minute of imports and of setting up NCCL. Here the
process group stays; Megatron's global state is destroyed after each training, as its own in-process restart does.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException


@dataclass
class Training:
    """What a training was seen to do; times and memory are of this rank.

    Attributes:
        losses: "lm loss" of each iteration that was logged, from 1; on the last rank.
        grad_norms: gradient norm of each of these.
        step_ms: milliseconds of each step, the device's work included, in order.
        seqlen_squares: sum of squared document lengths of each iteration, all ranks together; None without documents.
        peak_gib: largest memory that tensors had.
        reserved_gib: largest memory that torch's allocator had taken from the device.
        alloc_retries: times that the allocator ran out and gave back what it had kept.
        setup_s: seconds before the first step.
        device_gib: memory of the device in use at the end, by torch and by what it does not count: NCCL, memory that
            ranks read of each other, contexts.
    """

    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)
    seqlen_squares: list[float | None] = field(default_factory=list)
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    alloc_retries: int = 0
    setup_s: float = 0.0
    device_gib: float = 0.0


class TrainingSession:
    """Runs trainings in this process, one of the ranks of a launch.

    Args:
        keeps_groups: process groups of a training serve the next if that asks for the same parallelism and attention,
            which saves setting up NCCL.
    """

    def __init__(self, *, keeps_groups: bool = False) -> None:
        self._keeps_groups = keeps_groups
        self._parallelism: list[list[str]] | None = None
        self._current: Training | None = None
        self._around_step: Callable[[int], Any] | None = None
        self._begin_s = 0.0
        self._is_installed = False

    def run(
        self,
        argv: Sequence[str],
        *,
        model: str = "gpt",
        pre_wrap_hooks: Sequence[Callable] = (),
        around_step: Callable[[int], Any] | None = None,
    ) -> Training:
        """Trains as Megatron's command line ``argv`` says.

        Args:
            argv: without the program's name.
            model: as `megatron_magi.mcore.entry.main` takes it, like the next.
            pre_wrap_hooks: called with the model before it is wrapped.
            around_step: from a step's number (from 1), a context to run it in.

        Raises:
            Exception: whatever ended the training; RuntimeError where a checkpoint does not fit the model.
        """
        from megatron_magi.mcore.entry import main

        parallelism = _parallelism(argv) if self._keeps_groups else None
        if self._parallelism not in (None, parallelism):
            _forget_groups()
        self._parallelism = parallelism
        _release_memory()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()
        self._current = training = Training()
        self._around_step = around_step
        self._begin_s = time.perf_counter()
        self._install()
        environment, command = dict(os.environ), sys.argv
        try:
            main(argv, model=model, pre_wrap_hooks=pre_wrap_hooks)
        except SystemExit as end:
            # How Megatron ends a training at --exit-interval.
            if end.code:
                raise
        except CheckpointException as error:
            # It is no Exception, for which callers go on with the next training.
            raise RuntimeError(str(error)) from error
        finally:
            # Megatron says by variables which attention Transformer Engine may take.
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = command
            self._current = None
            if torch.cuda.is_available():
                stats = torch.cuda.memory_stats()
                training.peak_gib = stats["allocated_bytes.all.peak"] / 2**30
                training.reserved_gib = stats["reserved_bytes.all.peak"] / 2**30
                training.alloc_retries = stats["num_alloc_retries"]
                free, total = torch.cuda.mem_get_info()
                training.device_gib = (total - free) / 2**30
            _forget_megatron(self._keeps_groups)
        return training

    def _install(self) -> None:
        """Watches Megatron's trainer; once, as what is imported stays."""
        if self._is_installed:
            return
        self._is_installed = True
        from megatron_magi import cpu_device

        cpu_device.install()
        from megatron.training import training

        training.train_step = self._timed(training.train_step)
        training.training_log = self._noted(training.training_log)
        training.consume_seqlen_stats_in_iteration = self._counted(training.consume_seqlen_stats_in_iteration)

    def _timed(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            current = self._current
            if current is None:
                return stock(*args, **kwargs)
            _synchronize()
            begin = time.perf_counter()
            if not current.step_ms:
                current.setup_s = begin - self._begin_s
            if self._around_step is None:
                result = stock(*args, **kwargs)
            else:
                with self._around_step(len(current.step_ms) + 1):
                    result = stock(*args, **kwargs)
            _synchronize()
            current.step_ms.append((time.perf_counter() - begin) * 1e3)
            return result

        return train_step

    def _noted(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def training_log(
            losses: dict, total: dict, rate: Any, iteration: int, scale: Any, report: Any, skipped: Any, norm: Any,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if self._current is not None:
                if "lm loss" in losses:
                    self._current.losses[iteration] = float(losses["lm loss"])
                if norm is not None:
                    self._current.grad_norms[iteration] = float(norm)
            return stock(losses, total, rate, iteration, scale, report, skipped, norm, *args, **kwargs)

        return training_log

    def _counted(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def consume() -> tuple[float | None, float | None]:
            found = stock()
            if self._current is not None:
                self._current.seqlen_squares.append(found[1])
            return found

        return consume


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _parallelism(argv: Sequence[str]) -> list[list[str]]:
    """The arguments that decide over process groups and what is kept with them, with their values."""
    found = []
    for place, argument in enumerate(argv):
        if argument.startswith("--") and ("parallel" in argument or argument == "--attention-backend"):
            values = itertools.takewhile(lambda value: not value.startswith("--"), argv[place + 1 :])
            found.append([argument, *values])
    return sorted(found)


def _forget_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # Megatron leaves its groups, and each keeps a GiB of NCCL's buffers.
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def _forget_megatron(keeps_groups: bool) -> None:
    """What Megatron's own in-process restart forgets, and what belongs to a model that is gone."""
    from megatron.training import training

    # Attention of Megatron's own takes memory that is made with the groups.
    kept = ("destroy_model_parallel", *(["destroy_global_memory_buffer"] if keeps_groups else []))
    stock = {name: getattr(training, name) for name in kept}
    for name in kept:
        setattr(training, name, lambda: None)
    try:
        training.destroy_global_state()
    finally:
        for name, function in stock.items():
            setattr(training, name, function)
    _forget_graphs()
    _forget_generators()
    _forget_losses_of_experts()
    if not keeps_groups:
        _forget_groups()
    attention = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    if attention is not None:
        # It reads those variables once for each kind of input.
        attention._attention_backends["attention_params"] = None
    _release_memory()


def _forget_generators() -> None:
    """Megatron keeps the first kind of random generators that a process asked for, whatever `--te-rng-tracker` says."""
    from megatron.core.tensor_parallel import random

    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = None, False


def _forget_losses_of_experts() -> None:
    """Megatron keeps a place for each layer of the first model."""
    logged = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logged is not None:
        logged.destroy_moe_metrics_tracker()


def _forget_graphs() -> None:
    """Captured iterations, of a model that is gone, and captures that failed, in which gradients are left out."""
    for name, end in (("megatron.core.transformer.cuda_graphs", "_set_capture_end"),
                      ("transformer_engine.pytorch.graph", "set_capture_end")):  # fmt: skip
        if name in sys.modules:
            getattr(sys.modules[name], end)()
    graphs = sys.modules.get("megatron_magi.mcore.cuda_graph")
    if graphs is not None:
        wrapper = graphs.GraphedIterations
        wrapper.reset_cuda_graph(object.__new__(wrapper))
        wrapper._samples.clear()
        wrapper._growths.clear()


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
