"""Masks of microbatches: by documents and fields of the data set, over several sequences."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi.mask import AttnMask
from megatron_magi.mask.dense import dense_mask
from megatron_magi.mask.microbatch import Microbatch, document_bounds
from megatron_magi.mask.source import LayerMasks, MaskSource, load_function

SEQLEN = 12
ROWS = [[0, 5, 12, 12], [0, 3, 4, 12]]


def _batch(**fields: object) -> Microbatch:
    tokens = np.arange(2 * SEQLEN).reshape(2, SEQLEN)
    return Microbatch(tokens, document_bounds(tokens, ROWS), {"tokens": tokens, **fields})


def _dense(text: str, **fields: object) -> np.ndarray:
    return dense_mask(MaskSource.parse(text)(_batch(**fields)))


def _documents() -> np.ndarray:
    """Which document each token is in."""
    return np.repeat(np.arange(5), [5, 7, 3, 1, 8])


def _where(rule) -> np.ndarray:
    """The matrix of ``rule(q, k)``, inside documents; positions count from the document's start."""
    doc = _documents()
    start = np.searchsorted(doc, doc)
    position = np.arange(2 * SEQLEN) - start
    return (doc[:, None] == doc) & rule(position[:, None], position[None, :])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("documents", lambda q, k: k <= q),
        ("documents:causal=false", lambda q, k: k == k),
        ("sliding_window:left=2", lambda q, k: (k <= q) & (k >= q - 2)),
        ("sliding_window:left=1,right=1,global_tokens=1", lambda q, k: (k <= q + 1) & ((k >= q - 1) | (k < 1))),
        ("block_causal:block_size=3", lambda q, k: k // 3 <= q // 3),
        ("prefix_lm:length=4", lambda q, k: (k <= q) | ((k < 4) & (q < 4))),
    ],
)
def test_name_means_a_rule_inside_documents(text: str, rule) -> None:
    assert np.array_equal(_dense(text), _where(rule))


