"""Changes of constants, without a GPU."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.kernels import bench_backward_order as bench
from megatron_magi.backends.sm90 import tuning
from megatron_magi.runtime.lru import LruCache


def test_constants_are_changed_and_changed_back():
    before = tuning.LONG_BLOCKS, tuning.SECTION_TILES
    name, change = bench.parse_change("LONG_BLOCKS=64,SECTION_TILES=28")
    with bench.constants(change):
        assert (tuning.LONG_BLOCKS, tuning.SECTION_TILES) == (64, 28)
    assert name == "LONG_BLOCKS=64,SECTION_TILES=28"
    assert before == (tuning.LONG_BLOCKS, tuning.SECTION_TILES)


@pytest.mark.parametrize("text", ["NO_SUCH_CONSTANT=1", "SEPARATE_DQ_SCATTERED=1"])
def test_what_is_no_number_among_the_constants_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        bench.parse_change(text)


def test_plans_are_forgotten():
    cache = LruCache(100)
    cache.put("a", 1, 1)
    bench.forget_plans()
    assert len(cache) == 0
