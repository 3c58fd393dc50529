"""Attention on 2 to 4,096 GPUs, predicted by the planner; and how far such predictions are from what was measured.

    python -m benchmarks.planning.simulate [--csv FILE] [--check-csv FILE] [--chart FILE] [--gpus N ...]
        [--tokens N ...] [--masks NAME ...] [--rates FILE] [--from FILE]
    python -m benchmarks.planning.simulate --layouts [--csv FILE] [--chart FILE] [--gpus N ...] [--tokens N ...]
        [--masks NAME ...] [--from FILE]

Needs no GPU. For each mask and number of GPUs the default dispatch is made, as in training, and its step (forward and
backward of one layer) predicted from its counts and from measured rates (`megatron_magi.plan.predict`). ``near_mib``
and ``far_mib`` are what a GPU receives in a forward pass, from its own node and from others, on average;
``far_once_mib`` is how much it were from others if rows crossed between nodes once and were spread inside.
``exposed_ms`` is what the step takes longer than with transfers that take no time.

``--layouts`` predicts the default dispatch, zigzag and contiguous pieces beside each other, the latter two also with
queries that travel (`megatron_magi.plan.travel`), and checks nothing. ``subgroups`` computes each document on 1, 2, 4
or more ranks by its work, as dynamic context parallelism does (`benchmarks._lib.subgroup_steps`). ``mib`` is what a GPU
receives of keys and values in a forward pass on average, ``query_mib`` of queries, outputs and lse, ``plan_ms`` the
time to choose, ``most_rows`` the most tokens that a GPU holds over the mean, to which all other layers' time is
proportional.

Otherwise first every measured step in `benchmarks/results` is predicted in the same way. Rates between nodes are
assumed, and nothing here was measured on more than eight GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks._lib.batches import DISTRIBUTED, ONE_LAUNCH, WARM_UP, PackedCase, make_mask, predicted_mask
from benchmarks._lib.cases import log_uniform_lengths, short_documents
from benchmarks._lib.dispatches import contiguous, count_dispatch, zigzag
from benchmarks._lib.llama import GROUPS, HEAD_DIM, HEADS, NUM_LAYERS, WINDOW
from benchmarks._lib.prediction import OVERLAP, OVERLAPS, by_case, overlap_of, predicted
from benchmarks._lib.provenance import print_row, write_csv
from benchmarks._lib.results import FOLDERS, find_results, read_results
from benchmarks._lib.subgroup_steps import predict_subgroups
from megatron_magi.backends.sm90.cost import H100
from megatron_magi.config import DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import Dispatch, cpp_solver, dispatch_from_chunks, make_plan
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.counts import Counts, count
from megatron_magi.plan.plan import make_dispatch
from megatron_magi.plan.predict import Prediction, predict
from megatron_magi.plan.travel import choose_hosts

HEADER = ["mask", "tokens_a_gpu", "gpus", "balance", "near_mib", "far_mib", "far_once_mib", "step_ms", "forward_ms",
          "backward_ms", "exposed_ms", "degree", "host_bound", "tflops_a_gpu", "plan_s"]  # fmt: skip
CHECK_HEADER = ["file", "case", "gpus", "measured_ms", "predicted_ms", "predicted_over_measured"]
GPUS = tuple(2**i for i in range(1, 13))
LAYOUT_HEADER = ["mask", "tokens_a_gpu", "gpus", "layout", "balance", "mib", "most_mib", "query_mib", "step_ms",
                 "plan_ms", "most_rows"]  # fmt: skip


DOCUMENTS: dict[str, Callable[[int], Sequence[int]]] = {
    "causal": lambda total: (total,),
    # 1k to 64k tokens, as far as there are so many
    "documents": lambda total: log_uniform_lengths(total, min(1024, total // 2), min(65536, total)),
    "short_documents": short_documents,
}
"""Lengths of the causal documents of masks that consist of them."""
MASKS: dict[str, Callable[[int], AttnMask]] = {
    "full": builders.full,
    "causal": builders.causal,
    "documents": lambda total: builders.varlen(doc_lengths=DOCUMENTS["documents"](total), causal=True),
    "short_documents": lambda total: builders.varlen(doc_lengths=DOCUMENTS["short_documents"](total), causal=True),
    "window": lambda total: builders.sliding_window(total, 1023, 0),
    "block_causal": lambda total: builders.block_causal(total, block_size=1024),
}
"""By name, of the tokens of all GPUs; one document but for packed ones."""


class Step(NamedTuple):
    """A step of one layer that was predicted.

    Attributes:
        counts: what its ranks compute and send.
        found: with the host that issues it.
        free: if transfers took no time.
    """

    counts: Counts
    found: Prediction
    free: Prediction

    @property
    def exposed_us(self) -> float:
        """Of communication, on the GPUs."""
        return max(0.0, self.found.device_us - self.free.device_us)


def simulate(mask: AttnMask, dispatch: Dispatch, rates: Rates, overlap: OverlapConfig) -> Step:
    """Predicts the step of a dispatch."""
    counts = count_dispatch(mask, dispatch, rates.ranks_per_node)
    rows, at_once = max(dispatch.shard_lengths), 1e15
    free = replace(rates, collective_us=0.0, far_collective_us=0.0, gbytes_per_s=at_once, far_gbytes_per_s=at_once)
    return Step(counts, predict(counts, rows, rates, overlap), predict(counts, rows, free, overlap))


def rows_between_nodes(mask: AttnMask, dispatch: Dispatch, ranks_per_node: int) -> float:
    """Rows that a rank receives from other nodes, on average, if each crosses once to a node that needs it."""
    num_nodes = dispatch.cp_size // ranks_per_node
    if num_nodes < 2:
        return 0.0
    counts = cpp_solver.count if cpp_solver.available() else count
    nodes = dispatch.chunk_rank // ranks_per_node
    return (
        float(counts(ChunkedMask(mask, dispatch.chunk_bounds, num_nodes), nodes, 1).received.sum()) / dispatch.cp_size
    )


def row(name: str, tokens: int, gpus: int, rates: Rates, overlap: OverlapConfig = OVERLAP) -> list:
    """A line of the table."""
    mask, begin = MASKS[name](tokens * gpus), time.perf_counter()
    dispatch = make_dispatch(mask, DispatchConfig(rates=rates), gpus, overlap)
    plan_s = time.perf_counter() - begin
    step = simulate(mask, dispatch, rates, overlap)
    area, mib = step.counts.work.area.sum(axis=0), overlap.cost.row_bytes / 2**20
    near, far = step.counts.received.mean(axis=1) * mib
    once = rows_between_nodes(mask, dispatch, rates.ranks_per_node) * mib
    flops = 14.0 * mask.area * overlap.cost.num_heads_q * overlap.cost.head_dim / gpus
    found = step.found
    return [
        name, tokens, gpus, f"{area.max() / area.mean():.3f}", f"{near:.1f}", f"{far:.1f}", f"{once:.1f}",
        f"{found.step_us / 1e3:.3f}", f"{found.forward_us / 1e3:.3f}", f"{found.backward_us / 1e3:.3f}",
        f"{step.exposed_us / 1e3:.3f}", found.degree, int(found.step_us > 1.01 * found.device_us),
        f"{flops / found.step_us / 1e6:.0f}", f"{plan_s:.2f}",
    ]  # fmt: skip


def layout_rows(name: str, tokens: int, gpus: int, rates: Rates, overlap: OverlapConfig = OVERLAP) -> Iterator[list]:
    """Lines of the table of layouts."""
    mask, total, cost = MASKS[name](tokens * gpus), tokens * gpus, overlap.cost
    config = MagiConfig(dispatch=DispatchConfig(rates=rates), overlap=overlap)
    # A row of q, of out and of lse, of which one of each travels.
    of_query = cost.num_heads_q * (sum(cost.head_dims) * cost.element_bytes + 4)
    layouts = {"zigzag": zigzag(total, gpus), "contiguous": contiguous(total, gpus)}
    made = {"planned": (make_dispatch(mask, config.dispatch, gpus, overlap), False)}
    made |= {f"{at}{', queries travel' * moves}": (layouts[at], moves) for at in layouts for moves in (False, True)}
    for layout, (dispatch, travels) in made.items():
        step, hosts, begin = simulate(mask, dispatch, rates, overlap).found.step_us, None, time.perf_counter()
        if travels:
            found = choose_hosts(mask, dispatch, config)
            step = step if found.predicted is None else found.predicted.step_us
            hosts = None if found.hosts is None else dispatch_from_chunks(total, *found.hosts, gpus)
        plan_ms = 1e3 * (time.perf_counter() - begin) if travels else 0.0
        stats = make_plan(mask, config, gpus, dispatch, hosts or "home").stats()
        received = np.array(stats.received_rows) * (cost.row_bytes / 2**20)
        yield [
            name, tokens, gpus, layout, f"{stats.balance:.3f}", f"{received.mean():.1f}", f"{received.max():.1f}",
            f"{np.mean(stats.guest_rows) * of_query / 2**20:.1f}", f"{step / 1e3:.3f}", f"{plan_ms:.1f}", "1.000",
        ]  # fmt: skip
    if name in DOCUMENTS:
        found = predict_subgroups(DOCUMENTS[name](total), gpus, True, rates, overlap)
        received = found.received * (cost.row_bytes / 2**20)
        yield [
            name, tokens, gpus, "subgroups", f"{found.area.max() / found.area.mean():.3f}", f"{received.mean():.1f}",
            f"{received.max():.1f}", "0.0", f"{found.step_us / 1e3:.3f}", "0.0", f"{found.rows.max() / tokens:.3f}",
        ]  # fmt: skip


def check_distributed(file: Path, rates: Rates) -> Iterator[list]:
    """Steps of `distributed/bench_methods.py`, of its form of today, and of that with one row for each dispatch."""
    notes, rows = read_results(file)
    default = overlap_of(64, 8, 128, notes.get("commit", ""))
    for r in rows:
        gpus, way = int(r["ranks"]), r.get("way", r.get("dispatch", ""))
        is_old, total = "tokens" in r, int(r["tokens"]) if "tokens" in r else int(r["tokens_a_gpu"]) * gpus
        algorithm = "zigzag" if "zigzag" in way else "auto" if way.startswith("magi") else way
        is_alone = way.startswith("alone")  # keys are all there
        if not r["forward_ms"] or is_alone or algorithm not in ("zigzag", "min_heap", "affinity", "auto"):
            continue
        if is_old:
            documents = r["mask"].partition("_")[2]
            mask = PackedCase(total, int(documents), gpus).mask(0) if documents else builders.causal(total)
        else:
            mask = DISTRIBUTED[r["mask"]](total).mask
        overlap = replace(default, one_launch=ONE_LAUNCH.get(way, default.one_launch))
        dispatch = (
            zigzag(total, gpus)
            if algorithm == "zigzag"
            else make_dispatch(mask, DispatchConfig(algorithm=algorithm, rates=rates), gpus, overlap)
        )
        found = simulate(mask, dispatch, rates, overlap).found
        measured = float(r["forward_ms"]) + float(r["backward_ms"])
        predicted = found.step_us if is_old else found.device_us  # today the host is ahead
        yield _checked(file, f"{r['mask']}, {total // gpus // 1024}k, {way}", gpus, measured, predicted / 1e3)


def check_steps(file: Path, rates: Rates) -> Iterator[list]:
    """A layer of the steps of `distributed/bench_new_masks.py` with a known mask; the mean over some of its masks."""
    notes, rows = read_results(file)
    if "step_ms" not in rows[0]:  # parts of a step
        return
    layers = 8 if "--layers 8" in notes["command"] else 16
    overlap = overlap_of(32, 8, 128, notes.get("commit", ""))
    for r in rows:
        gpus, tokens, name = int(r["ranks"]), int(r["tokens_a_gpu"]), r["documents"]
        if r["way"] != "same":
            continue
        masks = [make_mask(name, tokens * gpus, gpus, seed) for seed in range(WARM_UP, WARM_UP + 4)]
        dispatches = [make_dispatch(mask, DispatchConfig(rates=rates), gpus, overlap) for mask in masks]
        found = [simulate(m, d, rates, overlap).found.step_us for m, d in zip(masks, dispatches, strict=True)]
        case = f"{name}, {tokens // 1024}k{', ' + r['comm'] if 'comm' in r else ''}"
        yield _checked(file, case, gpus, float(r["step_ms"]) / layers, statistics.mean(found) / 1e3)


def check_dispatches(file: Path, rates: Rates) -> Iterator[list]:
    """Steps of `planning/bench_predict.py`, to which the rates are fitted."""
    for (name, tokens, ranks, one_launch), rows in by_case(read_results(file)[1]).items():
        mask = predicted_mask(name, int(tokens) * int(ranks), int(ranks))
        _, found = predicted(mask, int(ranks), rates, OVERLAPS[one_launch])
        for r in rows:
            if r["dispatch"] in found:
                case = f"{name}, {int(tokens) // 1024}k, {r['dispatch']}{', one launch' * int(one_launch)}"
                yield _checked(file, case, int(ranks), float(r["measured_ms"]), found[r["dispatch"]].step_us / 1e3)


def check_one_launch(file: Path, rates: Rates) -> Iterator[list]:
    """Calls of `distributed/bench_one_launch.py` that follow each other, both passes."""
    notes, rows = read_results(file)
    default = overlap_of(32, 8, 128, notes.get("commit", ""))
    for forward, backward in itertools.batched(rows, 2):
        gpus, tokens = int(forward["ranks"]), int(forward["tokens_a_gpu"])
        overlap = replace(default, one_launch=forward["way"] == "one launch")
        mask = make_mask(forward["mask"], tokens * gpus, gpus)
        step = simulate(mask, make_dispatch(mask, DispatchConfig(rates=rates), gpus, default), rates, overlap)
        measured = sum(float(r["us"]) for r in (forward, backward))
        case = f"{forward['mask']}, {tokens // 1024}k, {forward['way']}"
        yield _checked(file, case, gpus, measured / 1e3, step.found.step_us / 1e3)


def check_training(file: Path, rates: Rates) -> Iterator[list]:
    """Whole steps of `training/bench_speed.py`: what its profile says of all but attention, and predicted attention.

    Of its masks those that are always the same. Layers with a window share the dispatch of the others.
    """
    profile_file = file.with_name(file.name.replace("speed", "speed_profile"))
    if not profile_file.exists():
        return
    profiles = {tuple(r.values())[:3]: r for r in read_results(profile_file)[1]}
    (notes, rows), gpus = read_results(file), int(file.name.removeprefix("training_speed_")[0])
    overlap = overlap_of(HEADS, GROUPS, HEAD_DIM, notes["commit"])
    for r in rows:
        if r["provider"] != "magi" or r["mask"] == "documents":
            continue
        profile, total = profiles[r["mask"], r["tokens_per_gpu"], "magi"], int(r["tokens_per_gpu"]) * gpus
        causal = builders.causal(total)
        dispatch = make_dispatch(causal, DispatchConfig(rates=rates), gpus, overlap)
        masks = [causal]
        if r["mask"] == "window_sink":
            masks.append(builders.sliding_window(total, WINDOW - 1, 0))
        steps = [simulate(mask, dispatch, rates, overlap) for mask in masks]
        case = f"{r['mask']}, {int(r['tokens_per_gpu']) // 1024}k"
        kernels = NUM_LAYERS * statistics.mean(step.free.device_us for step in steps) / 1e3
        yield _checked(file, f"{case}, attention kernels", gpus, float(profile["attention"]), kernels)
        rest = sum(float(profile[part]) for part in ("copies", "matrix products", "optimizer", "other"))
        step_ms = rest + NUM_LAYERS * statistics.mean(step.found.step_us for step in steps) / 1e3
        yield _checked(file, f"{case}, whole step", gpus, float(r["step_ms"]), step_ms)


def _checked(file: Path, case: str, gpus: int, measured: float, predicted: float) -> list:
    return [file.name, case, gpus, f"{measured:.3f}", f"{predicted:.3f}", f"{predicted / measured:.3f}"]


CHECKS: dict[str, Callable[[Path, Rates], Iterator[list]]] = {
    "predict_*gpu*.csv": check_dispatches,
    "distributed_*gpu*.csv": check_distributed,
    "launch_*gpu*.csv": check_distributed,
    "exchange_blocks_*gpu*.csv": check_distributed,
    "one_launch_*gpu*.csv": check_one_launch,
    "steps*.csv": check_steps,
    "new_masks_*.csv": check_steps,
    "training_speed_2gpu*.csv": check_training,
}
"""What is checked against, by the names of its files."""


def check_all(rates: Rates, folders: Sequence[Path] = FOLDERS) -> list[list]:
    """Every measured step and its prediction."""
    files = [(file, check) for pattern, check in CHECKS.items() for file in find_results(pattern, folders)]
    return [line for file, check in files for line in check(file, rates)]


def errors(checked: list[list]) -> list[list]:
    """By file: how many, the median and the largest deviation, and the range of predicted over measured."""
    table = []
    for name in dict.fromkeys(line[0] for line in checked):
        ratios = np.array([float(line[5]) for line in checked if line[0] == name])
        off = np.abs(ratios - 1)
        table.append(
            [
                name,
                len(ratios),
                f"{np.median(off):.1%}",
                f"{off.max():.1%}",
                f"{ratios.min():.2f} to {ratios.max():.2f}",
            ]
        )
    return table


def draw(path: str, rows: list[list], checked: list[list]) -> None:
    """Left predicted over measured times, then TFLOP/s a GPU over GPUs, a panel for each number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = sorted({line[1] for line in rows})
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(5.2 * (1 + len(sizes)), 4.6), layout="constrained")
    axes = np.atleast_1d(axes)
    kinds: dict[str, list[list]] = {}
    for line in checked:
        kinds.setdefault(next((pattern for pattern in CHECKS if fnmatch(line[0], pattern)), line[0]), []).append(line)
    for color, (kind, here) in enumerate(kinds.items()):
        at = ([float(line[i]) for line in here] for i in (3, 5))
        label = kind.replace("*gpu", "").replace("2gpu", "").partition("*")[0].replace("_", " ").strip()
        axes[0].scatter(*at, s=12, color=f"C{color}", label=label)
    axes[0].axhline(1, color="grey", lw=1)
    axes[0].axhspan(0.9, 1.1, color="grey", alpha=0.15, lw=0)
    axes[0].set(
        xscale="log",
        yscale="log",
        xlabel="measured, ms",
        ylabel="predicted / measured",
        title="measured steps (band: 10 %)",
    )
    axes[0].set_yticks([0.25, 0.5, 0.8, 1, 1.25, 2], ["0.25", "0.5", "0.8", "1", "1.25", "2"])
    axes[0].minorticks_off()
    axes[0].set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes[0].legend(loc="lower right", fontsize=7, frameon=False, title="files of results", title_fontsize=7)
    for axis, size in zip(axes[1:], sizes, strict=True):
        for color, name in enumerate(dict.fromkeys(line[0] for line in rows)):
            here = [line for line in rows if line[0] == name and line[1] == size]
            axis.plot(
                [line[2] for line in here],
                [float(line[13]) for line in here],
                "o-",
                ms=3.5,
                color=f"C{color}",
                label=name.replace("_", " "),
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks([2, 8, 32, 128, 512, 2048], ["2", "8", "32", "128", "512", "2,048"])
        axis.axvline(8, color="grey", ls=":", lw=1)
        axis.set(xlabel="GPUs (dotted: one node)", ylabel="TFLOP/s a GPU, forward and backward", ylim=(0, None),
                 title=f"predicted, {size // 1024}k tokens a GPU")  # fmt: skip
        axis.grid(lw=0.3)
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_layouts(path: str, rows: list[list]) -> None:
    """Step over that of the planned layout, largest area over the mean, and received bytes, over GPUs; a column for
    each mask of which queries travel.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    masks = list(dict.fromkeys((line[0], int(line[1])) for line in rows if float(line[7])))
    figure, axes = plt.subplots(
        3, len(masks), figsize=(3.3 * len(masks), 8), layout="constrained", squeeze=False, sharey="row"
    )
    for column, (name, tokens) in enumerate(masks):
        here = [line for line in rows if (line[0], int(line[1])) == (name, tokens)]
        planned = {line[2]: float(line[8]) for line in here if line[3] == "planned"}
        for color, layout in enumerate(dict.fromkeys(line[3] for line in here)):
            lines = [line for line in here if line[3] == layout]
            gpus, form = [int(line[2]) for line in lines], "o--" if "travel" in layout else "o-"
            style = {"color": f"C{(color + 1) // 2}", "ms": 3, "label": layout}
            axes[0, column].plot(gpus, [float(line[8]) / planned[line[2]] for line in lines], form, **style)
            axes[1, column].plot(gpus, [float(line[4]) for line in lines], form, **style)
            axes[2, column].plot(gpus, [float(line[5]) + float(line[7]) for line in lines], form, **style)
        axes[0, column].set(title=f"{name.replace('_', ' ')}, {tokens // 1024}k tokens a GPU", xscale="log")
        axes[1, column].set(xscale="log")
        axes[2, column].set(xlabel="GPUs", xscale="log", yscale="symlog")
        for axis in axes[:, column]:
            axis.set_xticks(gpus, [f"{n:,}" for n in gpus])
            axis.minorticks_off()
            axis.grid(lw=0.3)
    for axis, label in zip(axes[:, 0], ("predicted step / planned layout's", "largest area / mean",
                                        "MiB received, forward, mean"), strict=True):  # fmt: skip
        axis.set_ylabel(label)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Checks, then predicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="write predictions to this file")
    parser.add_argument("--check-csv", help="write measured steps and their predictions to this file")
    parser.add_argument("--chart", help="write the chart to this file")
    parser.add_argument("--gpus", type=int, nargs="*", default=list(GPUS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768], help="tokens a GPU")
    parser.add_argument("--masks", nargs="*", default=list(MASKS), choices=MASKS)
    parser.add_argument("--rates", help="a calibration; those of an H100 when not given")
    parser.add_argument("--layouts", action="store_true", help="compare layouts")
    parser.add_argument("--from", dest="earlier", help="predictions of an earlier run: only checks and draws")
    options = parser.parse_args()
    rates = Rates.from_json(Path(options.rates).read_text()) if options.rates else H100
    if options.layouts:
        lines = [list(r.values()) for r in read_results(options.earlier)[1]] if options.earlier else []
        cases = [] if options.earlier else itertools.product(options.tokens, options.masks, options.gpus)
        for tokens, name, gpus in cases:
            for line in layout_rows(name, tokens, gpus, rates):
                print_row(LAYOUT_HEADER, line)
                lines.append(line)
        write_csv(options.csv, LAYOUT_HEADER, lines)
        if options.chart:
            draw_layouts(options.chart, lines)
        return
    checked = check_all(rates)
    print("predicted over measured: steps, median and largest deviation, range")
    for line in errors(checked):
        print("{:<32}{:>4}{:>8}{:>8}  {}".format(*line))
    if options.check_csv:
        write_csv(options.check_csv, CHECK_HEADER, checked)
    rows = []
    if options.earlier:
        rows = [[int(c) if c.isdigit() else c for c in r.values()] for r in read_results(options.earlier)[1]]
    else:
        for tokens, name, gpus in itertools.product(options.tokens, options.masks, options.gpus):
            rows.append(row(name, tokens, gpus, rates))
            print_row(HEADER, rows[-1])
    write_csv(options.csv, HEADER, rows)
    if options.chart:
        draw(options.chart, rows, checked)


if __name__ == "__main__":
    main()
