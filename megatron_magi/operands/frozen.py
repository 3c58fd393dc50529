"""Immutable arrays, and cached facts about them for as long as they live."""

from __future__ import annotations

import weakref

import numpy as np


class FrozenMemo[V]:
    """One value for an array, by its identity, if it owns its memory and cannot be written to."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, V]] = {}

    def get(self, array: np.ndarray) -> V | None:
        """The value of the array, or None."""
        known = self._known.get(id(array))
        return known[1] if known is not None and known[0]() is array and not array.flags.writeable else None

    def put(self, array: np.ndarray, value: V) -> None:
        """Stores the value, unless the array is mutable."""
        if array.flags.writeable or array.base is not None:
            return
        key = id(array)
        self._known[key] = weakref.ref(array, lambda _: self._known.pop(key, None)), value


def frozen(array: np.ndarray) -> np.ndarray:
    """``array`` if nobody can change it, else a copy that nobody can: for passes that are still to come."""
    if not array.flags.writeable and array.base is None:
        return array
    copy = array.copy()
    copy.setflags(write=False)
    return copy
