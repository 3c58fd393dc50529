"""Prediction against measurement: every way to spread a mask that the default chooses from, on the GPUs of one machine.

    python -m benchmarks.planning.bench_predict --csv FILE [--rates FILE] [--tokens N ...] [--masks NAME ...]
       # measures
    python -m benchmarks.planning.bench_predict --from FILE [--rates FILE] [--csv FILE] [--chart FILE]
       # predicts again
    python -m benchmarks.planning.bench_predict --from FILE --fit FILE [--and FILE ...] [--ways FILE ...]
       # fits rates to them

A step is a forward and a backward pass of some layers, which the host issues one behind the other. Measured is the
median step over rounds, in each of which every dispatch runs; of the slowest rank, in ms a layer; with
``--one-launch`` stages are one launch (`OverlapConfig`). ``over_best`` says how much longer the chosen dispatch takes
than the fastest.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._lib.batches import DISTRIBUTED, ONE_LAUNCH, predicted_mask
from benchmarks._lib.charts.distributed import MASKS as MASK_TITLES
from benchmarks._lib.dispatches import count_dispatch
from benchmarks._lib.prediction import HEAD_DIM, HEADS_KV, HEADS_Q, OVERLAP, OVERLAPS, by_case, predicted
from benchmarks._lib.provenance import print_row, provenance, table_parser, write_csv
from benchmarks._lib.results import Row
from megatron_magi.attention import distributed_attention
from megatron_magi.calibration import present_rates
from megatron_magi.config import DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.plan import RankPlan, cpp_solver, dispatch_from_chunks, make_plan
from megatron_magi.plan.chunks import ChunkedMask, chunk_bounds
from megatron_magi.plan.counts import Counts
from megatron_magi.plan.dispatch import candidates, fastest
from megatron_magi.plan.plan import make_dispatch
from megatron_magi.plan.predict import predict
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.testing.spawn import run_ranks

HEADER = ["mask", "tokens_a_gpu", "ranks", "one_launch", "dispatch", "measured_ms", "forward_ms", "predicted_ms",
          "predicted_forward_ms", "host_bound", "chosen", "over_best"]  # fmt: skip
MASKS = ("causal", "full", "documents_8", "documents_64", "short_documents", "window", "block_causal")
FITTED = ("forward_tflops", "backward_tflops", "tile_columns", "tile_rows", "forward_us", "backward_us",
          "collective_us", "hidden")  # fmt: skip
"""Rates that `fit` changes. Memory is as `calibrate` measures it, bytes inside a node as `bench_group_collective.py`
does (of few ranks steps tell little of them), the host as `bench_new_masks.py` does, links between nodes are as
assumed."""
_LEAST_MS = 2.0
"""Steps of this benchmark that are shorter are left out of a fit: the host may have been what was measured."""


class Step:
    """A step over one dispatch, on one rank."""

    def __init__(self, plan: RankPlan, num_layers: int, config: MagiConfig) -> None:
        heads = (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
        *self._leaves, self._dout = (
            torch.randn(plan.num_rows, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16).requires_grad_(i < 3)
            for i, n in enumerate(heads)
        )
        self._plan, self._num_layers, self._config = plan, num_layers, config

    def run(self) -> tuple[float, float]:
        """Milliseconds of a layer, of the slowest rank: of both passes, and of the forward."""
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        outs = [
            distributed_attention(*self._leaves, self._plan, dist.group.WORLD, config=self._config)[0]
            for _ in range(self._num_layers)
        ]
        middle.record()
        while outs:
            torch.autograd.grad(outs.pop(), self._leaves, self._dout)
        end.record()
        torch.cuda.synchronize()
        times = torch.tensor([begin.elapsed_time(end), begin.elapsed_time(middle)], device="cuda") / self._num_layers
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return tuple(times.tolist())


def measure(
    rank: int, num_ranks: int, name: str, tokens: int, rates: Rates, one_launch: str, seconds: float
) -> list[list]:
    """Rows of the table for one mask; timed for about so many seconds."""
    mask, overlap = predicted_mask(name, tokens * num_ranks, num_ranks), OVERLAPS[one_launch]
    found, _ = predicted(mask, num_ranks, rates, overlap)
    bounds, config = chunk_bounds(mask.total_seqlen_q, num_ranks, DispatchConfig()), MagiConfig(overlap=overlap)
    steps = {}
    for way, chunk_rank in found.items():
        dispatch = dispatch_from_chunks(mask.total_seqlen_q, bounds, chunk_rank, num_ranks)
        plan = make_plan(mask, config, num_ranks, dispatch).for_rank(rank)
        steps[way] = Step(plan, 4 if tokens < 16384 else 1, config)
        steps[way].run()  # compiles kernels
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    order, begin = np.random.default_rng(0), time.perf_counter()
    left = torch.tensor([16], device="cuda")
    while left:
        for way in order.permutation(list(steps)):
            times[way].append(steps[way].run())
        left -= 1
        if time.perf_counter() - begin > seconds and len(times[way]) > 1:
            left.zero_()
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
    medians = {way: np.median(values, axis=0) for way, values in times.items()}
    return [[name, tokens, num_ranks, one_launch, way, *(f"{x:.4f}" for x in medians[way])] for way in steps]


def with_predictions(rows: list[Row], rates: Rates) -> Iterator[list]:
    """Rows of the table, from those with what was measured."""
    for (name, tokens, ranks, one_launch), mine in by_case(rows).items():
        mask = predicted_mask(name, int(tokens) * int(ranks), int(ranks))
        _, by_way = predicted(mask, int(ranks), rates, OVERLAPS[one_launch])
        mine = [row for row in mine if row["dispatch"] in by_way]
        times = {row["dispatch"]: float(row["measured_ms"]) for row in mine}
        chosen = fastest({way: by_way[way] for way in times})
        over = times[chosen] / min(times.values())
        for row in mine:
            found = by_way[row["dispatch"]]
            yield [
                *(row[field] for field in HEADER[:7]), f"{found.step_us / 1e3:.4f}", f"{found.forward_us / 1e3:.4f}",
                int(found.step_us > found.device_us), int(row["dispatch"] == chosen), f"{over:.3f}",
            ]  # fmt: skip


def measured_ways(rows: list[Row], rates: Rates) -> Iterator[tuple[OverlapConfig, Counts, int, float, float]]:
    """Of rows of `bench_methods.py`, of this project's ways: what to predict each by, and its times in ms."""
    for row in rows:
        if not row["way"].startswith("magi") or not row["forward_ms"]:
            continue
        num_ranks, overlap = int(row["ranks"]), OVERLAP
        overlap = replace(overlap, one_launch=ONE_LAUNCH.get(row["way"], overlap.one_launch))
        mask = DISTRIBUTED[row["mask"]](int(row["tokens_a_gpu"]) * num_ranks).mask
        way = "zigzag" if "zigzag" in row["way"] else "auto"
        dispatch = make_dispatch(mask, DispatchConfig(algorithm=way, rates=rates), num_ranks, overlap)
        counts, forward_ms = count_dispatch(mask, dispatch, rates.ranks_per_node), float(row["forward_ms"])
        yield overlap, counts, max(dispatch.shard_lengths), forward_ms + float(row["backward_ms"]), forward_ms


