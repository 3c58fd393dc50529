"""Plans behind keys: what is kept, and what is made when."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_magi import api
from megatron_magi.api.runtime import RuntimeCache
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.config import AttendConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda import driver, launch_list
from megatron_magi.mask import builders
from megatron_magi.runtime import upload
from megatron_magi.runtime.lru import LruCache
from tests.backends.sm90.launch_records import recorded


def keys(num_keys, total=4096):
    config = MagiConfig(overlap=OverlapConfig(degree=0))
    return [
        api.magi_attn_varlen_key([0, i, total], [0, i, total], causal=True, dist_attn_config=config)
        for i in range(1, num_keys + 1)
    ]


def test_a_mask_of_builders_makes_a_key_and_a_second_one_over_its_dispatch():
    mask, window = builders.block_causal(60, block_size=8), builders.sliding_window(60, left=4, right=0)
    key = api.magi_attn_flex_key(*mask.to_ranges())
    assert key.mask == mask
    assert api.make_flex_key_for_new_mask_after_dispatch(*window.to_ranges()[:3], key_for_dispatch=key).mask == window
    api.clear_cache()


def test_runtimes_are_bounded_by_bytes_and_the_newest_is_kept():
    cache, made = RuntimeCache(max_bytes=1 << 20), keys(20)
    for key in made:
        assert cache.register(key, cache.planned(key), max_size=1000) is key
        assert cache.num_bytes <= 1 << 20
    assert 1 < len(cache) < 20
    assert cache.get(made[-1]) is cache.planned(made[-1]) and cache.planned(made[0]) is not cache.planned(made[0])
    api.clear_cache()


def test_the_bytes_of_a_runtime_cover_its_index_tensors():
    cache = RuntimeCache()
    (key,) = keys(1)
    runtime = cache.get(key)
    device = torch.device("cpu")
    args, rolled = runtime.shard.undispatch_args(device), runtime.shard.roll_args(1, device)
    tensors = [runtime.shard.rows(device), args.gathered_index, args.local_index, rolled.local_from, rolled.local_to]
    assert sum(t.numel() * t.element_size() for t in tensors) <= runtime.num_bytes == cache.num_bytes
    cache.clear()
    assert cache.num_bytes == 0 and len(cache) == 0
    api.clear_cache()


def test_a_new_mask_copies_the_launches_of_calls_with_another(monkeypatch):
    """By keys alone: whoever makes one in each step binds launches once; and they are those of the mask itself."""
    config, built = MagiConfig(attend=AttendConfig(impl="ffa")), []
    monkeypatch.setattr(upload, "_MOST_TOGETHER", upload._LEAST_TOGETHER)  # blocks of one size
    monkeypatch.setattr(upload, "_rooms", {})

    def key_of(lengths):
        bounds = np.cumsum([0, *lengths])
        return api.magi_attn_varlen_key(bounds, bounds, 8, 2, 128, causal=True, dist_attn_config=replace(config))

    with recorded(monkeypatch) as (records, memory), pytest.MonkeyPatch.context() as inside:
        make, note, waiting = launch_list.LaunchList.__init__, driver.Kernel.launch, set()
        inside.setattr(driver.Kernel, "launch", lambda *a: (waiting.add(upload._gathering.block), note(*a)))
        inside.setattr(launch_list.LaunchList, "__init__", lambda *a: (built.append(a), make(*a))[1])

        def launches_of(lengths):
            inside.setattr(hopper_plan, "_plans", LruCache(1 << 30))  # tables are made again
            q, k, v = (torch.zeros(512, heads, 128, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2))
            memory.name({"q": q, "k": k, "v": v})
            records.clear()
            out, _ = api.calc_attn(q, k, v, key_of(lengths))
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
            return list(records)

        api.clear_cache()
        alone, num_built = launches_of([100, 412]), len(built)
        api.clear_cache()
        other, copied = launches_of([70, 200, 242]), launches_of([100, 412])
    assert alone and copied == alone != other
    assert waiting == {None}, "nothing is launched before its tables are there"
    assert len(built) == 2 * num_built > 0, "once after each time that all was forgotten"
    assert key_of([100, 412]).config is key_of([99, 413]).config
    kept = api.functions._RUNTIMES._templates
    assert len(kept) == 1
    api.clear_cache()
    assert not kept
