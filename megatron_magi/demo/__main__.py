"""The demo's command line."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

try:
    importlib.import_module("matplotlib")
except ImportError as error:
    raise ImportError(f"megatron_magi.demo: needs matplotlib; pip install '.[demo]' in a checkout: {error}") from error

from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.demo import figures, report
from megatron_magi.demo.corpus import Corpus, load_corpus
from megatron_magi.demo.progress import Progress
from megatron_magi.demo.training import Run, RunFailed, Setting, kv_row_bytes, megatron_args, num_layers, train
from megatron_magi.explain.figures import plot_mask
from megatron_magi.mask.builders import from_eod_positions
from megatron_magi.plan import Plan, make_plan


def main(argv: list[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0 when the two runs agree, 1 when they do not, 2 when one of them failed.
    """
    options = _parse(argv)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    num_gpus = torch.cuda.device_count()
    setting = Setting(num_steps=options.steps, on_gpu=num_gpus > 0, cores=len(os.sched_getaffinity(0)))
    cp_size = 1 if num_gpus == 1 else 2
    begin = time.monotonic()
    try:
        corpus = _make_corpus(out)
        _describe(corpus, setting)
        stock = _train("stock, CP=1", "stock", setting, corpus, out, magi=False, cp_size=1)
        magi = _train(f"magi, CP={cp_size}", "magi", setting, corpus, out, magi=True, cp_size=cp_size)
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        return 2
    comparison = report.Comparison(
        stock=stock,
        magi=magi,
        names=("stock, CP=1", f"magi, CP={cp_size}"),
        tolerance=report.BF16_TOLERANCE if setting.on_gpu else report.FP32_TOLERANCE,
        traffic=report.traffic_of(magi, row_bytes=kv_row_bytes(setting), num_layers=num_layers()),
    )
    text = report.table(comparison)
    (out / "report.txt").write_text(text + "\n")
    report.write_json(out / "report.json", comparison)
    figures.plot_losses(out / "loss_curves.png", comparison)
    plot_mask(
        out / "mask.png",
        _example_plan(corpus, setting, max(2, cp_size)),
        "One batch: each document attends to itself, causally",
    )
    print(f"\n{text}\n\n{time.monotonic() - begin:.0f} s in all. See {out}/loss_curves.png, mask.png, report.txt")
    return 0 if comparison.agrees else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_magi.demo",
        description="Pretrains a small GPT twice, with Megatron's own attention on one rank and with "
        "--attention-backend magi on two, and compares the losses. Uses GPUs where there are any.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for what is written (%(default)s)")
    parser.add_argument("--steps", type=int, default=Setting.num_steps, help="steps of each run (%(default)s)")
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(f"--steps: expected at least 2, got {options.steps}")
    return options


def _make_corpus(out: Path) -> Corpus:
    """Made in a process of its own: importing Megatron prints a page of warnings."""
    command = [sys.executable, "-W", "ignore", "-m", "megatron_magi.demo.corpus", str(out / "corpus")]
    print("tokenizing the source of the Python standard library ...", flush=True)
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise RunFailed(f"the dataset could not be made:\n{made.stderr}")
    return load_corpus(Path(made.stdout.splitlines()[-1]))


def _describe(corpus: Corpus, setting: Setting) -> None:
    lengths = corpus.document_lengths
    print(
        f"{len(lengths):,} documents of {lengths.min()} to {lengths.max():,} tokens, {corpus.num_tokens:,} in all; "
        f"{setting.num_steps} steps of {setting.global_batch_size} sequences of {setting.seq_length:,} tokens, "
        f"{'bf16, NCCL' if setting.on_gpu else 'fp32, gloo'}\n",
        flush=True,
    )


def _train(title: str, name: str, setting: Setting, corpus: Corpus, out: Path, *, magi: bool, cp_size: int) -> Run:
    args = megatron_args(setting, corpus, magi=magi, cp_size=cp_size)
    with Progress(title, setting.num_steps) as progress:
        return train(name, args, setting, cp_size, out, progress.step)


def _example_plan(corpus: Corpus, setting: Setting, cp_size: int) -> Plan:
    """The plan of one microbatch of consecutive documents, made as training makes them."""
    num_tokens = setting.seq_length * setting.micro_batch_size
    tokens = corpus.tokens()
    # A stretch with as many documents as the corpus has on average, or more.
    ends = (tokens == corpus.eod).reshape(-1)
    num_windows = len(tokens) // num_tokens
    per_window = ends[: num_windows * num_tokens].reshape(num_windows, num_tokens).sum(axis=1)
    window = int((per_window >= per_window.mean()).argmax())
    piece = tokens[window * num_tokens : (window + 1) * num_tokens]
    mask = from_eod_positions(tokens=piece.reshape(setting.micro_batch_size, -1), eod=corpus.eod)
    config = MagiConfig(dispatch=DispatchConfig(alignment=setting.micro_batch_size))
    return make_plan(mask, config, cp_size)


if __name__ == "__main__":
    sys.exit(main())