def fit(rows: list[Row], rates: Rates, ways: list[Row]) -> Rates:
    """The rates that predict what was measured, in logarithms, and choose among it with the least regret.

    One rate after another is raised or lowered for as long as that helps, by steps that become finer.

    Args:
        rows: of this benchmark.
        ways: of `distributed/bench_methods.py`, where the host is ahead.
    """
    others = list(measured_ways(ways, rates))
    cases = []
    for (name, tokens, ranks, one_launch), mine in by_case(rows).items():
        mask, config = predicted_mask(name, int(tokens) * int(ranks), int(ranks)), DispatchConfig(rates=rates)
        bounds = chunk_bounds(mask.total_seqlen_q, int(ranks), config)
        chunked = ChunkedMask(mask, bounds, int(ranks))
        found = candidates(chunked, config)
        cases.append((OVERLAPS[one_launch], {
            row["dispatch"]: (cpp_solver.count(chunked, found[row["dispatch"]], rates.ranks_per_node),
                              int(sum_by_rank(found[row["dispatch"]], np.diff(bounds), int(ranks)).max()),
                              float(row["measured_ms"]), float(row["forward_ms"]))
            for row in mine if row["dispatch"] in found
        }))  # fmt: skip

    def loss(rates: Rates) -> float:
        errors, regrets = [], []
        for overlap, case in cases:
            by_way = {way: predict(counts, rows, rates, overlap) for way, (counts, rows, *_) in case.items()}
            for way, (*_, step_ms, forward_ms) in case.items():
                if step_ms > _LEAST_MS:
                    errors.append(np.log(by_way[way].step_us / step_ms / 1e3))
                    errors.append(np.log(by_way[way].forward_us / forward_ms / 1e3) / 2)
            regrets.append(case[fastest(by_way)][2] / min(c[2] for c in case.values()) - 1)
        for overlap, counts, rows, step_ms, forward_ms in others:
            found = predict(counts, rows, rates, overlap)
            errors.append(np.log(found.device_us / step_ms / 1e3))
            errors.append(np.log(found.forward_us / forward_ms / 1e3) / 2)
        # What the measurements do not tell stays as it was.
        moved = [np.log((getattr(rates, name) + 1e-9) / (getattr(before, name) + 1e-9)) for name in FITTED]
        return float(
            np.mean(np.square(errors))
            + np.mean(np.square(np.maximum(0, np.array(regrets) - 0.01)))
            + 1e-3 * np.mean(np.square(moved))
        )

    before = rates
    best = loss(rates)
    for step in (1.3, 1.1, 1.03, 1.01):
        improved = True
        while improved:
            improved = False
            for name, factor in itertools.product(FITTED, (step, 1 / step)):
                value = getattr(rates, name) * factor
                changed = replace(rates, **{name: min(1.0, value) if name == "hidden" else value})
                now = loss(changed)
                if now < best * (1 - 1e-4):
                    rates, best, improved = changed, now, True
        print(f"steps of {step}: {best:.6f}", flush=True)
    return replace(rates, **{name: float(f"{getattr(rates, name):.3g}") for name in FITTED})


