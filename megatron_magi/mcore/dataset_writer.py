"""Documents of tokens -> Megatron's indexed dataset."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron_magi.checks import IntArrayLike, int_array


def write_indexed_dataset(prefix: str | Path, documents: Iterable[IntArrayLike], *, eod: int) -> np.ndarray:
    """Writes ``prefix.bin`` and ``prefix.idx``, each document followed by ``eod``.

    Args:
        prefix: path without suffix, as ``--data-path`` takes it; its folder must exist.
        documents: tokens of each document, one-dimensional, without ``eod``.
        eod: token that ends a document, the largest there is.

    Returns:
        Tokens of each document, ``eod`` included, int64 ``[num_documents]``.

    Raises:
        ValueError: a document is not one-dimensional, or has an entry that is no integer in ``[0, eod)``.
    """
    import torch

    from megatron_magi import cpu_device

    cpu_device.install()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(eod + 1))
    lengths = []
    with builder.data_file:  # closed by `finalize`, and where a document is refused
        for number, document in enumerate(documents):
            tokens = int_array(document, f"documents: document {number}")
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < eod:
                raise ValueError(f"documents: document {number} is not a row of tokens in [0, {eod})")
            lengths.append(len(tokens) + 1)
            builder.add_document(torch.from_numpy(np.append(tokens, eod)), [lengths[-1]])
        builder.finalize(get_idx_path(str(prefix)))
    return np.array(lengths, dtype=np.int64)
