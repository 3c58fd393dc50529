"""Threads that share plans, or what calls of all masks share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import megatron_magi.attention.distributed as module
from megatron_magi.api.runtime import KeyRuntime
from megatron_magi.attention import distributed_attention
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan
from tests import forced

THREADS = 4


class Yields(dict):
    """Lets other threads run where they may."""

    def __iter__(self):
        for key in super().__iter__():
            time.sleep(0)
            yield key

    def pop(self, *args):
        time.sleep(0)
        return super().pop(*args)


def test_threads_may_keep_calls_of_one_plan(monkeypatch):
    monkeypatch.setattr(module, "_MOST_CALLS", 2)
    known = Yields()

    def keep(thread: int) -> None:
        for i in range(300):
            module._keep(known, (thread, i % 3), i)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(keep, range(THREADS)):  # raises what a thread has raised
            pass
    assert len(known) == 2


@pytest.mark.skipif(forced.is_interpreted(), reason="Triton's interpreter serves one thread at a time")
@forced.on_device_of_backend
def test_threads_that_share_plan_and_templates_get_what_each_asks_for(monkeypatch):
    monkeypatch.setattr(module, "_MOST_CALLS", 2)
    plans = [make_plan(builders.varlen(doc_lengths=[3, 5 + i])).for_rank(0) for i in range(2)]
    templates = Yields()
    for plan in plans:
        plan.runtime.templates = templates
    inputs = [torch.randn(plan.num_rows, 2, 8) for plan in plans]

    def attend(softcap: float) -> list[torch.Tensor]:
        return [
            distributed_attention(x, x, x, plan, None, softcap=softcap)[0]
            for x, plan in zip(inputs, plans, strict=True)
        ]

    softcaps = [0.5 + i for i in range(THREADS)]
    expected = [attend(softcap) for softcap in softcaps]
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(lambda _: [attend(softcap) for softcap in softcaps], range(THREADS)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(templates) == 2


def test_threads_may_wait_for_the_agreement_on_one_key():
    plan = make_plan(builders.varlen(doc_lengths=[3, 5]))
    waited = []

    class Slow:
        def wait(self):
            waited.append(self)
            time.sleep(0.02)

    runtime = KeyRuntime(plan, None)
    runtime._pending += [Slow(), Slow()]
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(lambda _: runtime.agreed(), range(THREADS))) == [runtime] * THREADS
    assert len(waited) == 2 and not runtime._pending