def draw(rows: list[list], path: str) -> None:
    """The chart: predicted over measured time of every dispatch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panels = sorted({(int(row[2]), int(row[1]), row[3]) for row in rows})
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row[0] for row in rows))}
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 4.6 * lines), squeeze=False)
    for axis, (ranks, size, one_launch) in zip(axes.flat, panels, strict=False):
        here = [row for row in rows if (int(row[2]), int(row[1]), row[3]) == (ranks, size, one_launch)]
        for name, color in colors.items():
            mine = [row for row in here if row[0] == name]
            at = ([float(r[i]) for r in mine] for i in (5, 7))
            axis.scatter(*at, s=24, color=color, label=MASK_TITLES[name])
            best = [r for r in mine if r[10]]
            axis.scatter([float(r[5]) for r in best], [float(r[7]) for r in best], s=110, facecolors="none",
                         edgecolors=color, linewidths=1.5)  # fmt: skip
        ends = [f([float(r[c]) for r in here for c in (5, 7)]) for f in (min, max)]
        axis.plot(ends, ends, color="grey", linewidth=1)
        title = f"{ranks} GPUs, {size // 1024}k tokens a GPU" + (", one launch" if one_launch == "1" else "")
        axis.set(xscale="log", yscale="log", title=title, xlabel="measured, ms a layer", ylabel="predicted, ms a layer")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ticks.set_minor_formatter(NullFormatter())
        axis.legend(title="circled: chosen", fontsize=7)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def measure_all(rank: int, num_ranks: int, options: argparse.Namespace, rates: Rates) -> list[list]:
    """All rows."""
    rows, begin, over = [], time.perf_counter(), torch.zeros(1, device="cuda")
    for tokens, name in itertools.product(options.tokens, options.masks):
        over += time.perf_counter() - begin > options.max_seconds
        dist.all_reduce(over)
        if over:
            break
        rows += measure(rank, num_ranks, name, tokens, rates, str(int(options.one_launch)), options.seconds)
        if rank == 0:
            print(*(",".join(map(str, row)) for row in rows if row[:2] == [name, tokens]), sep="\n", flush=True)
            write_csv(options.csv, HEADER[:7], rows)  # should the run be ended
        torch.cuda.empty_cache()
    return rows


def _read(text: str) -> list[Row]:
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def main() -> None:
    """Measures, or reads what was measured; predicts, and says how good the choices are."""
    parser = table_parser(__doc__)
    parser.add_argument("--from", dest="measured", help="a file of an earlier run: nothing is measured")
    parser.add_argument("--fit", help="with --from: writes the rates that explain it best to this file, and ends")
    parser.add_argument("--and", dest="more", nargs="*", default=[], help="with --fit: files of other runs")
    parser.add_argument("--ways", nargs="*", default=[], help="with --fit: files of distributed/bench_methods.py")
    parser.add_argument("--rates", help="a calibration; that of this machine, or of its kind of GPU, when not given")
    parser.add_argument("--chart", help="write the chart to this file")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768], help="tokens a GPU")
    parser.add_argument("--masks", nargs="*", default=list(MASKS), choices=MASKS)
    parser.add_argument("--one-launch", action="store_true", help="over all stages, not stage by stage")
    parser.add_argument("--seconds", type=float, default=3.0, help="to time one mask, about")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="start no other mask after so long")
    options = parser.parse_args()
    rates = Rates.from_json(Path(options.rates).read_text()) if options.rates else present_rates()
    head = ""
    if options.fit:
        measured = [row for path in (options.measured, *options.more) for row in _read(Path(path).read_text())]
        ways = [row for path in options.ways for row in _read(Path(path).read_text())]
        Path(options.fit).write_text(fit(measured, rates, ways).to_json())
        return
    if options.measured:
        text = Path(options.measured).read_text()
        head = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#") and "predicted" not in line)
        now = provenance()
        head += f"# predicted: {now['command']}, commit {now['commit']}, rates of {rates.device}\n"
        rows = _read(text)
    else:
        num_ranks = torch.cuda.device_count()
        timeout_s = options.max_seconds + 100
        found = run_ranks(measure_all, num_ranks, options, rates, timeout_s=timeout_s, backend="nccl")[0]
        rows = [dict(zip(HEADER[:7], map(str, row), strict=True)) for row in found]
    table = list(with_predictions(rows, rates))
    for row in table:
        print_row(HEADER, row)
    if options.csv and head:
        with open(options.csv, "w", newline="") as file:
            file.write(head)
            csv.writer(file, lineterminator="\n").writerows([HEADER, *table])
    elif options.csv:
        write_csv(options.csv, HEADER, table)
    if options.chart:
        draw(table, options.chart)
    misses = {tuple(row[:4]): row[11] for row in table if float(row[11]) > 1.02}
    sys.exit(f"slower than the fastest dispatch by more than 2 %: {misses}" if misses else 0)


if __name__ == "__main__":
    main()
