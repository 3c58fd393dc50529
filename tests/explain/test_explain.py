"""What a mask costs is said in figures that follow from its plan, and in pictures of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.__main__ import main
from megatron_magi.config import CommConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.explain import command
from megatron_magi.explain.arguments import add_arguments
from megatron_magi.explain.report import dispatch_figures, explain_text
from megatron_magi.explain.sampled import sampled_mask
from megatron_magi.explain.timeline import backward_timeline, forward_timeline
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import make_plan
from megatron_magi.plan.degree import BACKWARD_WORK, stage_costs
from megatron_magi.plan.types import StepKind

MASK = builders.varlen(doc_lengths=[3000, 400, 6600], causal=True)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 7), st.integers(0, 2**32))
def test_sampled_pairs_are_those_of_the_whole_matrix(lengths, left, seed):
    mask = builders.sliding_window(left=left, right=2, doc_lengths=lengths, global_tokens=1)
    pick = np.random.default_rng(seed)
    queries, keys = (np.flatnonzero(pick.random(sum(lengths)) < 0.5) for _ in range(2))
    np.testing.assert_array_equal(sampled_mask(mask, queries, keys), dense_mask(mask)[np.ix_(queries, keys)])


def test_figures_are_those_of_the_plans():
    figures = dispatch_figures(MASK, 4)
    assert len({f.algorithm for f in figures}) == len(figures) >= 4
    for f in figures:
        stats = f.plan.stats()
        assert f.plan.config.dispatch.algorithm == f.algorithm
        assert (f.balance, f.received_rows) == (stats.balance, max(stats.received_rows))
        assert f.received_bytes == f.received_rows * f.plan.config.overlap.cost.row_bytes
    predicted = {f.algorithm: f.predicted_us for f in figures}
    assert predicted["auto"] <= 1.01 * min(us for name, us in predicted.items() if name != "sorted_sequential")


@pytest.mark.parametrize("gbytes_per_s", [200.0, 2.0])
def test_the_timeline_computes_what_it_has_fetched_and_one_thing_at_a_time(gbytes_per_s):
    """With transfers that are hidden, and with some that are waited for."""
    overlap = OverlapConfig(degree=2, cost=CostModel(gbytes_per_s=gbytes_per_s))
    plan = make_plan(MASK, MagiConfig(DispatchConfig("min_heap"), overlap), 4)
    assert plan.degree > 0
    for timeline in (forward_timeline(plan), backward_timeline(plan)):
        for spans in timeline:
            fetched = {s.step.stage: s.end for s in spans if s.step.kind is StepKind.FETCH}
            attends = [s for s in spans if s.step.kind is StepKind.ATTEND]
            transfers = [s for s in spans if s.step.kind is not StepKind.ATTEND]
            assert {s.step.stage for s in attends} == {0, *fetched}
            # Each step starts as soon as what it waits for has ended.
            for row in (attends, transfers):
                for before, s in pairwise([None, *row]):
                    waits = [0.0 if before is None else before.end]
                    if s.step.kind is StepKind.ATTEND:
                        waits.append(fetched.get(s.step.stage, 0.0))
                    else:
                        waits += [a.end for a in attends if spans.index(a) < spans.index(s)]
                    assert s.start == max(waits)
    cost = stage_costs(plan.config.overlap.cost)
    for rank, spans in enumerate(forward_timeline(plan)):
        fetching = sum(s.end - s.start for s in spans if s.step.kind is StepKind.FETCH)
        assert fetching == pytest.approx(cost.fetch_us(plan.stats().received_rows[rank]))
    for rank, spans in enumerate(backward_timeline(plan)):
        reducing = sum(s.end - s.start for s in spans if s.step.kind is StepKind.REDUCE)
        assert reducing == pytest.approx(cost.fetch_us(sum(t.num_send for t in plan.for_rank(rank).transfers)))
        busy = sum(s.end - s.start - cost.stage_latency_us for s in spans if s.step.kind is StepKind.ATTEND)
        assert busy == pytest.approx(BACKWARD_WORK * cost.attend_us(plan.stats().areas[rank]))


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_the_report_names_what_auto_takes(ranks_per_node):
    config = MagiConfig(comm=CommConfig(ranks_per_node=ranks_per_node))
    figures = dispatch_figures(MASK, 4, config)
    auto = figures[0]
    assert f"auto takes {auto.taken}, of predictions within 1 % of" in explain_text(MASK, figures, "auto")
    algorithm, *tolerance = auto.taken.split()
    named = DispatchConfig(algorithm, **({"balance_tolerance": float(tolerance[0])} if tolerance else {}))
    same = make_plan(MASK, replace(config, dispatch=named), 4)
    assert np.array_equal(same.dispatch.chunk_rank, auto.plan.dispatch.chunk_rank)
    assert [f.taken for f in figures[1:]] == ["affinity 1.01", "min_heap", "sorted_sequential", "zigzag", "sequential"]


def test_the_report_lists_dispatches_and_ranks():
    figures = dispatch_figures(MASK, 4)
    text = explain_text(MASK, figures, "affinity")
    assert f"{MASK.area:,} visible pairs" in text and "affinity *" in text
    ranks = text.split("ranks of affinity")[1].splitlines()[2:]
    assert [int(line.split()[0]) for line in ranks] == [0, 1, 2, 3]
    chosen = next(f.plan for f in figures if f.algorithm == "affinity")
    stats, row_bytes = chosen.stats(), chosen.config.overlap.cost.row_bytes
    for line, rows, area, received in zip(ranks, stats.num_rows, stats.areas, stats.received_rows, strict=True):
        _, *numbers, memory = line.replace(",", "").split()
        assert numbers == [str(rows), str(area), f"{area / MASK.area:.2%}", str(received)]
        assert float(memory) == pytest.approx((rows + received) * row_bytes / 1e6, abs=0.05)


def options(*args):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--cp-size", "2", *map(str, args)])


def test_documents_come_from_lengths_chance_or_a_data_set(tmp_path):
    from megatron_magi.mcore.dataset_writer import write_indexed_dataset

    def area(*lengths):
        return sum(n * (n + 1) // 2 for n in lengths)

    assert command.mask_of(options("--seqlen", 10, "--documents", 3, 7)).area == area(3, 7)
    assert command.mask_of(options("--seqlen", 10, "--mask", "causal")).area == area(10)
    random = command.mask_of(options("--seqlen", 1000, "--random-documents", 30))
    assert random.total_seqlen_q == 1000 and len(random.slices) == 30
    write_indexed_dataset(tmp_path / "text", [np.zeros(n - 1, dtype=np.int64) for n in (4, 9, 7)], eod=5)
    data = ("--data-path", tmp_path / "text", "--seqlen", 10)
    assert command.mask_of(options(*data)).area == area(4, 6)
    assert command.mask_of(options(*data, "--sample", 1)).area == area(3, 7)
    for wrong, message in ((2, "has 2 sequences of 10 tokens, got 2"), (-1, "got -1")):
        with pytest.raises(ValueError, match=message):
            command.mask_of(options(*data, "--sample", wrong))


@pytest.mark.parametrize(
    "args, message",
    [
        (["--seqlen", 0], "seqlen: expected at least 1"),
        (["--seqlen", 10, "--documents", 3, 4], "documents: expected lengths above 0 that add up to 10, got [3, 4]"),
        (["--seqlen", 10, "--documents", 11, -1], "documents: expected lengths above 0 that add up to 10, got [11"),
        (["--seqlen", 10, "--documents", 10**20], "documents: expected"),
        (["--seqlen", 10**20], "seqlen: expected at most"),
        (["--seqlen", 10, "--mask", "documents:causal=no"], "causal: expected True or False, got 'no'"),
        (["--seqlen", 100, "--out", "/dev/null"], "out: [Errno 17] File exists: '/dev/null'"),
        (["--seqlen", 10, "--random-documents", 11], "random_documents: expected 1 to 10"),
        (["--seqlen", 10, "--mask", "nothing"], "mask: 'nothing' is none of"),
        (["--seqlen", 10, "--data-path", "/nowhere/text"], "data_path: there is no /nowhere/text.idx"),
        (["--seqlen", 10, "--cp-size", 0], "cp_size"),
        (["--seqlen", 10, "--sample", 1], "sample: needs --data-path"),
        (["--seqlen", 10, "--num-heads-q", 5, "--num-heads-kv", 2], "num_heads_q: expected a multiple of num_heads_kv"),
    ],
)
def test_wrong_options_are_one_message(args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--cp-size", "2", *map(str, args)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def test_pictures_are_written_where_they_are_asked_for(tmp_path, capsys):
    heads = ("--num-heads-q", "6", "--num-heads-kv", "2", "--head-dim", "40")
    assert main(["explain", "--seqlen", "3000", "--cp-size", "3", *heads, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "\n6 query, 2 key heads of 40, 16 bits, rates of an " in shown
    for name in ("mask.png", "timeline.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") and name in shown
