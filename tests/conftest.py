"""Shared fixtures, and skips that state their reason."""

from __future__ import annotations

import importlib.util
import os
import types

import pytest
import torch

from megatron_magi import envs
from megatron_magi.backends.registry import BACKENDS
from megatron_magi.testing import shared_gpus
from megatron_magi.testing.spawn import RankError, run_ranks
from tests import forced, hidden_gpus
from tests.gpu_memory import free_memory

if importlib.util.find_spec("hypothesis"):  # files without such tests run without it
    from hypothesis import HealthCheck, settings

    # Examples may take long where other processes compute too; pytest-timeout ends tests that hang.
    settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any_machine")


MOST_WORKERS = 4
"""With ``-n auto``: each has, beside itself, a process that ranks are forked from, about 2 GB together."""

if num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # this is one of them
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_workers))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One on GPUs, which tests of several ranks and of memory take for themselves."""
    return 1 if torch.cuda.is_available() else min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def pytest_report_header() -> list[str]:
    each = envs.ranks_per_gpu()
    lines = [f"one backend for tests of ops and attention: {forced.NAME}"] if forced.NAME else []
    return [*lines, f"up to {each} ranks share a GPU"] if each > 1 else lines


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    try:
        return (yield)
    except (ValueError, RankError, AssertionError) as error:
        if (reason := forced.refusal(error)) is not None:
            pytest.skip(reason)
        raise


def _why_not(item: pytest.Item) -> str | None:
    """Why a test cannot run on this machine, None when it can."""
    if (reason := forced.why_not(item)) is not None:
        return reason
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "needs a GPU"
    if item.get_closest_marker("sm90"):
        if not torch.cuda.is_available():
            return "needs a GPU of compute capability 9.0"
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) != (9, 0):
            return f"needs a GPU of compute capability 9.0, this one has {major}.{minor}"
    if item.get_closest_marker("cudnn"):
        reason = BACKENDS["cudnn"].why_not(torch.device("cuda", 0), torch.bfloat16, (128, 128))
        if reason is not None:
            return reason
    marker = item.get_closest_marker("ranks")
    if marker and item.get_closest_marker("gpu"):
        return shared_gpus.why_not(marker.args[0])
    return None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(map(item.get_closest_marker, ("sm90", "cudnn"))):
            item.add_marker(pytest.mark.gpu)
        reason = _why_not(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Around fixtures too, those of modules among them."""
    if not torch.cuda.is_available() or hidden_gpus.asks_for_gpus(item):
        return (yield)
    with hidden_gpus.no_gpus():
        return (yield)


@pytest.hookimpl(trylast=True)  # after fixtures, which may stand in for functions of torch.cuda
def pytest_runtest_teardown() -> None:
    free_memory()


@pytest.fixture
def tensors_on_the_device():
    """See `tests.forced.on_device_of_backend`."""
    with torch.device(forced.DEVICE):
        yield


@pytest.fixture
def tensors_on_the_cpu():
    """See `tests.forced.on_cpu`."""
    with torch.device("cpu"):
        yield


@pytest.fixture
def ranks():
    """``ranks(num_ranks, fn, *args)``: results of ``fn(rank, num_ranks, *args)`` in rank order, on gloo."""

    def call(num_ranks, fn, *args, **options):
        return run_ranks(fn, num_ranks, *args, **options)

    return call


@pytest.fixture
def fresh_compiler(monkeypatch):
    """torch.compile without graphs and counts from earlier in the process, and with torch's own functions.

    Tests of Megatron on a CPU wrap functions of torch, which the compiler knows by identity.
    """
    for owner in (torch, torch.Tensor):
        for name, function in list(vars(owner).items()):
            if isinstance(function, types.FunctionType) and function.__code__.co_name == "diverted":
                monkeypatch.setattr(owner, name, function.__wrapped__)
    torch._dynamo.reset()
    torch._dynamo.trace_rules.clear_lru_cache()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.trace_rules.clear_lru_cache()
