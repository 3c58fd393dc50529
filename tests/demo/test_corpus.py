"""The demo's text: the standard library, one file a document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_magi.demo import corpus as corpus_module
from megatron_magi.demo.bpe import BytePairEncoding, train
from megatron_magi.demo.corpus import Corpus, build_corpus, standard_library_files
from megatron_magi.mcore.dataset_writer import write_indexed_dataset

_MAX_BYTES = 400
_VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_corpus(tmp_path_factory.mktemp("corpus"), max_document_bytes=_MAX_BYTES, vocab_size=_VOCAB_SIZE)


def test_documents_are_files_and_end_with_eod(corpus: Corpus) -> None:
    files = standard_library_files(_MAX_BYTES)
    assert len(corpus.document_lengths) == len(files) > 10
    ends = np.flatnonzero(corpus.tokens() == corpus.eod) + 1
    assert np.array_equal(ends, np.cumsum(corpus.document_lengths))
    assert corpus.num_tokens == len(corpus.tokens())


def test_tokens_decode_to_the_files(corpus: Corpus) -> None:
    files = standard_library_files(_MAX_BYTES)
    encoding = train([path.read_bytes() for path in files], _VOCAB_SIZE - 1)
    documents = np.split(corpus.tokens(), np.cumsum(corpus.document_lengths))
    for path, document in zip(files, documents, strict=False):
        assert encoding.decode(document[:-1]) == path.read_bytes()


def test_building_twice_gives_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    again = build_corpus(tmp_path, max_document_bytes=_MAX_BYTES, vocab_size=_VOCAB_SIZE)
    assert again.prefix.parent.name == corpus.prefix.parent.name
    for suffix in (".bin", ".idx"):
        assert again.prefix.with_suffix(suffix).read_bytes() == corpus.prefix.with_suffix(suffix).read_bytes()


def test_what_was_built_is_found_again(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_build", None)
    cache = corpus.prefix.parents[1]
    assert build_corpus(cache, max_document_bytes=_MAX_BYTES, vocab_size=_VOCAB_SIZE).prefix == corpus.prefix


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_module, "write_indexed_dataset", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(tmp_path, max_document_bytes=_MAX_BYTES, vocab_size=_VOCAB_SIZE)
    assert list(tmp_path.iterdir()) == []


def test_files_are_sorted_small_and_not_empty() -> None:
    files = standard_library_files(1000)
    assert files == sorted(files)
    assert all(1 <= path.stat().st_size <= 1000 for path in files)
    assert not any({"site-packages", "__pycache__"} & set(path.parts) for path in files)


def test_megatron_reads_the_documents(corpus: Corpus) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(corpus.prefix))
    assert np.array_equal(dataset.sequence_lengths, corpus.document_lengths)
    assert np.array_equal(
        np.concatenate([dataset[i] for i in range(3)]), corpus.tokens()[: sum(dataset.sequence_lengths[:3])]
    )


@pytest.mark.parametrize("vocab_size", [256, 65537])
def test_vocabulary_size_out_of_range_is_refused(vocab_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        build_corpus(tmp_path, vocab_size=vocab_size)


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("document", [np.array([256]), np.array([-1]), np.zeros((2, 2), dtype=np.int64), [1.5]])
def test_documents_that_are_no_rows_of_tokens_are_refused(document: np.ndarray | list, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="documents: document 1"):
        write_indexed_dataset(tmp_path / "text", [np.array([1]), document], eod=256)


def test_an_empty_document_is_its_eod(tmp_path: Path) -> None:
    lengths = write_indexed_dataset(tmp_path / "text", [np.array([], dtype=np.int64), [5]], eod=256)
    assert lengths.tolist() == [1, 2]


def test_the_most_frequent_pair_is_joined_first() -> None:
    encoding = train([b"abab abab", b"abc"], 257)
    assert encoding.merges == [(ord("a"), ord("b"))]
    assert encoding.encode(b"xab") == [ord("x"), 256]


def test_training_stops_when_nothing_repeats() -> None:
    assert train([b"abc"], 1000).vocab_size == 256


@pytest.mark.parametrize("text", [b"", b"\x00\xff\n\t x", "größe = 1  # ✓".encode(), b"    if x:\n        pass\n"])
def test_any_bytes_survive_encoding(text: bytes) -> None:
    encoding = train([b"if x: pass\n        pass"] * 3, 280)
    assert encoding.decode(encoding.encode(text)) == text
    assert BytePairEncoding([]).encode(text) == list(text)
