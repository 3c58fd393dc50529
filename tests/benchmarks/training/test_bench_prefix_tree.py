"""The benchmark of prefix trees at a tiny size: it compares its losses itself."""

import torch

from benchmarks.training import bench_prefix_tree as bench


def test_trees_have_fewer_tokens_and_the_same_loss(tmp_path):
    num_threads = torch.get_num_threads()
    path = tmp_path / "figures.csv"
    try:
        rows = bench.main(
            f"--prompts 2 --rollouts 4 --answer 8 --layers 1 --hidden 16 --head-dim 8 --steps 1 --csv {path}".split()
        )
    finally:
        torch.set_num_threads(num_threads)
    assert [row[0] for row in rows] == [0.25, 1.0, 4.0]
    assert all(tree < repeated for _, repeated, tree, *_ in rows)
    assert path.read_text().splitlines()[-4] == ",".join(bench.HEADER)
