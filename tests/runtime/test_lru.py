"""A cache keeps what was used last, within its bounds."""

import random
import threading
from weakref import ref

from megatron_magi.runtime.lru import LruCache, Use


def test_the_value_used_longest_ago_goes_first():
    cache = LruCache(max_bytes=10)
    for name in "ab":
        cache.put(name, name.upper(), 5)
    assert cache.get("a") == "A"
    cache.put("c", "C", 5)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("A", None, "C")
    assert cache.get("a") == "A" and cache.items() == [("c", "C"), ("a", "A")]


def test_both_bounds_hold_after_any_sequence_and_the_newest_stays():
    rng = random.Random(0)
    cache, sizes = LruCache(max_bytes=100, max_items=6), {}
    for _ in range(2000):
        key = rng.randrange(12)
        if rng.random() < 0.1:
            cache.drop(lambda k, key=key: k == key)
            assert cache.get(key) is None
        elif cache.get(key) is None or rng.random() < 0.3:
            sizes[key] = rng.randrange(120)
            cache.put(key, key, sizes[key])
            assert cache.get(key) == key
        kept = [k for k in sizes if cache.get(k) is not None]
        assert len(cache) == len(kept) <= 6
        assert cache.num_bytes == sum(sizes[k] for k in kept)
        assert cache.num_bytes <= 100 or len(kept) == 1


def test_threads_may_share_a_cache():
    cache = LruCache(max_bytes=50)

    def work(seed):
        rng = random.Random(seed)
        for _ in range(2000):
            key = rng.randrange(20)
            assert cache.get(key) in (None, key)
            cache.put(key, key, 7)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.num_bytes == 7 * len(cache) <= 50


def test_a_value_in_use_stays_though_nobody_asks_for_it_by_its_key():
    cache = LruCache(max_bytes=0, max_items=3)
    for name in "abc":
        cache.put(name, name, 0)
    use = Use(cache, "a")
    for number in range(10):
        use.note()
        use.note()
        cache.put(number, number, 0)
    assert [key for key, _ in cache.items()] == [8, "a", 9]
    for number in range(3):
        cache.put(number, number, 0)
    use.note()  # of a value that is gone
    assert cache.get("a") is None and len(cache) == 3


def test_a_value_that_notes_its_use_does_not_keep_the_cache():
    class Value:
        use: Use

    cache, value = LruCache(max_bytes=0), Value()
    cache.put("a", value, 0)
    value.use, known, kept = Use(cache, "a"), ref(value), ref(cache)
    del cache, value
    assert known() is None and kept() is None
