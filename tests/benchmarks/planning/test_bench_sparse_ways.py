"""Counts of the keys that lists of other ranks name."""

from __future__ import annotations

import pytest

from benchmarks._lib.sparse_ways import PATTERNS, Case
from benchmarks.planning.bench_sparse_ways import HEADER, largest_share, positions_of, row
from megatron_magi import api


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_have_what_the_layout_gives_them(num_ranks):
    placed = [positions_of(4096, rank, num_ranks) for rank in range(num_ranks)]
    key = api.magi_attn_varlen_key([0, 4096], [0, 4096], layout="zigzag")
    assert sorted(int(x) for of_rank in placed for x in of_rank) == list(range(4096))
    if num_ranks == 1:
        assert placed[0].equal(api.get_position_ids(key).cpu())
    else:
        pieces = 2 * num_ranks
        for rank, of_rank in enumerate(placed):
            assert of_rank.view(2, -1)[:, 0].tolist() == [rank * 4096 // pieces, (pieces - 1 - rank) * 4096 // pieces]


def test_shares_by_hand():
    """A query names its own block of 32, two before and one behind: rank 1, with the middle half, 3 of 16 others."""
    assert largest_share(Case("near", 4096, 12.5), 2, 8)[0] == 3 / 16
    assert largest_share(Case("keys", 4096, 100), 2, 1)[0] == 1
    share, _ = largest_share(Case("keys", 4096, 10), 2, 1)
    assert 0.1 <= share < 0.15


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_row_tells_bytes_of_shares(pattern):
    found = dict(zip(HEADER, row(Case(pattern, 8192, 5), 4), strict=True))
    heads = 1 if pattern == "keys" else 8
    assert float(found["all_mb"]) == pytest.approx(3 * 2048 * heads * 512 / 1e6, abs=0.01)
    assert float(found["selected_mb"]) == pytest.approx(float(found["share"]) * float(found["all_mb"]), abs=0.02)
    assert found["faster"] == ("selected" if float(found["selected_us"]) < float(found["all_us"]) else "all")
