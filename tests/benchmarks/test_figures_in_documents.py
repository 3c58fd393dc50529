"""The main tables of README.md and of the pages of performance have the figures of the results files."""

import csv
import functools
import re
from pathlib import Path

import pytest

import megatron_magi

ROOT = Path(megatron_magi.__file__).parents[1]
LENGTHS = {"2k": 2048, "8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536, "128k": 131072}
MASKS = {
    "full": "full",
    "causal": "causal",
    "documents, full": "varlen_full",
    "documents, causal": "varlen_causal",
    "sliding window of 1,024": "window",
    "documents, block causal": "block_causal",
    "prefix tree": "prefix_tree",
    "short documents, causal": "short_causal",
    "short documents, full": "short_full",
}


@functools.cache
def rows(name):
    lines = (ROOT / "benchmarks/results" / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def table(page, header):
    """The rows of the table whose header begins with ``header``, as lists of cells without emphasis."""
    lines = (ROOT / page).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {header}"))
    length = next(i for i, line in enumerate(lines[first:]) if not line.startswith("|"))
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first : first + length]]
    return [found[0], *found[2:]]


def by_provider(found, mask, length):
    """Rates of the forward and of the backward."""
    found = [r for r in found if r["mask"] == mask and int(r["length"]) == length]
    return [
        {r["provider"]: float(r[f"{way}_tflops"]) for r in found if r[f"{way}_tflops"]}
        for way in ("forward", "backward")
    ]


def attention_cells(head_dim, mask, length, second_run):
    """Rates by provider, forward and backward."""
    if (head_dim, mask) == (128, "window"):
        found = rows("attention_windows.csv")
    elif head_dim == 64:
        found = rows("attention_64.csv")
    elif second_run:
        found = [r for r in rows("attention_again.csv") if int(r["head_dim"]) == 128]
    else:
        found = [r for name in ("attention.csv", "attention_long.csv") for r in rows(name)]
    return by_provider(found, mask, length)


def test_rates_of_attention_are_those_of_the_results():
    header, *lines = table("docs/performance.md", "forward / backward")
    assert len(lines) == 13
    for name, *cells in lines:
        head_dim, mask = (64, name.removeprefix("heads of 64: ")) if name.startswith("heads of 64") else (128, name)
        for length, cell in zip(header[1:], cells, strict=True):
            rates = attention_cells(head_dim, MASKS[mask], LENGTHS[length], second_run=cell.startswith("*"))
            ours = [way.pop("ffa") for way in rates]
            ratios = [f"{our / max(way.values()):.2f}" for our, way in zip(ours, rates, strict=True)]
            expected = f"{ours[0]:.0f} / {ours[1]:.0f} ({ratios[0]} / {ratios[1]})"
            assert cell.replace("*", "") == expected, (name, length)
            assert re.findall(r"\*\*([\d.]+)\*\*", cell) == [r for r in ratios if float(r) < 1], (name, length)


def ratios_of_heads_of_64(*masks):
    """Lowest and highest ratio to the fastest other library, as the pages write it: forward, backward."""
    cells = {(r["mask"], int(r["length"])) for r in rows("attention_64.csv") if not masks or r["mask"] in masks}
    assert len(cells) == 5 * len(masks or ("full", "causal", "varlen_full", "varlen_causal"))
    ranges = []
    for way in zip(*(by_provider(rows("attention_64.csv"), *cell) for cell in cells), strict=True):
        ratios = sorted(rates.pop("ffa") / max(rates.values()) for rates in way)
        ranges.append(f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
    return ranges


def test_ranges_of_heads_of_64_are_those_of_the_results():
    performance, readme = (" ".join((ROOT / page).read_text().split()) for page in ("docs/performance.md", "README.md"))
    forward, backward = ratios_of_heads_of_64()
    assert f"fastest; heads of 64: {backward} |" in performance
    assert f"with heads of 64 the forward at {forward} and the backward at {backward} times" in performance
    assert f"with head dimension 64 at {backward} (" in readme
    _, dense = ratios_of_heads_of_64("full", "causal")
    _, documents = ratios_of_heads_of_64("varlen_full", "varlen_causal")
    assert f"With heads of 64 it is {dense} on full and causal masks and {documents} on documents." in performance


def test_rates_beside_magi_attention_are_those_of_the_results():
    header, *lines = table("docs/performance_details.md", "forward / backward | 2k")
    assert [line[0] for line in lines] == list(MASKS)
    for name, *cells in lines:
        for length, cell in zip(header[1:], cells, strict=True):
            rates = by_provider(rows("attention_beside_magi.csv"), MASKS[name], LENGTHS[length])
            best = [max(way["magi"], way["magi_gqa"]) for way in rates]
            ratios = [way["ffa"] / theirs for way, theirs in zip(rates, best, strict=True)]
            assert cell == f"{best[0]:.0f} / {best[1]:.0f} ({ratios[0]:.2f} / {ratios[1]:.2f})", (name, length)


@pytest.mark.parametrize(
    "name, mask", [("one causal document", "causal"), ("packed documents", "documents"), ("window", "window_sink")]
)
def test_times_of_training_steps_are_those_of_the_results(name, mask):
    found = {(r["tokens_per_gpu"], r["provider"]): r for r in rows("training_speed_2gpu.csv") if r["mask"] == mask}
    _, *lines = table("docs/performance.md", "mask, tokens a GPU | magi | TE p2p")
    lines = [line for line in lines if line[0].startswith(name)]
    assert len(lines) == 2
    best = {}
    for label, magi, p2p, a2a, _, ratio, memory in lines:
        length = str(LENGTHS[label.split()[-1]])
        ours = found[length, "magi"]
        times = [f"{float(found[length, way]['step_ms']):,.0f}" for way in ("magi", "te_p2p", "te_a2a")]
        assert [cell.split()[0] for cell in (magi, p2p, a2a)] == times, label
        assert float(ratio) == pytest.approx(float(ours["times_te_best"]), abs=0.0051), label
        # Where TE cannot express a mask another one ran, which is not compared.
        of_te = [found[length, way] for way in ("te_p2p", "te_a2a") if found[length, way]["ran"] == ours["ran"]]
        best[length] = min(of_te, key=lambda row: float(row["step_ms"]))
        peaks = [float(row["peak_gib"]) for row in (ours, best[length])]
        assert [float(gib) for gib in memory.split(", ")] == pytest.approx(peaks, abs=0.0501), label
    (line,) = [line for line in table("README.md", "training step, Llama 1B")[1:] if line[0].startswith(name)]
    assert line[1] == " / ".join(cells[1] for cells in sorted(lines, key=lambda cells: cells[0].endswith("8k"))) + " ms"
    assert line[3] == " / ".join(cells[5] for cells in sorted(lines, key=lambda cells: cells[0].endswith("8k")))
    theirs = [best[str(LENGTHS[length])] for length in ("32k", "8k")]
    long, short = (f"{float(row['step_ms']):,.0f}" for row in theirs)
    long_way, short_way = (row["provider"].removeprefix("te_") for row in theirs)
    assert line[2] == f"{long} ({long_way}) / {short} ms ({short_way})"
