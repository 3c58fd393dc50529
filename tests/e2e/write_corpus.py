"""Writes a small indexed data set of documents of very uneven lengths; run in a process that has Megatron."""

from __future__ import annotations

import sys

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

EOD = 256


def main(prefix: str, num_tokens: int) -> None:
    """Writes ``prefix.bin`` and ``prefix.idx``: bytes with structure to learn, each document ended by EOD."""
    rng = np.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    written = 0
    while written < num_tokens:
        # Mostly a few tokens, now and then longer than a sequence.
        length = int(min(400, 1 + rng.pareto(0.8) * 6))
        start, step = rng.integers(0, 256), rng.integers(1, 7)
        noise = rng.integers(0, 3, size=length)
        tokens = np.append((start + step * np.arange(length) + noise) % 256, EOD)
        builder.add_document(tokens.astype(np.uint16), [len(tokens)])
        written += len(tokens)
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
