"""Megatron on a machine without GPUs: what its code asks of CUDA is answered by the CPU.

Megatron assumes a GPU in some hundred places. `install` gives callers in ``megatron.*``, and no
one else, a CUDA of one device that is really the CPU: streams and events that do nothing,
factories that place tensors on the CPU, one random generator. Every other caller, torch itself
included, sees the machine as it is: with these answers torch's own code (compiler, data loader, checkpointing) would
take paths that need a driver. Transformer Engine and Apex, which cannot compute without a GPU, are as if they were not
installed. Megatron itself is neither imported nor changed; what must be other in it is `mcore.without_gpu`'s matter.

The comment at each patch names the code that needs it, as file and line of megatron-core 0.19.2.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._device

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

_installed = False


def install(*, force: bool = False) -> bool:
    """Answer Megatron's CUDA calls with the CPU. To be called before megatron is first imported.

    Args:
        force: also on a machine with GPUs, which then stay unused.

    Returns:
        Whether the process now runs Megatron on the CPU. False when there are GPUs and no ``force``.

    Raises:
        RuntimeError: megatron was imported earlier; some of its modules have bound the real functions.
    """
    global _installed
    if _installed:
        return True
    if torch.cuda.is_available() and not force:
        return False
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron: imported already; on a machine without GPUs call megatron_magi.mcore.install() (or "
            "cpu_device.install()) before the first import of megatron"
        )
    # Its table of factories is filled on first use and must hold the originals, or
    # `with torch.device("meta")` would no longer know them.
    torch.utils._device._device_constructors()
    _patch_device_queries()
    _patch_streams()
    _patch_random()
    _patch_compiler()
    _patch_factories()
    _patch_tensor()
    _hide_gpu_packages()
    _installed = True
    return True


def _hide_gpu_packages() -> None:
    """Makes imports of packages fail that Megatron prefers to torch where it finds them, and that need a GPU.

    core/optimizer/__init__.py:13 and clip_grads.py:10, core/extensions/transformer_engine.py:70.
    """
    for name in ("transformer_engine", "apex"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


class CpuStream:
    """A stream of a device that finishes each operation before the next begins."""

    cuda_stream = 0
    priority = 0
    device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True


class CpuEvent:
    """A point in time of the host's clock."""

    def __init__(self) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """The event has happened."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


def _divert(owner: Any, name: str, substitute: Callable[..., Any]) -> None:
    """Calls of ``owner.name`` from megatron go to ``substitute(original, *args, **kwargs)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def diverted(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return substitute(original, *args, **kwargs)
        return original(*args, **kwargs)

    # Set on a class after its creation, `__new__` is not made a static method by itself.
    setattr(owner, name, staticmethod(diverted) if name == "__new__" else diverted)


def _answer(value: Any) -> Callable[..., Any]:
    return lambda original, *args, **kwargs: value


def _patch_device_queries() -> None:
    cuda = torch.cuda
    _divert(cuda, "is_available", _answer(True))  # training/initialize.py:66
    _divert(cuda, "device_count", _answer(1))  # training/initialize.py:270, core/parallel_state.py:1752
    _divert(cuda, "set_device", _answer(None))  # training/initialize.py:282
    _divert(cuda, "current_device", _answer(0))  # about 150 sites
    _divert(cuda, "synchronize", _answer(None))  # core/timers.py:152
    _divert(cuda, "get_device_name", _answer("cpu"))  # main: core/ssm/ops/gdp/common.py:63
    _divert(cuda, "get_device_capability", _answer((0, 0)))  # likewise
    properties = SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1)
    _divert(cuda, "get_device_properties", _answer(properties))  # training/utils/common_utils.py:504


def _patch_streams() -> None:
    cuda = torch.cuda
    stream = CpuStream()
    _divert(cuda.Stream, "__new__", lambda original, *args, **kwargs: CpuStream())  # training/models/dist_utils.py:303
    _divert(cuda.Event, "__new__", lambda original, *args, **kwargs: CpuEvent())  # core/resharding/execution.py:110
    _divert(cuda, "current_stream", _answer(stream))  # dist_utils.py:304
    _divert(cuda, "stream", lambda original, *args, **kwargs: contextlib.nullcontext())  # dist_utils.py:306


def _patch_random() -> None:
    """Megatron's CUDA generator is the CPU's: core/tensor_parallel/random.py:129, 166 swap its states."""
    cuda = torch.cuda
    # Empty while CUDA is not initialised, so no one else can have used it.
    cuda.default_generators = (torch.default_generator,)
    _divert(cuda, "_lazy_init", _answer(None))
    _divert(cuda, "_lazy_call", lambda original, callback, **kwargs: callback())
    for module in (cuda, cuda.random):
        _divert(module, "get_rng_state", lambda original, device=None: torch.get_rng_state())
        _divert(module, "set_rng_state", lambda original, state, device=None: torch.set_rng_state(state))
        _divert(module, "manual_seed", lambda original, seed: torch.default_generator.manual_seed(seed))


def _patch_compiler() -> None:
    """Small models on a CPU lose more to compilation than they can gain: core/jit.py:21."""

    def keep(original: Any, model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else (lambda function: function)

    _divert(torch, "compile", keep)


def _is_cuda(device: Any) -> bool:
    # torch takes a bare int for the index of an accelerator.
    if isinstance(device, (int, str)):
        return not isinstance(device, str) or device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = "cpu"
    kwargs.pop(
        "pin_memory", None
    )  # without a driver no memory can be pinned: core/models/common/embeddings/rope_utils.py:62
    return original(*args, **kwargs)


def _patch_factories() -> None:
    for name in _FACTORIES:  # training/initialize.py:508 and about 200 more sites
        _divert(torch, name, _on_cpu)
    for name in _NEW_METHODS:  # core/tensor_parallel/mappings.py:444
        _divert(torch.Tensor, name, _on_cpu)


def _patch_tensor() -> None:
    def to(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    def type_name(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    _divert(torch.Tensor, "to", to)  # the first move of a batch in the forward step
    _divert(torch.Tensor, "cuda", lambda original, self, *args, **kwargs: self)
    _divert(torch.nn.Conv1d, "__init__", _on_cpu)  # core/ssm/gated_delta_net/common.py:223
    _divert(torch.nn.Module, "cuda", lambda original, self, *args, **kwargs: self)  # 0.18: training/training.py:1733
    # core/optimizer/clip_grads.py:174, optimizer.py:1009 and distrib_optimizer.py:401 compare with CUDA's names.
    _divert(torch.Tensor, "type", type_name)
