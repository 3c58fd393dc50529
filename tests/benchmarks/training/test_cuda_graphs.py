import csv

import pytest

from benchmarks.training import cuda_graphs


def test_ways_train_side_by_side_and_are_compared_without_a_gpu_too(tmp_path, monkeypatch, capsys):
    options = ["--layers", "1", "--tokens", "64", "--iters", "2", "--ways", "eager", "one"]
    monkeypatch.setattr("sys.argv", ["cuda_graphs.py", "--out", str(tmp_path), *options])
    cuda_graphs.main()
    lines = (tmp_path / "graphs_training_1.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["way"] for row in rows] == ["eager", "one"]
    losses = [float(row[name]) for row in rows for name in ("first_loss", "last_loss", "eval_losses")]
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-3)
    assert len(set(losses)) >= 3  # of training, of its end, of an evaluation
    assert "way=one  ranks=1" in capsys.readouterr().out
