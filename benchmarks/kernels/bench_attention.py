"""Speed of attention implementations, side by side in one process.

    python -m benchmarks.kernels.bench_attention [--masks ...] [--lengths ...] [--providers ...] [--csv FILE]
        [--charts FOLDER]
    python -m benchmarks.kernels.bench_attention --cells HEAD_DIM:HEADS_Q:HEADS_KV:MASK:LENGTH ... [--providers ...]
        [--seconds S] [--turn-ms MS] [--dense-once] [--csv FILE]
    python -m benchmarks.kernels.bench_attention --plot FILE [FILE ...] --charts FOLDER    (draws results; needs no GPU)

Every figure is TFLOP/s of the mask's area (forward 4 * area * heads * head_dim, backward 2.5 times that) and its
ratio to cuDNN through torch, measured in the same run: to the same mask for full and causal, else to cuDNN's dense rate
of the same length. What is timed is what the device does for the whole call that a user of a library makes, the L2
cache flushed before it; providers are interleaved. The host's time is not in it: see `bench_attention_costs.py`. First
each provider's output and gradients are compared with fp64; one that is wrong is not timed. Peers take part
where they can be imported: `flash_attn_interface`, `flash_attn.cute`, `cudnn.flex_attention`, `magi_attention`.

`--cells` measures single masks of several shapes in one run, and adds the shape to each row of the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks._lib.accuracy import exact_sample, key_gradients, mismatch
from benchmarks._lib.cases import MASKS, Case, Cell, Shape, parse_shape
from benchmarks._lib.charts.attention import combine, draw, draw_summary
from benchmarks._lib.provenance import write_csv
from benchmarks._lib.providers import PROVIDERS, Flex, Problem, Provider, Unavailable, make_problem
from benchmarks._lib.results import read_results
from benchmarks._lib.timing import TURN_MS, DeviceLost, attempt, time_together

PASSES = ("forward", "backward")
HEADER = ["mask", "length", "provider", "yardstick", "forward_ms", "forward_tflops", "forward_ratio", "backward_ms",
          "backward_tflops", "backward_ratio", "forward_yardstick", "backward_yardstick", "note"]  # fmt: skip
SHAPE = ["head_dim", "heads"]
"""Columns before those of `HEADER`, of cells."""
LENGTHS = (8192, 32768, 2048, 16384, 131072, 1024, 4096, 65536)
"""In the order of what a run that is out of time should have measured first."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_YARDSTICK_LENGTH = 32768
"""Up to it cuDNN's dense pass runs with every mask; a longer one is measured once a length."""
Rates = tuple[float, float]


@dataclass(frozen=True)
class Settings:
    """What is measured: shape and dtype of the inputs, and how long to time one mask of one length.

    Attributes:
        seconds: to time all providers and passes of a mask, about.
        turn_ms: of a call before the next one has its turn, about.
        dense_once: cuDNN's dense pass is measured once a length, however short.
    """

    shape: Shape
    dtype: torch.dtype
    providers: tuple[str, ...]
    flex_lengths: tuple[int, ...]
    seconds: float
    turn_ms: float = TURN_MS
    dense_once: bool = False


def prepare(problem: Problem, settings: Settings) -> tuple[dict[str, Provider], dict[str, str]]:
    """``(providers that are ready and right, what is the matter with the others)``."""
    ready: dict[str, Provider] = {}
    notes: dict[str, str] = {}
    sample, trusted = exact_sample(problem), None
    # The kernels here come first: keys' gradients of the others are compared with theirs.
    for name in sorted(settings.providers, key=lambda n: n != "ffa"):
        if name == "flex" and problem.case.length not in settings.flex_lengths:
            notes[name] = "skipped: compiled only for --flex-lengths"
            continue
        try:
            provider, error = attempt(PROVIDERS[name], problem)
            results = None
            if provider is not None:
                results, error = attempt(_run_both, provider)
        except Unavailable as reason:
            notes[name] = f"skipped: {reason}"
            continue
        if provider is None or results is None:
            notes[name] = f"failed: {error}"
            continue
        notes[name] = mismatch(sample, results, trusted)
        if not notes[name]:
            ready[name] = provider
            if name == "ffa":
                trusted = key_gradients(sample, results)
    return ready, notes


def _run_both(provider: Provider) -> tuple[torch.Tensor, ...]:
    """Its results, after a forward pass alone: whatever compiles when it is first called has been called."""
    provider.forward()
    return provider.results()


