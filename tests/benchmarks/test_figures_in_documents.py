"""The main tables of README.md and of the pages of performance have the figures of the results files."""

import csv
import functools
import re
from pathlib import Path

import numpy as np
import pytest

import megatron_magi
from pretrain_scripts.convergence.curves import Comparison

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
    lines = (ROOT / "benchmarks/results/current" / name).read_text().splitlines()
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
    performance, features = (
        " ".join((ROOT / page).read_text().split()) for page in ("docs/performance.md", "docs/features.md")
    )
    forward, backward = ratios_of_heads_of_64()
    assert f"fastest; heads of 64: {backward} |" in performance
    assert f"With heads of 64 the forward is {forward} times faster and the backward {backward} times." in performance
    assert f"with head dimension 64 {backward} times (" in features
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
    found = {(r["tokens_per_gpu"], r["provider"]): r for r in rows("training_speed_h200_2gpu.csv") if r["mask"] == mask}
    _, *lines = table("docs/performance.md", "mask, tokens a GPU | magi | TE p2p")
    lines = [line for line in lines if line[0].startswith(name)]
    assert len(lines) == 2
    best = {}
    for label, magi, p2p, a2a, gathered, ratio, memory in lines:
        length = str(LENGTHS[label.split()[-1]])
        ours = found[length, "magi"]
        times = [f"{float(found[length, way]['step_ms']):,.0f}" for way in ("magi", "te_p2p", "te_a2a")]
        assert [cell.split()[0] for cell in (magi, p2p, a2a)] == times, label
        last = found.get((length, "te_all_gather"))
        assert gathered.split()[0] == (f"{float(last['step_ms']):,.0f}" if last else "(not"), label
        assert float(ratio) == pytest.approx(float(ours["times_te_best"]), abs=0.0051), label
        # Where TE cannot express a mask another one ran, which is not compared.
        of_te = [found[length, way] for way in ("te_p2p", "te_a2a") if found[length, way]["ran"] == ours["ran"]]
        best[length] = min(of_te, key=lambda row: float(row["step_ms"]))
        peaks = [float(row["peak_gib"]) for row in (ours, best[length])]
        assert [float(gib) for gib in memory.split(", ")] == pytest.approx(peaks, abs=0.0501), label
    (line,) = [
        line for line in table("README.md", "training step in ms, Llama 1B, 32k")[1:] if line[0].startswith(name)
    ]
    (ours,) = [cells for cells in lines if cells[0].endswith("32k")]
    theirs = best[str(LENGTHS["32k"])]
    way = theirs["provider"].removeprefix("te_")
    assert line[1:] == [f"{float(theirs['step_ms']):,.0f} ({way})", ours[1], ours[5]]


DISTRIBUTED = {
    "full": "full",
    "one causal document": "causal",
    "8 documents": "documents_8",
    "64 documents": "documents_64",
    "documents of 64 to 640 tokens": "short_documents",
    "window of 1,024": "window",
    "documents, block causal": "block_causal",
}
OTHER_METHODS = {"all-gather": "all_gather", "ring": "ring", "Ulysses": "ulysses"}


def both_passes(row):
    return float(row["forward_ms"]) + float(row["backward_ms"])


def distributed_cells(mask, length):
    """Measured rows by way."""
    found = [r for r in rows("distributed_ways_2gpu.csv") if (r["mask"], int(r["tokens_a_gpu"])) == (mask, length)]
    return {r["way"]: r for r in found if r["forward_ms"]}


