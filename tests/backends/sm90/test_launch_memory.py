"""New masks take host memory only as long as the caches of passes and plans keep them."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import torch

from benchmarks._lib.memory import all_caches
from benchmarks.soak.attention import random_mask
from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from tests.backends.sm90.fake_driver import fake_driver

ROWS, MASKS, FIRST, KEPT = 512, 160, 60, 8


def test_memory_of_the_host_does_not_grow_with_masks_when_caches_are_full(monkeypatch):
    rng, traced = np.random.default_rng(0), []
    q, kv = (torch.empty(ROWS, heads, 128, dtype=torch.bfloat16) for heads in (8, 2))
    lse, options = torch.empty(ROWS, 8), AttnOptions(0.1)
    with fake_driver(monkeypatch) as queued:
        for cache in all_caches():
            monkeypatch.setattr(cache, "max_items", KEPT)
        tracemalloc.start()
        try:
            for number in range(MASKS):
                bands = random_mask(ROWS, rng).bands
                hopper.forward(ForwardInputs(q, kv, kv), bands, options, ForwardOutput(q, lse))
                inputs = BackwardInputs(q, kv, kv, q, lse, lse)
                hopper.backward(inputs, bands, options, Gradients(q, kv, kv))
                assert len(queued) > 2
                queued.clear()
                if number in (FIRST, MASKS - 1):
                    gc.collect()
                    traced.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    before, after = traced
    assert after - before < 0.5e3 * (MASKS - FIRST)  # a pass that is kept takes 10 KB or more