def measure(case: Case, settings: Settings, known: dict[int, Rates]) -> list[dict]:
    """One row for each provider that can do the mask.

    Args:
        known: cuDNN's dense times of the shape, by length, where they are measured once; this adds to it.
    """
    problem = make_problem(case, settings.shape, settings.dtype)
    ready, notes = prepare(problem, settings)
    calls = {(name, which): getattr(p, which) for name, p in ready.items() for which in PASSES}
    same = case.name in ("full", "causal")
    if not same and case.length not in known:
        dense, error = attempt(PROVIDERS["cudnn"], replace(problem, case=MASKS["full"](case.length)))
        if dense is None:
            notes["cudnn"] = f"failed: {error}"
        else:
            calls |= {("dense", which): getattr(dense, which) for which in PASSES}
    times, waiting = time_together(
        {" ".join(key): call for key, call in calls.items()}, settings.seconds, settings.turn_ms
    )
    base = [times.get(f"{'cudnn' if same else 'dense'} {which}") for which in PASSES]
    yardstick = (base[0], base[1]) if isinstance(base[0], float) and isinstance(base[1], float) else None
    once = settings.dense_once or case.length > MAX_YARDSTICK_LENGTH
    if yardstick and case.name != "causal" and once:
        known[case.length] = yardstick
    if not same:
        yardstick = yardstick or known.get(case.length)
        if notes["cudnn"].startswith("skipped"):  # as expected
            del notes["cudnn"]
    for key in sorted(waiting):
        name, which = key.replace("dense", "cudnn").split()
        said = [notes[name]] if notes.get(name) else []
        notes[name] = "; ".join([*said, f"{which}: with the host's time, for it waits for the device"])
    return figures(case, settings.shape, times, notes, yardstick, ready)


def figures(
    case: Case,
    shape: Shape,
    times: Mapping[str, float | str],
    notes: Mapping[str, str],
    yardstick_ms: Rates | None,
    ready: Sequence[str] | Mapping[str, object],
) -> list[dict]:
    """Rows of the results from times.

    Args:
        times: ms of ``"<provider> <pass>"``, or what went wrong.
        notes: what else is to be said of a provider.
        yardstick_ms: cuDNN's forward and backward, of the same mask for full and causal, else of the full mask.
        ready: names of the providers that were timed.
    """
    same = case.name in ("full", "causal")
    flops = shape.flops(case.mask.area)
    base_flops = flops if same else shape.flops(case.length**2)
    rows = []
    for name in PROVIDERS:
        if name not in ready and not notes.get(name):
            continue
        row = {"mask": case.name, "length": case.length, "provider": name}
        row["yardstick"] = "same mask" if same else "dense"
        note = [notes[name]] if notes.get(name) else []
        for i, which in enumerate(PASSES):
            ms = times.get(f"{name} {which}")
            if isinstance(ms, str):
                note.append(f"{which}: {ms}")
            base = None if yardstick_ms is None else base_flops[i] / yardstick_ms[i] / 1e9
            timed = isinstance(ms, float)
            rate = flops[i] / ms / 1e9 if timed else None
            row[f"{which}_ms"] = f"{ms:.4f}" if timed else ""
            row[f"{which}_tflops"] = "" if rate is None else f"{rate:.1f}"
            row[f"{which}_ratio"] = "" if rate is None or base is None else f"{rate / base:.3f}"
            row[f"{which}_yardstick"] = "" if base is None else f"{base:.1f}"
        rows.append(row | {"note": "; ".join(note)})
    return rows


def table_line(rows: Sequence[Mapping[str, object]]) -> str:
    """One line for a mask and a length: for each provider its rates, and in brackets its ratios."""
    first = rows[0]
    parts = [f"{first['mask']:>14} {first['length']:>7}"]
    for row in rows:
        if row["forward_tflops"] or row["backward_tflops"]:
            rates = [float(row[f"{w}_tflops"] or "nan") for w in PASSES]
            ratios = [float(row[f"{w}_ratio"] or "nan") for w in PASSES]
            parts.append(f"{row['provider']} {rates[0]:.0f}/{rates[1]:.0f} ({ratios[0]:.2f}/{ratios[1]:.2f})")
    return "  ".join(parts)


