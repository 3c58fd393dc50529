"""Masks of rows and keys that fall into sequences, and a backend that always splits them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from megatron_magi.backends.cudnn import plans, sequences
from megatron_magi.mask import AttnMask
from megatron_magi.runtime.lru import LruCache
from tests.ops.naive import masks


@contextmanager
def always_split() -> Iterator[None]:
    """Each sequence of a mask is one for the package, whatever it costs."""
    with (
        mock.patch.object(sequences, "_cost", lambda _ends, parts: -len(parts[0])),
        mock.patch.object(sequences, "_SPARE", 0),
        mock.patch.object(plans, "_plans", LruCache(1 << 30)),
    ):
        yield


@st.composite
def documents(draw, longest: int = 24, most: int = 6) -> AttnMask:
    """Masks of a few random masks behind each other, with rows and keys in no pair between them."""
    table, rows, keys = [], 0, 0
    for mask in draw(st.lists(masks(longest, most_slices=4), min_size=1, max_size=most)):
        table.append(mask.table + np.array([rows, rows, keys, keys, 0]))
        rows += mask.total_seqlen_q + draw(st.integers(0, 3))
        keys += mask.total_seqlen_k + draw(st.integers(0, 3))
    return AttnMask(np.concatenate(table), rows, keys)
