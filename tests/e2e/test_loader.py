"""Workers of Megatron's data loader plan ahead: the same training, and the same errors in the step they belong to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import LaunchError, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import Runs

WORKERS = ("--num-workers", "2")
MODEL = (
    "--window-size", "20,0", "--window-attn-skip-freq", "2", "--mtp-num-layers", "1", "--recompute-granularity",
    "full", "--recompute-method", "uniform", "--recompute-num-layers", "1", "--eval-iters", "1", "--eval-interval", "2",
    "--split", "80,20,0",
)  # fmt: skip


def _train(
    runs: Runs, *args: str, iterations: int = 4, before: str = "count_planning", grace_s: float = 0.5
) -> RunResult:
    line = tiny_gpt_args(runs.corpus, *args, train_iters=iterations, context_parallel_size=2)
    return launch(line, 2, before=before and f"tests.e2e.hooks:{before}", grace_s=grace_s)


def _planned(run: RunResult, rank: int) -> list[dict[str, int]]:
    return [json.loads(line) for line in (run.workdir / f"planning{rank}.jsonl").read_text().splitlines()]


def test_batches_of_workers_train_bit_by_bit_as_those_planned_in_the_step_which_then_neither_plans_nor_hashes(
    runs: Runs,
) -> None:
    due, ahead = _train(runs, *MODEL), _train(runs, *MODEL, *WORKERS)
    assert ahead.records == due.records
    assert len(due.records) == 4 and due.records[0]["num_plans"] == 4
    for rank in range(2):
        assert len(_planned(due, rank)) == len(_planned(ahead, rank)) == 4
        assert all(counts["split_stages"] == 8 and counts["crc32"] == 12 for counts in _planned(due, rank))
        first, *others = _planned(ahead, rank)
        first.pop("blake2b", None)  # names of the calls that ranks compare when they come for the first time
        assert not any(sum(counts.values()) for counts in (first, *others))


def test_boundaries_that_a_worker_cannot_plan_end_all_ranks_in_their_step(runs: Runs) -> None:
    with pytest.raises(LaunchError) as error:
        _train(runs, *WORKERS, before="bad_boundaries", grace_s=300)
    assert sorted(error.value.failed) == [0, 1]
    for output in error.value.outputs:
        assert "cu_seqlens: the bounds of sequence 0 must rise" in output
        assert "(on 1 of 2 ranks, first on global rank 1)" in output
        assert "In microbatch 2 of iteration 3." in output
    assert "In a worker of the data loader:" in error.value.outputs[1]


def test_a_worker_that_dies_is_an_error(runs: Runs) -> None:
    with pytest.raises(LaunchError, match=r"DataLoader worker \(pid.*\) (is killed|exited unexpectedly)") as error:
        _train(runs, *WORKERS, before="worker_dies")
    assert error.value.failed


def test_an_error_that_repeats_is_saved_with_its_microbatches_to_be_run_again_elsewhere(
    runs: Runs, tmp_path: Path
) -> None:
    inject = ("--error-injection-rate", "5", "--error-injection-type", "correct_result")
    save = ("--save", str(tmp_path), "--save-interval", "100")
    with pytest.raises(LaunchError, match=r"statuses \[16, 16\]"):  # Megatron's code of such an end
        _train(runs, *WORKERS, *inject, *save, iterations=8, before="")
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) > 0
