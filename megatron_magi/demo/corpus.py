"""Real text that is on every machine: the source of the Python standard library, one file a document."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_magi.demo.bpe import train
from megatron_magi.mcore.dataset_writer import write_indexed_dataset

_FORMAT = "corpus-1"
"""Part of the cache's key: to be raised with every change of what is written."""

_FOREIGN = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}


@dataclass(frozen=True)
class Corpus:
    """An indexed Megatron dataset.

    Attributes:
        prefix: its path without suffix, for ``--data-path``.
        vocab_size: number of tokens, `eod` included.
        document_lengths: tokens of each document with its `eod`, int64 ``[num_documents]``.
    """

    prefix: Path
    vocab_size: int
    document_lengths: np.ndarray

    @property
    def eod(self) -> int:
        """The token that ends a document: the last, as Megatron's NullTokenizer has it."""
        return self.vocab_size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.document_lengths.sum())

    def tokens(self) -> np.ndarray:
        """All documents one after another, int64 ``[num_tokens]``."""
        return np.fromfile(self.prefix.with_suffix(".bin"), dtype=np.uint16).astype(np.int64)


def standard_library_files(max_bytes: int) -> list[Path]:
    """Python files of the standard library of 1 to ``max_bytes`` bytes, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _FOREIGN]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(path for path in found if 1 <= path.stat().st_size <= max_bytes)


def build_corpus(cache: Path, *, max_document_bytes: int = 4096, vocab_size: int = 1024) -> Corpus:
    """The dataset of the standard library's smaller files, made once and found again by content.

    Small files, because several documents are to fit in one sequence. Their tokens are trained
    byte pairs.

    Args:
        cache: folder that holds datasets by key.
        max_document_bytes: files that are longer are left out.
        vocab_size: tokens, the end of a document included; at most 65536.

    Raises:
        ValueError: ``vocab_size`` leaves no room for the 256 bytes and the end of a document, or
            no file is that small.
    """
    if not 257 <= vocab_size <= 65536:
        raise ValueError(f"vocab_size: expected 257 to 65536, got {vocab_size}")
    texts = [path.read_bytes() for path in standard_library_files(max_document_bytes)]
    if not texts:
        raise ValueError(f"max_document_bytes: no file of the standard library is below {max_document_bytes}")
    folder = cache / _content_key(texts, vocab_size)
    if not folder.exists():
        _build(folder, texts, vocab_size)
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """The dataset that `build_corpus` has made in ``folder``."""
    found = json.loads((folder / "corpus.json").read_text())
    return Corpus(folder / "text", found["vocab_size"], np.array(found["document_lengths"], dtype=np.int64))


def _content_key(texts: list[bytes], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {vocab_size} {len(texts)}".encode())
    for text in texts:
        digest.update(hashlib.sha256(text).digest())
    return digest.hexdigest()[:16]


def _build(folder: Path, texts: list[bytes], vocab_size: int) -> None:
    """Made aside and moved, so that what is found is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix="building_", dir=folder.parent))
    try:
        encoding = train(texts, vocab_size - 1)
        documents = (np.array(encoding.encode(text), dtype=np.int64) for text in texts)
        lengths = write_indexed_dataset(aside / "text", documents, eod=vocab_size - 1)
        described = {"vocab_size": vocab_size, "document_lengths": lengths.tolist()}
        (aside / "corpus.json").write_text(json.dumps(described))
        aside.replace(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


if __name__ == "__main__":
    print(build_corpus(Path(sys.argv[1])).prefix.parent)
