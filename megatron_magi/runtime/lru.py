"""A cache that is bounded by memory: results of planning, which every layer asks for again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from weakref import ref


class LruCache[K: Hashable, V]:
    """The values used last, as many as ``max_bytes`` and ``max_items`` allow; the newest always stays.

    Safe to use from several threads: autograd runs backwards in threads of its own.

    Attributes:
        max_bytes: of all values together.
        max_items: number of values; no bound when None. May be changed; holds from the next `put`.
        num_bytes: of the values that are kept, as told to `put`.
        num_puts: how often one was put.
    """

    def __init__(self, max_bytes: int, max_items: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.max_items = max_items
        self.num_bytes = self.num_puts = 0
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list[tuple[K, V]]:
        """Keys and values, those used last at the end."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._items.items()]

    def get(self, key: K) -> V | None:
        """The value of ``key``, now the one used last; None when it is not there."""
        with self._lock:
            if key not in self._items:
                return None
            self._items.move_to_end(key)
            return self._items[key][0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keeps ``value``, in place of an older one of ``key``, and drops those used longest ago."""
        with self._lock:
            self._forget(key)
            self._items[key] = value, num_bytes
            self.num_bytes += num_bytes
            self.num_puts += 1
            while len(self._items) > 1 and self._is_full():
                self._forget(next(iter(self._items)))

    def drop(self, unwanted: Callable[[K], bool]) -> None:
        """Drops the values of all keys that are ``unwanted``."""
        with self._lock:
            for key in [key for key in self._items if unwanted(key)]:
                self._forget(key)

    def _is_full(self) -> bool:
        too_many = self.max_items is not None and len(self._items) > self.max_items
        return too_many or self.num_bytes > self.max_bytes

    def _forget(self, key: K) -> None:
        if key in self._items:
            self.num_bytes -= self._items.pop(key)[1]


class Use:
    """Keeps the place of a value in a cache for those who use the value without asking for it by its key.

    The key is looked up once between two values that are put, which takes a call no time worth counting. It does not
    keep the value, nor the cache, of whose values it may be a part.
    """

    def __init__(self, cache: LruCache, key: Hashable) -> None:
        self._cache, self._key, self._seen = ref(cache), key, -1

    def note(self) -> None:
        """The value is the one used last."""
        cache = self._cache()
        if cache is not None and self._seen != cache.num_puts:
            self._seen = cache.num_puts
            cache.get(self._key)
