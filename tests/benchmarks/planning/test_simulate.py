"""The simulation: what it counts and predicts, and how it reads measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks._lib.provenance import write_csv
from benchmarks._lib.results import find_results
from benchmarks._lib.subgroup_steps import predict_subgroups, zigzag_documents
from benchmarks.planning import simulate
from megatron_magi.backends.sm90.cost import H100
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import make_plan
from megatron_magi.plan.plan import dispatch_from_chunks

NODE = replace(H100, ranks_per_node=2)
MASK = builders.varlen(doc_lengths=(300, 20, 400, 304), causal=True)


def dealt(cp_size: int = 4):
    """Chunks of 32 tokens, dealt to ranks at random."""
    rank = np.random.default_rng(0).permutation(np.repeat(np.arange(cp_size), 32 // cp_size))
    return dispatch_from_chunks(1024, np.arange(33) * 32, rank, cp_size)


def needed_by(ranks: list[int], dispatch) -> np.ndarray:
    """Tokens that rows of these ranks see and none of them holds."""
    own = np.concatenate([dispatch.global_index(rank) for rank in ranks])
    return np.setdiff1d(np.flatnonzero(dense_mask(MASK)[own].any(axis=0)), own)


def test_rows_from_near_and_far_are_those_that_ranks_see_and_do_not_hold():
    dispatch = dealt()
    step = simulate.simulate(MASK, dispatch, NODE, simulate.OVERLAP)
    nodes = [np.concatenate([dispatch.global_index(r) for r in pair]) for pair in ((0, 1), (2, 3))]
    for rank in range(4):
        seen = needed_by([rank], dispatch)
        near = np.isin(seen, nodes[rank // 2]).sum()
        assert step.counts.received[:, rank].tolist() == [near, len(seen) - near]
    assert step.counts.received.sum(axis=0).tolist() == list(make_plan(MASK, None, 4, dispatch).stats().received_rows)


def test_rows_that_cross_once_are_those_that_a_node_sees_and_does_not_hold():
    dispatch = dealt()
    found = simulate.rows_between_nodes(MASK, dispatch, ranks_per_node=2)
    assert found * 4 == len(needed_by([0, 1], dispatch)) + len(needed_by([2, 3], dispatch))
    assert simulate.rows_between_nodes(MASK, dispatch, ranks_per_node=4) == 0


def test_what_is_exposed_grows_as_links_become_slow_and_is_nothing_without_transfers():
    dispatch = dealt()
    times = [
        simulate.simulate(MASK, dispatch, replace(NODE, far_gbytes_per_s=rate), simulate.OVERLAP).exposed_us
        for rate in (100.0, 1.0, 0.01)
    ]
    assert 0 <= times[0] < times[1] < times[2]
    alone = dispatch_from_chunks(1024, np.array([0, 1024]), np.array([0]), 1)
    assert simulate.simulate(MASK, alone, NODE, simulate.OVERLAP).exposed_us == 0


@pytest.mark.parametrize("name", list(simulate.MASKS))
def test_each_mask_is_predicted_on_one_node_and_on_two(name):
    one, two = (dict(zip(simulate.HEADER, simulate.row(name, 4096, gpus, H100), strict=True)) for gpus in (8, 16))
    assert float(one["far_mib"]) == float(one["far_once_mib"]) == 0
    assert float(two["far_once_mib"]) <= float(two["far_mib"])
    for row in (one, two):
        area = simulate.MASKS[name](4096 * row["gpus"]).area
        rate = 14 * area * 64 * 128 / row["gpus"] / float(row["step_ms"]) / 1e9
        assert abs(rate - float(row["tflops_a_gpu"])) <= 0.02 * rate + 1
        assert float(row["step_ms"]) >= float(row["forward_ms"]) + float(row["backward_ms"]) - 0.002
        assert float(row["balance"]) >= 1


def test_documents_over_subgroups_are_all_computed_once_and_one_document_is_zigzag():
    lengths, total = (3000, 200, 700, 90, 510, 100), 4600
    mask = builders.varlen(doc_lengths=lengths, causal=True)
    found = predict_subgroups(lengths, 4, True, H100, simulate.OVERLAP)
    assert (found.area.sum(), found.rows.sum()) == (mask.area, total)
    # The longest is on all four ranks, the others are whole on one.
    own = zigzag_documents(np.array([3000]), 4)
    needed = simulate.simulate(builders.causal(3000), own, H100, simulate.OVERLAP)
    assert found.received.tolist() == needed.counts.received.sum(axis=0).tolist()
    assert found.step_us > needed.found.step_us
    alone = predict_subgroups((4096,), 4, True, H100, simulate.OVERLAP)
    zigzag = simulate.simulate(builders.causal(4096), simulate.zigzag(4096, 4), H100, simulate.OVERLAP)
    assert alone.step_us == pytest.approx(zigzag.found.step_us) and alone.rows.tolist() == [1024] * 4


def test_layouts_and_subgroups_are_lines_of_one_table():
    documents, window = (
        [dict(zip(simulate.LAYOUT_HEADER, line, strict=True)) for line in simulate.layout_rows(name, 4096, 8, H100)]
        for name in ("documents", "window")
    )
    assert len(documents) == 6 and documents[-1]["layout"] == "subgroups"
    assert all(float(line["most_rows"]) == 1 for line in documents[:-1]) and float(documents[-1]["most_rows"]) > 1
    assert [line["layout"] for line in window] == [line["layout"] for line in documents[:-1]]


def test_measurements_are_read_in_both_forms_and_compared(tmp_path):
    old = ["mask", "tokens", "ranks", "dispatch", "forward_ms", "backward_ms"]
    write_csv(tmp_path / "distributed_4gpu.csv", old, [["documents_8", 65536, 4, "zigzag", 11.0, 33.0]])
    new = ["mask", "tokens_a_gpu", "ranks", "way", "forward_ms", "backward_ms"]
    rows = [
        ["causal", 8192, 2, "magi", 1.0, 2.0],
        ["causal", 8192, 2, "ring", 1.0, 2.0],
        ["causal", 8192, 2, "alone_zigzag", 1.0, 2.0],
        ["full", 8192, 2, "magi", "", ""],
    ]
    write_csv(tmp_path / "distributed_2gpu_x.csv", new, rows)
    write_csv(tmp_path / "other.csv", new, rows)
    passes = [["window", 8192, 2, "one launch", "forward", 600], ["window", 8192, 2, "one launch", "backward", 1900]]
    write_csv(tmp_path / "one_launch_2gpu.csv", ["mask", "tokens_a_gpu", "ranks", "way", "pass", "us"], passes)
    steps = ["documents", "tokens_a_gpu", "ranks", "comm", "way", "step_ms"]
    rows = [["64", 8192, 2, "auto", "same", 16.0], ["64", 8192, 2, "auto", "due", 20.0]]
    write_csv(tmp_path / "steps.csv", steps, rows)
    checked = simulate.check_all(H100, [tmp_path])
    assert [line[:2] for line in checked] == [
        ["distributed_2gpu_x.csv", "causal, 8k, magi"],
        ["distributed_4gpu.csv", "documents_8, 16k, zigzag"],
        ["one_launch_2gpu.csv", "window, 8k, one launch"],
        ["steps.csv", "64, 8k, auto"],
    ]
    assert [line[3] for line in checked] == ["3.000", "44.000", "2.500", "1.000"]
    assert 0.8 < float(checked[1][5]) < 1.2


def test_every_file_of_results_that_is_checked_can_be_read(monkeypatch):
    step = simulate.Step(None, simulate.Prediction(1.0, 1.0, 1.0, 1.0, 1), simulate.Prediction(1.0, 1.0, 1.0, 1.0, 1))
    monkeypatch.setattr(simulate, "make_dispatch", lambda *args: None)
    monkeypatch.setattr(simulate, "simulate", lambda *args: step)
    checks = simulate.CHECKS | {"predict_*gpu*.csv": lambda file, rates: iter(())}  # its steps are predicted elsewhere
    monkeypatch.setattr(simulate, "CHECKS", checks)
    found = {line[0] for line in simulate.check_all(H100)}
    kept = {line.split(",")[0] for line in find_results("simulate_check.csv")[0].read_text().splitlines()}
    assert {name for name in kept if not name.startswith(("#", "file", "predict_"))} <= found


def test_errors_are_told_by_file():
    checked = [["a", "", 2, "1", "1", ratio] for ratio in ("0.900", "1.200", "1.000")] + [
        ["b", "", 2, "1", "1", "1.000"]
    ]
    assert simulate.errors(checked) == [
        ["a", 3, "10.0%", "20.0%", "0.90 to 1.20"],
        ["b", 1, "0.0%", "0.0%", "1.00 to 1.00"],
    ]


def test_chart_is_drawn(tmp_path):
    rows = [simulate.row("causal", 1024, gpus, H100) for gpus in (2, 4)]
    simulate.draw(str(tmp_path / "a.png"), rows, [["a", "", 2, "1.0", "1.0", "1.000"]])
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_default_dispatch_is_predicted_to_be_as_fast_as_given_layouts_or_faster() -> None:
    for name in ("causal", "documents"):
        rows = [dict(zip(simulate.LAYOUT_HEADER, r, strict=True)) for r in simulate.layout_rows(name, 8192, 8, H100)]
        zigzag, contiguous = "zigzag", "contiguous"
        found = {r["layout"]: r for r in rows}
        assert list(found) == [
            "planned",
            *(at + how for at in (zigzag, contiguous) for how in ("", ", queries travel")),
            "subgroups",
        ]
        steps, balance, queries = (
            {at: float(r[column]) for at, r in found.items()} for column in ("step_ms", "balance", "query_mib")
        )
        assert steps["planned"] <= 1.01 * steps[zigzag] < steps[contiguous] and balance[contiguous] > 1.5
        travel = f"{contiguous}, queries travel"
        assert steps[travel] < 1.1 * steps["planned"] and balance[travel] < 1.05 and queries[travel] > 0
        assert steps[f"{zigzag}, queries travel"] <= steps[zigzag] and queries[zigzag] == 0
        if name == "causal":  # even already
            assert queries[f"{zigzag}, queries travel"] == 0