def test_causal_is_by_sequences_whatever_the_documents() -> None:
    index = np.arange(2 * SEQLEN)
    expected = (index[:, None] // SEQLEN == index // SEQLEN) & (index <= index[:, None])
    assert np.array_equal(_dense("causal"), expected)


def test_prefixes_of_the_data_set_are_in_the_order_of_documents() -> None:
    lengths = np.array([4, 0, 2, 1, 8])[_documents()][:, None]
    expected = _where(lambda q, k: (k <= q) | ((k < lengths) & (q < lengths)))
    assert np.array_equal(_dense("prefix_lm", prefix_lengths=[[4, 0, 0], [2, 1, 8]]), expected)


def test_tree_sees_ancestors_in_its_own_sequence_and_unused_tokens_nothing() -> None:
    dense = _dense(
        "prefix_tree", node_lengths=[[3, 2, 4, 0], [1, 2, 3, 4]], node_parents=[[-1, 0, 0, -1], [-1, 0, 1, 0]]
    )
    expected = np.zeros((24, 24), dtype=bool)
    paths = [[0, 3], [0, 3, 3, 5], [0, 3, 5, 9], [12, 13], [12, 13, 13, 15], [12, 15, 15, 18], [12, 13, 18, 22]]
    for path in paths:
        tokens = [t for a, b in zip(path[::2], path[1::2], strict=True) for t in range(a, b)]
        for i, token in enumerate(tokens):
            expected[token, tokens[: i + 1]] = True
    assert np.array_equal(dense, expected)


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("prefix_lm", {}, "prefix_lengths: the data set has no such field, it has tokens"),
        ("prefix_lm", {"prefix_lengths": [[1, 2, 3], [1, 2, 3]]}, "sequence 0 has 2 documents"),
        ("prefix_lm", {"prefix_lengths": [[1, 2]]}, "expected 2 rows, got 1"),
        ("prefix_tree", {"node_lengths": [[9, 9]] * 2, "node_parents": [[-1, 0]] * 2}, "at most 12 tokens"),
        ("prefix_tree", {"node_lengths": [[2, 2]] * 2, "node_parents": [[1, 0]] * 2}, "without a cycle"),
        ("prefix_tree", {"node_lengths": [[2, 2]] * 2, "node_parents": [[-1, 2]] * 2}, "parents in"),
    ],
)
def test_fields_that_do_not_fit_are_named_with_the_mask(text: str, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^mask: '{text}' raised ValueError: .*{message}"):
        _dense(text, **fields)


@pytest.mark.parametrize("rows", [[[0, 13], [0, 12]], [[1, 12], [0, 12]], [[0, 5, 4, 12], [0, 1, 2, 12]]])
def test_bounds_outside_of_a_sequence_are_refused(rows: list) -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens: the bounds of sequence 0 must rise from 0 to at most 12"):
        document_bounds(np.zeros((2, 12), np.int64), rows)


def test_bounds_of_another_number_of_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected 2 rows of bounds, got shape \[1, 2\]"):
        document_bounds(np.zeros((2, 12), np.int64), [[0, 12]])


def short(batch: Microbatch, by: int = 1) -> AttnMask:
    """A mask that is too short."""
    return AttnMask([], batch.total_seqlen - by)


def no_batch() -> None:
    """A function that is not called as masks are."""


def no_mask(batch: Microbatch) -> list:
    """No mask at all."""
    return []


def test_function_is_called_with_its_arguments_and_its_result_is_checked(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^magi_mask: '.*:short:by=4' returned a mask of 20 queries .* 2 sequences"):
        MaskSource.parse(f"{__name__}:short:by=4", "magi_mask")(_batch())
    with pytest.raises(ValueError, match=r"^magi_mask: '.*:no_mask' returned a list, expected an AttnMask"):
        MaskSource.parse(f"{__name__}:no_mask", "magi_mask")(_batch())
    file = tmp_path / "mine.py"
    file.write_text("from megatron_magi.mask.builders import full\ndef f(batch): return full(batch.total_seqlen)\n")
    assert MaskSource.parse(f"{file}:f")(_batch()).area == 24 * 24


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks", "is none of block_causal, causal, .* nor MODULE:FUNCTION"),
        ("slidingwindow:left=3", "is none of block_causal, causal, .* nor MODULE:FUNCTION"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        (f"{__name__}:absent", "has no function 'absent'"),
        ("block_causal", "missing a required argument: 'block_size'"),
        ("block_causal:size=3", "block_causal takes block_size: int, as in block_causal:block_size=VALUE$"),
        ("causal:left=3", "unexpected keyword argument 'left'; causal takes no arguments$"),
        (f"{__name__}:no_batch", "too many positional arguments; .* a batch and nothing else, and takes ..$"),
        ("causal:", "expected KEY=VALUE"),
        ("sliding_window:left=1,left=2", "once for each KEY, got 'left=2'"),
        ("sliding_window:left=1:right=2", "separated by commas, got 'left=1:right=2'"),
        ("sliding_window:left=far", "raised ValueError: left: expected an integer, got 'far'"),
        ("block_causal:block_size=0", "raised ValueError: block_size: expected at least 1"),
        ("documents:causal=no", "raised ValueError: causal: expected True or False, got 'no'"),
        ("prefix_lm:length=-1", "raised ValueError: prefix_lengths: prefix 0 has -1 tokens"),
    ],
)
def test_text_that_names_no_mask_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^magi_mask: .*({message})"):
        MaskSource.parse(text, "magi_mask")


def test_a_module_that_fails_shows_its_own_error(tmp_path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_function(f"{file}:f", "magi_mask")


def test_layers_share_masks_and_the_default_one_is_balanced_for() -> None:
    default, window = MaskSource.parse("causal"), MaskSource.parse("sliding_window:left=4")
    masks = LayerMasks(default, [window, None, window])
    assert masks.primary == default
    assert masks.sources == (default, window)
    assert [masks.of(n) for n in (1, 2, 3, 4)] == [window, default, window, default]
    assert LayerMasks(default, [window, window]).primary == window
    assert LayerMasks(windows=[(4, 0), (4, 0)]).primary == LayerMasks().of(1, (4, 0))
    assert LayerMasks(windows=[(4, 0), None]).primary == MaskSource("documents")
