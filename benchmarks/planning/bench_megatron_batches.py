"""What a microbatch costs the process that trains with Megatron, before its first layer; needs no GPU.

    python -m benchmarks.planning.bench_megatron_batches [--csv FILE] [--corpus FOLDER] [--batches 12]

Packed text of the demo's corpus, tables made as for an H200 (132 SMs). Reported is the time of the main thread on its
core, milliseconds, median over microbatches:

- ``read_stock``: to receive what a worker of Megatron's data loader collates;
- ``read``: to receive it with its prepared batch;
- ``due``: to plan and dispatch a microbatch that is not planned yet;
- ``prepared``: to dispatch one that a worker has planned.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks._lib.provenance import write_csv
from megatron_magi import cpu_device
from megatron_magi.attention import AttnShape
from megatron_magi.config import CostModel, MagiConfig, OverlapConfig
from megatron_magi.demo.corpus import Corpus, build_corpus

SHAPE = AttnShape(32, 8, 128, 128, torch.bfloat16, num_sms=132)
CASES = ((8192, 1), (16384, 2), (65536, 2), (131072, 8), (1 << 20, 64))
HEADER = ["tokens", "ranks", "documents", "read_stock_ms", "read_ms", "due_ms", "prepared_ms"]


class Text(Dataset):
    """Sequences of the corpus, from random places on."""

    def __init__(self, corpus: Corpus, seqlen: int, num: int) -> None:
        self._tokens, self._seqlen, self._num = corpus.tokens(), seqlen, num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = np.random.default_rng(index).integers(len(self._tokens))
        text = torch.from_numpy(self._tokens.take(np.arange(begin, begin + self._seqlen + 1), mode="wrap"))
        ones, places = torch.ones(self._seqlen), torch.arange(self._seqlen)
        return {"tokens": text[:-1].clone(), "labels": text[1:].clone(), "loss_mask": ones, "position_ids": places}


def median_ms(calls: list[Callable[[], object]]) -> tuple[float, list]:
    """Median time of the calls but the first, on the core of this thread; and what they returned."""
    times, results = [], []
    for call in calls:
        begin = time.thread_time()
        results.append(call())
        times.append(1e3 * (time.thread_time() - begin))
    return round(float(np.median(times[1:])), 2), results


def measure(corpus: Corpus, tokens: int, num_ranks: int, num_batches: int) -> list:
    """A row of the table."""
    from megatron_magi.mcore.batch import BatchDispatcher
    from megatron_magi.mcore.loader import PlanningCollate
    from megatron_magi.mcore.planner import Planner

    cost = CostModel(num_heads_q=32, num_heads_kv=8, head_dim=128)
    planner = Planner(MagiConfig(overlap=OverlapConfig(cost=cost)), 0, num_ranks, SHAPE, eod=corpus.eod)
    dispatcher, text = BatchDispatcher(planner, None), Text(corpus, tokens, num_batches)
    stock, ahead = (DataLoader(text, batch_size=1, num_workers=1, prefetch_factor=num_batches) for _ in range(2))
    ahead.collate_fn = PlanningCollate(planner, ahead.collate_fn)
    read_stock, batches = median_ms([iter(stock).__next__] * num_batches)
    due, _ = median_ms([lambda batch=batch: dispatcher.dispatch(batch) for batch in batches])
    read, planned = median_ms([iter(ahead).__next__] * num_batches)
    prepared, _ = median_ms([lambda batch=batch: dispatcher.dispatch(batch) for batch in planned])
    documents = np.mean([int((batch["tokens"] == corpus.eod).sum()) for batch in batches])
    return [tokens, num_ranks, round(float(documents)), read_stock, read, due, prepared]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "megatron_magi_corpus")
    parser.add_argument("--batches", type=int, default=12)
    args = parser.parse_args()
    cpu_device.install()
    torch.set_num_threads(1)
    corpus = build_corpus(args.corpus)
    rows = []
    print(*HEADER, sep=",")
    for tokens, num_ranks in CASES:
        rows.append(measure(corpus, tokens, num_ranks, args.batches))
        print(*rows[-1], sep=",", flush=True)
    write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
