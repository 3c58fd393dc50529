"""Plans behind keys: what is kept, and what is made when."""

import torch

from megatron_magi import api
from megatron_magi.api.runtime import RuntimeCache
from megatron_magi.config import MagiConfig, OverlapConfig
from megatron_magi.mask import builders


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