def run(settings: Settings, cells: Sequence[Cell], max_seconds: float, csv: str | None, shapes: bool = False) -> list:
    """Measures, prints and keeps what there is; stops early when the device is lost or time is up.

    Args:
        settings: their shape is that of each cell.
        shapes: whether rows say their shape.
    """
    rows: list[dict] = []
    known: dict[Shape, dict[int, Rates]] = {}
    said: set[tuple[str, str]] = set()
    start, left_out = time.monotonic(), []
    for cell in cells:
        name, length = cell.mask, cell.length
        if time.monotonic() - start > max_seconds:
            left_out.append(f"{name} {length}")
            continue
        here = replace(settings, shape=cell.shape)
        try:
            found, error = attempt(measure, MASKS[name](length), here, known.setdefault(cell.shape, {}))
        except DeviceLost as lost:
            print(f"{name} {length}: the GPU is lost: {lost}", flush=True)
            _save(csv, rows)
            sys.exit(3)
        torch.cuda.empty_cache()
        if not found:
            print(f"{name:>14} {length:>7}  {error or 'no provider'}", flush=True)
            continue
        kept = [r for r in found if not r["note"].startswith("skipped")]
        rows += [cell.columns | row for row in kept] if shapes else kept
        print(f"{table_line(found)}  [{time.monotonic() - start:.0f} s]", flush=True)
        for row in found:
            if row["note"] and (row["provider"], row["note"]) not in said:
                said.add((row["provider"], row["note"]))
                print(f"{'':>22}  {row['provider']}, {name} {length}: {row['note']}", flush=True)
        _save(csv, rows)
    if left_out:
        print(f"not measured, {max_seconds:.0f} s are over: {', '.join(left_out)}")
    return rows


def _save(path: str | None, rows: Sequence[Mapping[str, object]]) -> None:
    if path and rows:
        masks, names = list(MASKS), list(PROVIDERS)
        header = [*(h for h in SHAPE if h in rows[0]), *HEADER]
        shapes = list(dict.fromkeys(tuple(row.get(h) for h in SHAPE) for row in rows))
        order = lambda r: (  # noqa: E731
            shapes.index(tuple(r.get(h) for h in SHAPE)), masks.index(r["mask"]), r["length"],
            names.index(r["provider"]),
        )  # fmt: skip
        write_csv(path, header, [[row[h] for h in header] for row in sorted(rows, key=order)])


def draw_all(results: Sequence[str], folder: str) -> None:
    """A chart of each pass and one of some masks at the greatest length, named after the first results file.

    Others add what it lacks (`benchmarks._lib.charts.attention.combine`).
    """
    source, rows = combine([read_results(file) for file in results])
    stem = Path(results[0]).stem
    Path(folder).mkdir(parents=True, exist_ok=True)
    for which in PASSES:
        draw(Path(folder) / f"{stem}_{which}.png", rows, which, source)
    longest = max(int(row["length"]) for row in rows)
    draw_summary(Path(folder) / f"{stem}_summary.png", rows, longest, source)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--cells", nargs="+", type=Cell.parse, metavar="HEAD_DIM:HEADS_Q:HEADS_KV:MASK:LENGTH",
                        help="these, instead of --masks, --lengths, --heads and --head-dims")  # fmt: skip
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--heads", default="64:8", help="query heads : key heads")
    parser.add_argument("--head-dims", default="128", help="one for all, or queries and keys / values: 192/128")
    parser.add_argument("--flex-lengths", nargs="*", type=int, default=[8192],
                        help="lengths that FlexAttention is compiled for, 10 s a mask")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3.0, help="to time one mask of one length, about")
    parser.add_argument("--turn-ms", type=float, default=TURN_MS, help="of a call before the next has its turn, about")
    parser.add_argument("--dense-once", action="store_true", help="cuDNN's dense rate once a length, however short")
    parser.add_argument("--max-seconds", type=float, default=215.0, help="begin nothing new after it")
    parser.add_argument("--csv", help="where to write the table, with where it comes from in its first lines")
    parser.add_argument("--charts", help="folder of the charts")
    parser.add_argument("--plot", metavar="CSV", nargs="+", help="only draw these files' charts")
    return parser.parse_args()


def main() -> None:
    """Measures, or draws what was measured."""
    args = _arguments()
    if args.plot:
        draw_all(args.plot, args.charts or str(Path(args.plot[0]).parent))
        return
    if args.charts and not args.csv:
        sys.exit("--charts: needs --csv, which it draws")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU; --plot draws a results file without one")
    shape = parse_shape(args.heads, args.head_dims)
    settings = Settings(
        shape, DTYPES[args.dtype], tuple({"cudnn": None} | dict.fromkeys(args.providers)),
        tuple(n for n in args.flex_lengths if n <= Flex.max_length), args.seconds, args.turn_ms, args.dense_once,
    )  # fmt: skip
    cells = args.cells or [Cell(shape, name, length) for length in args.lengths for name in args.masks]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    shapes = "" if args.cells else f", heads {args.heads}, head dims {args.head_dims}"
    print(f"{args.dtype}{shapes}: TFLOP/s forward/backward (ratio to cuDNN)")
    rows = run(settings, cells, args.max_seconds, args.csv, shapes=bool(args.cells))
    if args.charts and rows:
        draw_all([args.csv], args.charts)


if __name__ == "__main__":
    main()