def test_distributed_rates_are_those_of_the_results():
    _, *lines = table("docs/performance.md", "mask, tokens a GPU | magi | alone")
    assert len(lines) == 3 * len(DISTRIBUTED)
    ratios = []
    for label, *cells in lines:
        name, length = label.removesuffix(" *").rsplit(", ", 1)
        ways = distributed_cells(DISTRIBUTED[name], LENGTHS[length])
        rates = {way: f"{r['forward_tflops_a_gpu']} / {r['backward_tflops_a_gpu']}" for way, r in ways.items()}
        took = {way: both_passes(r) / both_passes(ways["magi"]) for way, r in ways.items()}
        title, best = min(((t, w) for t, w in OTHER_METHODS.items() if w in ways), key=lambda other: took[other[1]])
        expected = [rates["magi"], rates["alone"], f"{took['alone']:.2f}", f"{title}, {rates[best]}"]
        zigzag = f"{took['magi_zigzag']:.2f}" if "magi_zigzag" in ways else "(the same)"
        assert cells == [*expected, f"{took[best]:.2f}", zigzag], label
        ratios.append(took[best])
    span = [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    for page in ("docs/performance.md", "docs/features.md"):
        text = " ".join((ROOT / page).read_text().split())
        stated = re.findall(r"([\d.]+) \(dense(?: masks)?\) to ([\d.]+)", text)
        assert stated and all(list(pair) == span for pair in stated), page


def test_times_of_given_layouts_are_those_of_the_results():
    took = {
        (r["mask"], int(r["tokens_a_gpu"]), r["way"]): both_passes(r)
        for r in rows("layouts_2gpu.csv")
        if r["forward_ms"]
    }
    names = DISTRIBUTED | {"documents of 64 to 640 tokens": "short_documents"}
    _, *lines = table("docs/performance_planning.md", "mask, tokens a GPU | planned | zigzag")
    assert len(lines) == 2 * len(DISTRIBUTED)
    travels, homes, of_te = [], [], []
    for label, planned, *cells in lines:
        name, length = label.rsplit(", ", 1)
        ways = {way: ms for (mask, n, way), ms in took.items() if (mask, n) == (names[name], LENGTHS[length])}
        assert planned == _ms(ways["magi"]), label
        for layout, cell in zip(("magi_zigzag", "magi_contiguous"), cells[:2], strict=True):
            home, travel = ways.get(layout), ways.get(f"{layout}_travel")
            if home is None:
                assert cell == "as planned", label
                continue
            ratio = f"({(travel or home) / ways['magi']:.2f})"
            assert cell == ", ".join(map(_ms, filter(None, (home, travel)))) + f" {ratio}", label
            homes.append(home / ways["magi"])
            travels += [travel / ways["magi"]] if travel else []
            if travel:
                of_te += [ways[way] / travel for way in ("te_p2p", "te_all_gather")]
        for way, cell in zip(("te_p2p", "te_all_gather"), cells[2:], strict=True):
            assert cell == (_ms(ways[way]) if way in ways else "(no such mask)"), label
    text = " ".join((ROOT / "docs/performance_planning.md").read_text().split())
    assert f"layouts take {min(travels):.2f} to {max(travels):.2f} times as long as the planner's own" in text
    assert f"and up to {max(homes):.2f} times where they do not" in text
    assert f"take {min(of_te):.2f} to {max(of_te):.2f} times as long as these on the same masks" in text


def _ms(value):
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def test_added_time_of_one_launch_is_that_of_the_results():
    names = {"64 documents": "64", "64 to 1,024 tokens each": "short", "window of 1,024": "window"}
    names["one causal document"] = "causal"
    found = {(r["mask"], int(r["tokens_a_gpu"]), r["pass"]): r for r in rows("one_launch_2gpu_last.csv")}
    _, *lines = table("docs/performance_details.md", "mask, tokens a GPU (fetched) | forward | alone | added")
    assert 2 * len(lines) == len(found)
    for label, *cells in lines:
        name, length, megabytes = re.fullmatch(r"(.*), (\d+k) \(([\d.]+) MB\)", label).groups()
        passes = [found[names[name], LENGTHS[length], which] for which in ("forward", "backward")]
        assert {r["fetched_mb"] for r in passes} == {megabytes}, label
        columns = ("us", "alone_us", "beside_us", "host_us")
        assert cells == [f"{int(r[column]):,}" for r in passes for column in columns], label


def test_ratios_of_training_steps_at_8k_are_those_of_both_runs():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    fastest, medians = {}, {}
    for name in ("training_speed_h200_2gpu.csv", "training_speed_2gpu.csv"):
        for length in ("32768", "8192"):
            for mask in ("causal", "documents", "window_sink"):
                same = [r for r in rows(name) if (r["mask"], r["tokens_per_gpu"]) == (mask, length)]
                magi = [r for r in same if r["provider"] == "magi"]
                # The best of TE's methods by each column, among those that ran the same mask.
                of_te = [r for r in same if r["provider"] != "magi" and r["ran"] == mask]
                for ratios, column in ((fastest, "best_step_ms"), (medians, "step_ms")):
                    if magi:
                        ratio = min(float(r[column]) for r in of_te) / float(magi[0][column])
                        ratios.setdefault((name, length), []).append(ratio)
    shown = {key: [f"{r:.2f}" for r in found] for key, found in fastest.items()}
    new, earlier = "training_speed_h200_2gpu.csv", "training_speed_2gpu.csv"
    assert f"the ratios are {', '.join(shown[new, '32768'] + shown[new, '8192'])}. Step" in text
    first, *rest = shown[earlier, "8192"]
    assert f"({first}, {' and '.join(rest)} by the fastest steps)" in text
    at_8k = [f"{r:.2f}" for r in medians[earlier, "8192"]]
    assert f"ratios were {at_8k[0]}, {at_8k[1]} and {at_8k[2]}" in text
    both = medians[new, "8192"] + medians[earlier, "8192"]
    assert f"{min(both):.2f} to {max(both):.2f} times at 8k" in text
    assert (
        f"{min(medians[new, '32768']):.2f} to {max(medians[new, '32768']):.2f} times faster than TE's best at 32k"
        in text
    )


def test_losses_of_convergence_runs_are_those_of_the_results():
    loss = {r["run"]: float(r["loss"]) for r in rows("convergence_validation_2gpu.csv")}
    _, *lines = table("docs/performance.md", "seed | stock | magi, CP 2")
    seeds = [line[0] for line in lines[:-1]]
    found = {name: [loss[f"{name}_seed_{seed}"] for seed in seeds] for name in ("stock", "magi_cp2")}
    assert len(loss) == 2 * len(seeds)
    for number, (_, *cells) in enumerate(lines):
        values = [np.mean(v) if number == len(seeds) else v[number] for v in found.values()]
        assert cells == [f"{value:.4f}" for value in values]
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    low, high = ([f"{of(found[name]):.3f}" for name in ("magi_cp2", "stock")] for of in (min, max))
    assert f"validation {low[0]} to {high[0]}, with TE's attention {low[1]} to {high[1]}" in text
    assert f"validation text are {low[0]} to {high[0]} with three seeds, stock's {low[1]} to {high[1]}." in text
    curves = Comparison(
        window=100,
        curves={name: np.array([float(r[name]) for r in rows("convergence_2gpu.csv")]) for name in sorted(loss)},
    )
    away = np.array([curves.distance(name) for name in curves.tested])
    for half, words in enumerate(("in the first half of training", "in the second (means over 100 iterations)")):
        assert f"by {away[:, half].min():.4f} to {away[:, half].max():.4f} {words}" in text
    assert f"by at least {curves.band[0]:.4f} and {curves.band[1]:.4f}" in text
    assert [sentence.split()[0] for sentence in curves.failures] == ["magi_cp2_seed_2718"]


SPARSE_ROWS = {
    "blocks of 128 keys": ("sparse_blocks.csv", "blocks", "128"),
    "blocks of 64 keys": ("sparse_blocks.csv", "blocks", "64"),
    "single keys": ("sparse_index.csv", "index", "1"),
    "2,048 single keys": ("sparse_index.csv", "index top 2048", "1"),
    "512 single keys": ("sparse_index.csv", "index top 512", "1"),
}


def sparse_cell(row, with_ratio):
    ratio = f" ({int(row['backward_tflops']) / int(row['forward_tflops']):.2f})" if with_ratio else ""
    return f"{row['forward_tflops']} / {row['backward_tflops']}{ratio}"


def test_rates_of_lists_are_those_of_the_results():
    header, *lines = table("docs/performance.md", "lists of")
    assert [name for name, *_ in lines] == list(SPARSE_ROWS)
    for name, *cells in lines:
        file, case, block = SPARSE_ROWS[name]
        found = {r["keys"]: r for r in rows(file) if (r["case"], r["k_block"], r["provider"]) == (case, block, "ffa")}
        for length, cell in zip(header[1:], cells, strict=True):
            keys = str(1024 * int(length.split("k")[0]))
            assert cell == sparse_cell(found[keys], with_ratio="(" in cell), (name, length)


def latent_rows(file, provider="ffa"):
    """The rows of a provider by heads, listed keys and all keys."""
    found = [r for r in rows(file) if r["provider"] == provider]
    return {(int(r["heads"].split(":")[0]), int(r["keys_seen"]), int(r["keys"])): r for r in found}


def latent_lists(name):
    """Heads and listed keys of a row named as "64, 1,024"."""
    heads, listed = name.replace(",", "").split()
    return int(heads), int(listed)


def test_rates_over_latent_keys_are_those_of_the_results():
    """The cuDNN frontend has no forward on Hopper."""
    header, *lines = table("docs/performance_details.md", "heads, listed keys | magi")
    assert header[1:] == ["magi, forward / backward (ratio)", "cuDNN frontend, backward", "magi / cuDNN"]
    ours, theirs = (latent_rows("sparse_latent_backward.csv", provider) for provider in ("ffa", "cudnn_dsa"))
    assert {(*latent_lists(name), 32768) for name, *_ in lines} == set(ours) == set(theirs)
    for name, *cells in lines:
        magi, cudnn = (found[*latent_lists(name), 32768] for found in (ours, theirs))
        ratio = float(cudnn["backward_ms"]) / float(magi["backward_ms"])
        assert cells == [sparse_cell(magi, with_ratio=True), cudnn["backward_tflops"], f"{ratio:.2f}"], name


def test_rates_over_more_latent_keys_are_those_of_the_results():
    """Emphasis marks cases whose backward is another one today."""
    header, *lines = table("docs/performance_details.md", "heads, listed keys | 64k keys")
    found = latent_rows("sparse_latent_lengths.csv")
    lengths = [1024 * int(length.split("k")[0]) for length in header[1:]]
    assert {(*latent_lists(name), n) for name, *_ in lines for n in lengths} == {k for k in found if k[2] > 32768}
    for name, *cells in lines:
        for length, cell in zip(lengths, cells, strict=True):
            assert cell.strip("*") == sparse_cell(found[*latent_lists(name), length], with_ratio=True), (name, length)


def test_rates_of_other_peers_over_latent_keys_are_those_of_the_results():
    text = " ".join((ROOT / "docs/performance_details.md").read_text().split())
    tilelang, triton = (latent_rows("sparse_latent_peers.csv", provider) for provider in ("tilelang", "triton"))
    cells = [sparse_cell(found[64, listed, 32768], False) for found in (tilelang, triton) for listed in (512, 1024)]
    of_triton = "the kernels of this project in Triton"
    assert f"TileLang {cells[0]} and {cells[1]}, {of_triton} {cells[2]} and {cells[3]}." in text
    peers = ("ffa", "flash_mla")
    ours, theirs = ([*latent_rows("sparse_latent_forward.csv", peer).values()] for peer in peers)
    magi, flash_mla = ([int(r["forward_tflops"]) for r in found] for found in (ours, theirs))
    ratios = [float(b["forward_ms"]) / float(a["forward_ms"]) for a, b in zip(ours, theirs, strict=True)]
    assert f"{min(magi)} to {max(magi)} by magi, {min(flash_mla)} to {max(flash_mla)} by FlashMLA" in text
    assert f"({min(ratios):.2f} to {max(ratios):.2f})" in text
