"""How losses with Transformer Engine are judged."""

from __future__ import annotations

from benchmarks.training import loss_parity_te as te


def judge(losses: dict[str, float], sinks: dict[str, float] | None = None, model: str = "dense") -> dict[str, list]:
    results = {
        f"{model}/{name}": te.Result({1: 5.0, 2: loss}, {"a": [1.0, sinks[name]]} if sinks else {})
        for name, loss in losses.items()
    }
    jobs = [job for job in te.JOBS if f"{job.model}/{job.name}" in results]
    return {row[1]: row for row in te.judge(jobs, results)}


def test_run_is_inside_if_it_is_not_twice_as_far_as_stock_is_from_stock() -> None:
    rows = judge({"stock": 4.0, "stock_unfused": 4.004, "magi_cp2": 4.0079, "magi_pp2": 4.0081})
    assert [rows[name][-1] for name in ("magi_cp2", "magi_pp2")] == ["inside", "FAILED"]


def test_gradients_of_sinks_are_judged_and_tes_a2a_does_not_widen_their_band() -> None:
    losses = dict.fromkeys(("stock", "stock_unfused", "stock_cp2_a2a", "magi_cp2", "magi_tp2_sp"), 4.0)
    sinks = {"stock": 0.5, "stock_unfused": 0.51, "stock_cp2_a2a": 1.0, "magi_cp2": 0.519, "magi_tp2_sp": 0.6}
    rows = judge(losses, sinks, "sink")
    assert [rows[name][-1] for name in ("magi_cp2", "magi_tp2_sp")] == ["inside", "FAILED"]


def test_run_that_stopped_early_is_no_success() -> None:
    results = {"dense/stock": te.Result({1: 5.0, 2: 4.0}), "dense/magi_cp2": te.Result({1: 5.0})}
    jobs = [job for job in te.JOBS if f"{job.model}/{job.name}" in results]
    assert te.judge(jobs, results)[-1][-1] == "FAILED"
