"""How even a step is over data-parallel ranks, by who packs the documents; needs no GPU.

    python -m benchmarks.planning.bench_balanced_sampler [--csv FILE] [--steps 20]

Documents of heavy-tailed lengths are packed into microbatches of at most so many tokens. Packers:

- ``balanced_pairs``, ``balanced_work``: `megatron_magi.packing.BalancedSampler` with `causal_area` and `causal_work`;
- ``first_fit``: documents in their order, each to the first of the step's microbatches that has room;
- ``dp_balanced``: as Megatron's ``--sequence-packing-scheduler dp_balanced`` (of its main branch, not in 0.19.2) packs
  a global batch: in their order until a microbatch is full, then dealt to ranks in turn; the last documents become
  microbatches of their own until ranks have equally many.

Counted: the largest rank's tokens and visible pairs over the mean, in percent above it, and the share of the room that
is filled. Predicted: the attention of a layer (both passes, this project's kernels and dispatch, rates of an H100) on
the slowest rank over the mean; the same with a layer's matrix products (Llama 8B, at the assumed ``--linear-tflops``);
and tokens a second of the step relative to ``balanced_work``. Of all steps together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks._lib.provenance import write_csv
from megatron_magi.config import CostModel, DispatchConfig, OverlapConfig
from megatron_magi.mask import builders
from megatron_magi.packing import BalancedSampler, causal_area, causal_work
from megatron_magi.plan.chunks import ChunkedMask, chunk_bounds
from megatron_magi.plan.dispatch import candidates, fastest, predictions

OVERLAP = OverlapConfig(cost=CostModel(num_heads_q=32, num_heads_kv=8, head_dim=128))
LAYER_PARAMETERS = 218_112_000
"""Of the matrices of a layer of Llama 8B."""
HEADER = ("lengths", "packer", "max_tokens", "microbatches", "cp", "dp", "tokens_above_mean", "pairs_above_mean",
          "filled", "attention_above_mean", "step_above_mean", "tokens_per_s")  # fmt: skip
Step = list[list[np.ndarray]]
"""Of each rank its microbatches, each the lengths of its documents."""


@dataclass(frozen=True)
class Case:
    """A run: ``max_tokens`` of a microbatch over all ``cp`` ranks of a sequence, ``microbatches`` of a rank a step."""

    lengths: str
    max_tokens: int
    microbatches: int
    cp: int
    dp: int

    def documents(self) -> np.ndarray:
        """Lengths of many documents, in the order in which they come."""
        draw = np.random.default_rng(0)
        if self.lengths == "log_uniform":
            found = np.exp(draw.uniform(np.log(16), np.log(self.max_tokens), 20_000))
        else:
            found = draw.lognormal(6.5, 1.6, 20_000)
        return np.clip(found, 16, self.max_tokens).astype(np.int64)


CASES = [
    Case(lengths, max_tokens, microbatches, cp, dp)
    for lengths in ("log_uniform", "log_normal")
    for max_tokens, microbatches, cp, dp in ((8192, 8, 1, 8), (32768, 8, 2, 8), (32768, 2, 2, 8))
]


def balanced_work(case: Case, num_steps: int) -> Iterator[Step]:
    """Steps of the sampler that knows the matrix products."""
    return balanced_pairs(case, num_steps, causal_work(LAYER_PARAMETERS, 32, 128))


def balanced_pairs(case: Case, num_steps: int, area: Callable = causal_area) -> Iterator[Step]:
    """Steps of the sampler."""
    lengths = case.documents()
    sampler = BalancedSampler(lengths, case.max_tokens, case.microbatches, dp_size=case.dp, area=area)
    for _ in range(num_steps):
        made = sampler.step()
        yield [[lengths[m] for m in made[rank :: case.dp]] for rank in range(case.dp)]


def first_fit(case: Case, num_steps: int) -> Iterator[Step]:
    """A step ends with the first document that has no room; it begins the next one."""
    lengths, place = case.documents(), 0
    for _ in range(num_steps):
        bins: list[list[int]] = [[] for _ in range(case.dp * case.microbatches)]
        room = np.full(len(bins), case.max_tokens)
        while len(fits := np.flatnonzero(room >= lengths[place])):
            bins[fits[0]].append(lengths[place])
            room[fits[0]] -= lengths[place]
            place += 1
        arrays = [np.array(own, dtype=np.int64) for own in bins]
        yield [arrays[rank :: case.dp] for rank in range(case.dp)]


def dp_balanced(case: Case, num_steps: int) -> Iterator[Step]:
    """A global batch is as many documents as fill the step's microbatches on average."""
    lengths, place = case.documents(), 0
    batch = round(case.dp * case.microbatches * case.max_tokens / lengths.mean())
    for _ in range(num_steps):
        packs: list[list[int]] = [[]]
        for length in lengths[place : place + batch].tolist():
            if sum(packs[-1]) + length > case.max_tokens:
                packs.append([])
            packs[-1].append(length)
        place += batch
        last = len(packs) - 1
        while len(packs) % case.dp:
            if len(packs[last]) > 1:
                packs.append([packs[last].pop()])
            else:
                last -= 1
        arrays = [np.array(own, dtype=np.int64) for own in packs]
        yield [arrays[rank :: case.dp] for rank in range(case.dp)]


