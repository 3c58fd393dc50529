"""Which arriving rows belong to which local row."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.comm.rows import arrival_arrays


@settings(max_examples=200)
@given(local=st.lists(st.integers(0, 60), max_size=40) | st.lists(st.integers(0, 60), max_size=40, unique=True))
def test_each_row_has_its_contributions_in_the_order_of_their_arrival(local):
    rows, starts, sources, levels = arrival_arrays(np.array(local, dtype=np.int64))
    assert {array.dtype for array in (rows, starts, sources)} == {np.dtype(np.int64)}
    counts = np.diff(starts)
    assert starts[0] == 0 and (np.diff(counts) <= 0).all(), "those with most come first"
    assert sorted(rows.tolist()) == sorted(set(local))
    for row, begin, end in zip(rows.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert sources[begin:end].tolist() == [i for i, other in enumerate(local) if other == row]
    assert levels == tuple(int((counts > k).sum()) for k in range(max(counts, default=0)))
