"""The attention benchmark's figures, checks and charts, without a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks._lib.accuracy import exact_sample, key_gradients, mismatch, sample_rows, visible_keys
from benchmarks._lib.cases import MASKS, Cell, Shape
from benchmarks._lib.charts import attention as charts
from benchmarks._lib.provenance import write_csv
from benchmarks._lib.providers import FFA, PROVIDERS, Flex, Unavailable, make_problem
from benchmarks._lib.results import read_results
from benchmarks.kernels import bench_attention
from megatron_magi.mask.dense import dense_mask

SMALL = Shape(4, 2, 16, 16)
TIMES = {"ffa forward": 2.0, "ffa backward": 4.0, "fa3 forward": 1.0, "fa3 backward": "RuntimeError: no"}


class Here(FFA):
    impl = "torch"


class Failing(Here):
    def backward(self):
        raise RuntimeError("no kernel for this")


class AllKeys(Here):
    """Forgets the mask."""

    def _prepare(self, case):
        super()._prepare(MASKS["full"](case.length))


class Missing(Here):
    def _prepare(self, case):
        raise Unavailable("not installed")


@pytest.fixture
def on_cpu(monkeypatch):
    """The whole benchmark, with a clock that says 1, 2, 3, ... ms and implementations that run anywhere."""
    providers = {"cudnn": Here, "flex": Missing, "ffa": Here, "fa3": AllKeys, "fa4": Failing, "magi": Here}
    make = bench_attention.make_problem
    monkeypatch.setattr(bench_attention, "PROVIDERS", providers)
    monkeypatch.setattr(bench_attention, "make_problem", lambda *args: make(*args, "cpu"))
    clock = lambda calls, *_: ({n: i + 1.0 for i, n in enumerate(calls)}, {"magi backward", "dense forward"})  # noqa: E731
    monkeypatch.setattr(bench_attention, "time_together", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return bench_attention.Settings(SMALL, torch.float32, tuple(providers), (1024,), 1.0)


def cells(*masks):
    return [Cell(SMALL, name, 1024) for name in masks]


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_an_output_that_dout_is_orthogonal_to_is_no_mistake(dtype):
    """Of the second token: delta is almost 0, and its error, that of 16 bits, is not."""
    problem = make_problem(MASKS["causal"](1024), SMALL, dtype, "cpu")
    seen = problem.v[:2, 0].float().T
    for head in range(SMALL.num_heads_q // SMALL.num_heads_kv):
        dout = problem.dout[1, head].float()
        problem.dout[1, head] = 64 * (dout - seen @ torch.linalg.lstsq(seen, dout[:, None]).solution[:, 0])
    sample, results = exact_sample(problem), Here(problem).results()
    assert mismatch(sample, results, None) == ""
    blind = replace(sample, dq_rounding=torch.zeros_like(sample.dq_rounding))
    if dtype == torch.bfloat16:
        assert mismatch(blind, results, None).startswith("wrong: dq of token 1 ")
    results[1][1] += 4 * (sample.dq_rounding[1].max() + 1)
    assert mismatch(sample, results, None).startswith("wrong: dq of token 1 ")


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


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_computes_the_mask(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("benchmarks._lib.providers.compiled_flex", lambda: flex_attention)
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
    source, rows = read_results(results)
    assert {"command", "commit", "device", "date"} <= set(source)
    assert len(rows) == 2 * len(MASKS) * len(PROVIDERS)
    assert list(rows[0]) == bench_attention.HEADER


def test_charts_of_both_passes_are_drawn_from_a_file(results, tmp_path):
    bench_attention.draw_all([str(results)], str(tmp_path / "charts"))
    for which in (*bench_attention.PASSES, "summary"):
        picture = tmp_path / "charts" / f"attention_{which}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def row(provider: str, rate: float, mask: str = "window", length: int = 8192, **shape: str) -> dict[str, str]:
    return {**shape, "mask": mask, "length": str(length), "provider": provider, "forward_tflops": str(rate)}


def test_a_chart_compares_with_the_fastest_other_library_that_has_the_mask():
    rows = [row("ffa", 660.0), row("triton", 900.0), row("fa3", 600.0), row("fa4", 550.0)]
    assert charts.times_fastest(rows, "forward") == pytest.approx(1.1)
    assert charts.times_fastest(rows[:2], "forward") is None
    assert charts.missing("fa3", "prefix_tree") == charts.missing("cudnn", "window") == "no such mask"
    assert charts.missing("fa3", "window") == charts.missing("cudnn_flex", "prefix_tree") == "not measured"


def test_a_chart_of_several_files_takes_each_mask_from_the_file_with_most_providers():
    first = [row("ffa", 1.0), row("ffa", 2.0, "causal"), row("fa3", 1.0, "causal")]
    more = [row("ffa", 3.0, head_dim="128", heads="64:8"), row("fa3", 3.0, head_dim="128", heads="64:8"),
            row("ffa", 4.0, "causal", head_dim="128", heads="64:8"), row("ffa", 5.0, head_dim="64", heads="64:8"),
            row("ffa", 6.0, length=65536, head_dim="128", heads="64:8")]  # fmt: skip
    source, rows = charts.combine([({"commit": "a", "date": "d"}, first), ({"commit": "b", "date": "d"}, more)])
    assert source == {"commit": "a, b", "date": "d"}
    found = {(r["mask"], r["provider"]): r["forward_tflops"] for r in rows}
    assert found == {
        ("window", "ffa"): "3.0",
        ("window", "fa3"): "3.0",
        ("causal", "ffa"): "2.0",
        ("causal", "fa3"): "1.0",
    }


def test_every_mask_and_provider_has_a_title_and_a_color():
    assert set(MASKS) == set(charts.MASK_TITLES)
    assert list(PROVIDERS) == list(charts.TITLES)
    assert set(PROVIDERS) == set(charts.COLORS)


def test_a_provider_that_fails_or_is_wrong_costs_the_others_nothing(on_cpu, tmp_path, capsys):
    path = tmp_path / "attention.csv"
    bench_attention.run(on_cpu, cells("causal", "window"), 60.0, str(path))
    _, rows = read_results(path)
    causal = by_provider(r for r in rows if r["mask"] == "causal")
    assert list(causal) == ["cudnn", "ffa", "fa3", "fa4", "magi"], "what is not installed has no row"
    assert causal["fa3"]["note"].startswith("wrong: out of token")
    assert causal["fa4"]["note"] == "failed: RuntimeError: no kernel for this"
    assert causal["fa3"]["forward_ms"] == causal["fa4"]["forward_ms"] == ""
    assert float(causal["ffa"]["forward_tflops"]) > 0 and float(causal["magi"]["backward_ratio"]) > 0
    assert causal["magi"]["note"] == "backward: with the host's time, for it waits for the device"
    yardstick = by_provider(r for r in rows if r["mask"] == "window")["cudnn"]
    assert yardstick["note"] == "forward: with the host's time, for it waits for the device"
    printed = capsys.readouterr().out
    assert "flex, causal 1024: skipped: not installed" in printed
    assert "fa4, causal 1024: failed" in printed and "ffa" in printed


def test_a_lost_device_ends_the_run_with_what_was_measured(on_cpu, monkeypatch, tmp_path, capsys):
    path = tmp_path / "attention.csv"
    measure = bench_attention.measure

    def then_lose(case, settings, known):
        if case.name == "window":
            raise bench_attention.DeviceLost("illegal address")
        return measure(case, settings, known)

    monkeypatch.setattr(bench_attention, "measure", then_lose)
    with pytest.raises(SystemExit) as ended:
        bench_attention.run(on_cpu, cells("causal", "window", "full"), 60.0, str(path))
    assert ended.value.code == 3
    assert "illegal address" in capsys.readouterr().out
    assert {r["mask"] for r in read_results(path)[1]} == {"causal"}


def test_what_there_is_no_time_for_is_named(on_cpu, capsys):
    assert bench_attention.run(on_cpu, [*cells("causal"), Cell(SMALL, "causal", 2048)], 0.0, None) == []
    assert "causal 1024, causal 2048" in capsys.readouterr().out


def test_the_dense_rate_of_a_long_length_is_measured_once(on_cpu, monkeypatch):
    timed = []

    def clock(calls, *_):
        timed.append(list(calls))
        return dict.fromkeys(calls, 2.0), set()

    monkeypatch.setattr(bench_attention, "time_together", clock)
    monkeypatch.setattr(bench_attention, "MAX_YARDSTICK_LENGTH", 512)
    known = {}
    for name in ("causal", "full", "window", "short_full"):
        bench_attention.measure(MASKS[name](1024), on_cpu, known)
    assert known == {1024: (2.0, 2.0)}
    assert not any(n.startswith("dense") for names in timed for n in names)


def test_cells_of_several_shapes_are_one_table_and_dense_rates_are_those_of_their_shape(on_cpu, monkeypatch, tmp_path):
    clock = lambda calls, *_: (dict.fromkeys(calls, 1e-3), set())  # noqa: E731
    monkeypatch.setattr(bench_attention, "time_together", clock)
    path = tmp_path / "cells.csv"
    asked = [Cell.parse(text) for text in ("32:2:1:window:512", "64:4:2:window:512", "64:4:2:full:512")]
    bench_attention.run(replace(on_cpu, dense_once=True), asked, 60.0, str(path), shapes=True)
    _, rows = read_results(path)
    assert list(rows[0])[:4] == ["head_dim", "heads", "mask", "length"]
    assert list(dict.fromkeys((r["head_dim"], r["heads"], r["mask"]) for r in rows)) == [
        ("32", "2:1", "window"), ("64", "4:2", "full"), ("64", "4:2", "window"),
    ]  # fmt: skip
    small, large = ({r["forward_yardstick"] for r in rows if r["head_dim"] == dim and r["mask"] == "window"}
                    for dim in ("32", "64"))  # fmt: skip
    assert len(small) == len(large) == 1
    assert small != large


@pytest.mark.parametrize("text", ["64:4:2:full", "64:4:2:full:many", "64:4:2:none:512"])
def test_a_cell_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        Cell.parse(text)