@cache
def attention_us(lengths: tuple[int, ...], cp: int) -> float:
    """The predicted attention of a layer over a microbatch."""
    mask = builders.varlen(doc_lengths=lengths, causal=True)
    config = DispatchConfig()
    chunked = ChunkedMask(mask, chunk_bounds(mask.total_seqlen_q, cp, config), cp)
    found = predictions(candidates(chunked, config), chunked, config, OVERLAP)
    return found[fastest(found)].device_us


def above_mean(of_ranks: np.ndarray) -> float:
    """By how many percent the slowest rank is above the mean, over all steps; ``[num_steps, dp]``."""
    return 100 * (of_ranks.max(axis=1).sum() / of_ranks.mean(axis=1).sum() - 1)


def measure(case: Case, steps: list[Step], linear_tflops: float) -> tuple[list[float], float]:
    """Figures of the packer, and its tokens a second."""

    def each(value) -> np.ndarray:
        return np.array([[sum(value(m) for m in rank if len(m)) for rank in step] for step in steps])

    tokens, pairs = each(np.sum), each(lambda m: causal_area(m).sum())
    attention = each(lambda m: attention_us(tuple(m.tolist()), case.cp))
    total = attention + tokens * (6 * LAYER_PARAMETERS / case.cp / (linear_tflops * 1e6))
    room = sum(len(rank) for step in steps for rank in step) * case.max_tokens
    figures = [above_mean(tokens), above_mean(pairs), 100 * tokens.sum() / room, above_mean(attention)]
    return [*figures, above_mean(total)], tokens.sum() / total.max(axis=1).sum()


def main(argv: list[str] | None = None) -> list[tuple]:
    """Prints the table, and writes it to ``--csv``; returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", type=int, default=len(CASES), help="so many of the cases, from the first on")
    parser.add_argument("--linear-tflops", type=float, default=500.0)
    args = parser.parse_args(argv)
    rows: list[tuple] = []
    print(*(f"{name:>21}" for name in HEADER), sep="")
    for case in CASES[: args.cases]:
        rates = {}
        for packer in (balanced_work, balanced_pairs, first_fit, dp_balanced):
            steps = list(packer(case, args.steps))
            figures, rates[packer] = measure(case, steps, args.linear_tflops)
            relative = rates[packer] / rates[balanced_work]
            facts = (case.lengths, packer.__name__, case.max_tokens, case.microbatches, case.cp, case.dp)
            rows.append((*facts, *(f"{x:.1f}" for x in figures), f"{relative:.3f}"))
            print(*(f"{value:>21}" for value in rows[-1]), sep="", flush=True)
    write_csv(args.csv, HEADER, rows)
    return rows


if __name__ == "__main__":
    main()
