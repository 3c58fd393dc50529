"""The attention benchmark's figures, checks and charts, without a GPU."""

from __future__ import annotations

import attention_charts
import bench_attention
import pytest
import torch
from attention_cases import MASKS, Shape
from attention_checks import exact_sample, key_gradients, mismatch, sample_rows, visible_keys
from attention_providers import FFA, PROVIDERS, Flex, make_problem
from provenance import write_csv

from megatron_magi.mask.dense import dense_mask

SMALL = Shape(4, 2, 16, 16)
TIMES = {"ffa forward": 2.0, "ffa backward": 4.0, "fa3 forward": 1.0, "fa3 backward": "RuntimeError: no"}


class Here(FFA):
    impl = "torch"


def by_provider(rows):
    return {r["provider"]: r for r in rows}


def test_rates_count_the_area_and_ratios_are_to_the_dense_rate():
    case = MASKS["varlen_causal"](1024)
    rows = by_provider(bench_attention.figures(case, SMALL, TIMES, {}, (8.0, 10.0), ["ffa", "fa3"]))
    flops, dense = SMALL.flops(case.mask.area), SMALL.flops(1024**2)
    assert float(rows["ffa"]["forward_tflops"]) == pytest.approx(flops[0] / 2e9, abs=0.05)
    share = case.mask.area / 1024**2
    assert float(rows["ffa"]["forward_ratio"]) == pytest.approx(share * 8 / 2, abs=1e-3)
    assert float(rows["ffa"]["backward_ratio"]) == pytest.approx(share * 10 / 4, abs=1e-3)
    assert float(rows["fa3"]["forward_yardstick"]) == pytest.approx(dense[0] / 8e9, abs=0.05)
    assert rows["ffa"]["yardstick"] == "dense"


def test_full_and_causal_are_compared_with_the_same_mask():
    case = MASKS["causal"](1024)
    times = TIMES | {"cudnn forward": 3.0, "cudnn backward": 5.0}
    rows = by_provider(bench_attention.figures(case, SMALL, times, {}, (3.0, 5.0), ["ffa", "cudnn"]))
    assert rows["cudnn"]["forward_ratio"] == rows["cudnn"]["backward_ratio"] == "1.000"
    assert rows["ffa"]["forward_ratio"] == "1.500"
    assert rows["ffa"]["yardstick"] == "same mask"


def test_what_fails_or_is_wrong_is_said_and_has_no_rate():
    notes = {"fa4": "wrong: out of token 3", "magi": "skipped: not installed", "ffa": ""}
    rows = by_provider(bench_attention.figures(MASKS["full"](1024), SMALL, TIMES, notes, None, ["ffa", "fa3"]))
    assert list(rows) == ["ffa", "fa3", "fa4", "magi"]
    assert rows["fa3"]["note"] == "backward: RuntimeError: no"
    assert rows["fa3"]["backward_tflops"] == rows["fa3"]["backward_ratio"] == rows["fa4"]["forward_tflops"] == ""
    assert rows["ffa"]["forward_ratio"] == "", "there is nothing to compare with"
    assert "fa4" not in bench_attention.table_line(list(rows.values()))


@pytest.mark.parametrize("name", list(MASKS))
def test_sampled_rows_see_what_the_mask_says(name):
    mask = MASKS[name](1024).mask
    rows = sample_rows(mask)
    assert (visible_keys(mask, rows) == dense_mask(mask)[rows]).all()


@pytest.mark.parametrize("name", ["causal", "prefix_tree", "block_causal", "distant_ranges"])
def test_a_right_implementation_passes(name):
    problem = make_problem(MASKS[name](1024), SMALL, torch.float32, "cpu")
    sample, results = exact_sample(problem), Here(problem).results()
    assert mismatch(sample, results, key_gradients(sample, results)) == ""


@pytest.mark.parametrize("name, wrong", [("causal", "full"), ("window", "causal"), ("short_causal", "varlen_causal")])
def test_another_mask_is_noticed(name, wrong):
    problem = make_problem(MASKS[name](2048), SMALL, torch.float32, "cpu")
    other = make_problem(MASKS[wrong](2048), SMALL, torch.float32, "cpu")
    assert mismatch(exact_sample(problem), Here(other).results(), None).startswith("wrong: out of token")


@pytest.mark.parametrize("which, name", [(0, "out"), (1, "dq"), (2, "dk"), (3, "dv")])
def test_a_wrong_tensor_is_named(which, name):
    problem = make_problem(MASKS["causal"](1024), SMALL, torch.float32, "cpu")
    sample, results = exact_sample(problem), list(Here(problem).results())
    trusted = key_gradients(sample, results)
    results[which] = results[which].clone()
    token = int(sample.rows[len(sample.rows) // 2])
    results[which][token] *= 1.2
    assert mismatch(sample, results, trusted).startswith(f"wrong: {name} of token {token}")
    results[which][0] = torch.nan
    assert mismatch(sample, results, trusted) == f"wrong: {name} is not finite"


def test_flex_attention_computes_the_mask(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("attention_providers._compiled_flex", lambda: flex_attention)
    problem = make_problem(MASKS["prefix_tree"](1024), SMALL, torch.float32, "cpu")
    provider = Flex(problem)
    provider._out = provider._attend(*(t.detach() for t in provider._leaves))  # CPUs have no backward of it
    out = provider._restore(provider._out)
    exact = exact_sample(problem)
    assert mismatch(exact, (out, torch.zeros_like(out)), None).startswith("wrong: dq")


@pytest.fixture
def results(tmp_path):
    """A results file of every mask and provider at two lengths."""
    rows = []
    for length in (1024, 2048):
        for name in MASKS:
            case = MASKS[name](length)
            times = {f"{p} {w}": 1.0 + i for i, p in enumerate(PROVIDERS) for w in bench_attention.PASSES}
            rows += bench_attention.figures(case, Shape(), times, {}, (1.0, 1.0), list(PROVIDERS))
    path = tmp_path / "attention.csv"
    write_csv(path, bench_attention.HEADER, [[r[h] for h in bench_attention.HEADER] for r in rows])
    return path


def test_results_are_read_as_written(results):
    source, rows = attention_charts.read_results(results)
    assert {"command", "commit", "device", "date"} <= set(source)
    assert len(rows) == 2 * len(MASKS) * len(PROVIDERS)
    assert list(rows[0]) == bench_attention.HEADER


def test_charts_of_both_passes_are_drawn_from_a_file(results, tmp_path):
    bench_attention.draw_all(str(results), str(tmp_path / "charts"))
    for which in bench_attention.PASSES:
        picture = tmp_path / "charts" / f"attention_{which}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_mask_and_provider_has_a_title_and_a_color():
    assert set(MASKS) == set(attention_charts.MASK_TITLES)
    assert list(PROVIDERS) == list(attention_charts.TITLES)
    assert set(PROVIDERS) == set(attention_charts.COLORS)
