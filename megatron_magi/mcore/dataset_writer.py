"""Documents of tokens -> Megatron's indexed dataset."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np


def write_indexed_dataset(prefix: str | Path, documents: Iterable[np.ndarray], *, eod: int) -> np.ndarray:
    """Writes ``prefix.bin`` and ``prefix.idx``, each document followed by ``eod``.

    Args:
        prefix: path without suffix, as ``--data-path`` takes it; its folder must exist.
        documents: tokens of each document, one-dimensional integer arrays without ``eod``.
        eod: token that ends a document, the largest there is.

    Returns:
        Tokens of each document, ``eod`` included, int64 ``[num_documents]``.

    Raises:
        ValueError: a document is not one-dimensional, or has a token that is not in ``[0, eod)``.
    """
    import torch

    from megatron_magi import cpu_device

    cpu_device.install()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(eod + 1))
    lengths = []
    with builder.data_file:  # closed by `finalize`, and where a document is refused
        for number, document in enumerate(documents):
            if document.ndim != 1 or (document.size and not 0 <= document.min() <= document.max() < eod):
                raise ValueError(f"documents: document {number} is not a row of tokens in [0, {eod})")
            tokens = torch.from_numpy(np.append(document.astype(np.int64), eod))
            builder.add_document(tokens, [len(tokens)])
            lengths.append(len(tokens))
        builder.finalize(get_idx_path(str(prefix)))
    return np.array(lengths, dtype=np.int64)
