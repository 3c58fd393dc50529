"""Trainings that follow each other in one launch."""

from __future__ import annotations

from benchmarks._lib import trainer


def test_groups_serve_runs_of_the_same_parallelism_and_attention_alone() -> None:
    asked = [
        "--seed 1 --context-parallel-size 2", "--context-parallel-size 2 --lr 2",
        "--context-parallel-size 2 --attention-backend magi",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 4 1",
    ]  # fmt: skip
    first, same, *others = [trainer._parallelism(line.split()) for line in asked]
    assert first == same
    assert all(other not in (first, *others[:n]) for n, other in enumerate(others))
