"""Steps of Megatron's trainer on real packed text: planned while it trains, and planned before it began.

    torchrun --nproc-per-node 1 -m benchmarks.training.bench_plan_ahead --corpus DIR --out DIR [--tokens 8192 32768]
        [--layers te]

A Llama of 1B on text of the demo's corpus, by magi, all ranks in one context-parallel group. Two ways take turns in one
launch:

- ``beside``: workers of Megatron's data loader read, plan and prepare while it trains, as in any run;
- ``before``: the same batches, all of them received before the first step.

Milliseconds a step, median of the second half of the steps of all turns. ``over_before`` is what planning costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks._lib.llama import model_args
from benchmarks._lib.provenance import print_row, write_csv
from benchmarks._lib.ranks import join_ranks
from benchmarks._lib.trainer import TrainingSession
from megatron_magi import cpu_device
from megatron_magi.demo.corpus import Corpus, build_corpus, load_corpus

if TYPE_CHECKING:
    from megatron_magi.mcore.batch import LocalBatch

HEADER = ["tokens_per_gpu", "gpus", "way", "steps", "step_ms", "best_step_ms", "over_before"]
WAYS = ("beside", "before")
TINY = {"--num-layers": "2", "--hidden-size": "64", "--ffn-hidden-size": "128", "--num-attention-heads": "4",
        "--num-query-groups": "2", "--kv-channels": "16", "--distributed-backend": "gloo"}  # fmt: skip


def training_args(corpus: Corpus, tokens: int, steps: int, layers: str) -> list[str]:
    """Megatron's command line."""
    args = model_args(tokens * int(os.environ["WORLD_SIZE"]), corpus.prefix, steps)
    own = {"--vocab-size": str(corpus.vocab_size), "--null-tokenizer-eod-id": str(corpus.eod)}
    if not torch.cuda.is_available():
        own |= TINY
    flags = ["--attention-backend", "magi", "--dataloader-inter-document-masking"]
    if layers == "local":
        own["--transformer-impl"] = "local"
        flags += ["--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-rope-fusion"]
    for name, value in own.items():
        if name in args:
            args[args.index(name) + 1] = value
        else:
            flags += [name, value]
    return [*args, *flags, *([] if torch.cuda.is_available() else ["--use-cpu-initialization"])]


class Receiver:
    """Has a training receive all its batches before the first step, where that is asked for."""

    def __init__(self, num_steps: int) -> None:
        from megatron_magi.mcore.batch import BatchDispatcher

        self.is_before, stock = False, BatchDispatcher.next

        def read(dispatcher: BatchDispatcher, data_iterator: Iterator) -> LocalBatch:
            if self.is_before:
                if not hasattr(dispatcher, "received"):
                    dispatcher.received = iter([next(data_iterator) for _ in range(num_steps)])
                data_iterator = dispatcher.received
            return stock(dispatcher, data_iterator)

        BatchDispatcher.next = read


def measure(
    session: TrainingSession, receiver: Receiver, corpus: Corpus, tokens: int, options: argparse.Namespace
) -> list[list]:
    """Rows of the table for one length."""
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    args = training_args(corpus, tokens, options.steps, options.layers)
    for turn in range(options.turns):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            receiver.is_before = way == "before"
            found = session.run(args).step_ms
            steps[way] += found[len(found) // 2 :]
            print(tokens, way, " ".join(f"{ms:.1f}" for ms in found), flush=True)
    medians = {way: statistics.median(found) for way, found in steps.items()}
    return [
        [tokens, os.environ["WORLD_SIZE"], way, len(steps[way]), f"{medians[way]:.2f}", f"{min(steps[way]):.2f}",
         f"{medians[way] / medians['before']:.4f}"]
        for way in WAYS
    ]  # fmt: skip


def main() -> None:
    """In every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus, or in which it is made")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of a sequence, a GPU")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=2, help="trainings of each way")
    parser.add_argument("--layers", choices=["te", "local"], default="te")
    options = parser.parse_args()
    options.out, options.corpus = options.out.resolve(), options.corpus.resolve()
    cpu_device.install()
    join_ranks(on_cpu=not torch.cuda.is_available())
    is_made = (options.corpus / "corpus.json").exists()
    corpus = load_corpus(options.corpus) if is_made else build_corpus(options.corpus)
    options.out.mkdir(parents=True, exist_ok=True)
    session, receiver, rows = TrainingSession(), Receiver(options.steps), []
    for tokens in options.tokens:
        rows += measure(session, receiver, corpus, tokens, options)
        if os.environ["RANK"] == "0":
            for row in rows[-2:]:
                print_row(HEADER, row)
            write_csv(options.out / "ahead.csv", HEADER, rows)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
