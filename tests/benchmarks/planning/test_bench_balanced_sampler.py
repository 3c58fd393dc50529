"""The benchmark of the sampler on one case: it packs what it says, and more evenly than the others."""

import numpy as np

from benchmarks.planning import bench_balanced_sampler as bench


def test_all_packers_fill_no_microbatch_over_and_pack_no_document_twice():
    case = bench.Case("log_normal", 4096, 3, 1, 4)
    lengths = np.bincount(case.documents())
    for packer in (bench.balanced_work, bench.balanced_pairs, bench.first_fit, bench.dp_balanced):
        steps = list(packer(case, 2))
        assert all(len(step) == 4 and len({len(rank) for rank in step}) == 1 for step in steps)
        packed = [m for step in steps for rank in step for m in rank]
        assert max(m.sum() for m in packed) <= 4096
        counts = np.bincount(np.concatenate(packed), minlength=len(lengths))
        assert (counts <= lengths).all() and counts.sum() > 20


def test_the_table_has_a_row_a_packer(tmp_path):
    path = tmp_path / "figures.csv"
    rows = bench.main(f"--steps 1 --cases 1 --csv {path}".split())
    assert [row[1] for row in rows] == ["balanced_work", "balanced_pairs", "first_fit", "dp_balanced"]
    pairs = dict(zip([row[1] for row in rows], [float(row[7]) for row in rows], strict=True))
    assert pairs["balanced_pairs"] < 2 < pairs["first_fit"]
    assert path.read_text().splitlines()[5] == ",".join(bench.HEADER)
