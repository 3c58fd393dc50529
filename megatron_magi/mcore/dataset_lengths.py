"""Lengths of the documents of Megatron's indexed datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def document_lengths(prefix: str | Path) -> np.ndarray:
    """Tokens of each document of ``prefix.idx``, in the order of the file, int64 ``[num_documents]``.

    Args:
        prefix: path without suffix, as ``--data-path`` takes it.

    Raises:
        ValueError: there are no such files.
    """
    from megatron_magi import cpu_device

    cpu_device.install()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not IndexedDataset.exists(str(prefix)):
        raise ValueError(f"data_path: there is no {prefix}.idx with {prefix}.bin")
    dataset = IndexedDataset(str(prefix))
    ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    return np.diff(ends[dataset.document_indices])
