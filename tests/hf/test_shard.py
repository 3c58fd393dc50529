"""Masks of batches of several rows of documents, as they are sharded: the pairs that each row's documents show."""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from transformers import masking_utils

from megatron_magi.hf import shard_batch
from megatron_magi.mask.dense import dense_mask
from tests.hf.models import CONFIGS
from tests.hf.packed_functions import since_5_24

ROWS = ((9, 1, 14), (24,), (5, 19))
"""Lengths of the documents in each row of a batch."""
WINDOW, CHUNK = 7, 9
LAYERS = {
    "causal": (masking_utils.causal_mask_function, lambda i, j: j <= i),
    "window": (
        masking_utils.sliding_window_causal_mask_function(WINDOW),
        lambda i, j: (j <= i) & (i - j < WINDOW),
    ),
    "chunks": (
        masking_utils.chunked_causal_mask_function(CHUNK, torch.zeros(len(ROWS), dtype=torch.int64)),
        lambda i, j: (j <= i) & (i // CHUNK == j // CHUNK),
    ),
}
"""Mask functions of transformers, and which key j a query i of the same document sees."""


def expected(sees, rows=ROWS):
    lengths = [n for row in rows for n in row]
    out = np.zeros((sum(lengths), sum(lengths)), dtype=bool)
    for start, n in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        out[start : start + n, start : start + n] = sees(np.arange(n)[:, None], np.arange(n))
    return out


def batch_of(rows, **more):
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return {"input_ids": torch.zeros_like(positions), "position_ids": positions, **more}


@pytest.mark.parametrize("kind", LAYERS)
def test_each_row_of_a_batch_has_its_own_documents(kind):
    function, sees = LAYERS[kind]
    _, shard = shard_batch(batch_of(ROWS), None, CONFIGS["llama"])
    np.testing.assert_array_equal(dense_mask(shard.layer_mask(function).key.mask), expected(sees))


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_that_share_their_positions_are_documents_each(kind):
    function, sees = LAYERS[kind]
    tokens = {"input_ids": torch.zeros(3, 24, dtype=torch.int64)}
    for batch in (tokens, {**tokens, "position_ids": torch.arange(24)[None]}):
        _, shard = shard_batch(batch, None, CONFIGS["llama"])
        want = expected(sees, [(24,)] * 3)
        np.testing.assert_array_equal(dense_mask(shard.layer_mask(function).key.mask), want)


def test_bounds_of_documents_confine_every_layer_where_positions_do_not_tell_them():
    bounds = torch.tensor([0, 9, 10, 24, 48, 53, 72], dtype=torch.int32)
    batch = batch_of([(24,)] * 3, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    local, shard = shard_batch(batch, None, CONFIGS["llama"])
    np.testing.assert_array_equal(dense_mask(shard.key.mask), expected(lambda i, j: j <= i))
    assert not any(name.startswith("cu_") for name in local), "bounds of the whole batch are none of its rows'"


@pytest.mark.parametrize(
    ("model", "kind"), [("llama", "causal"), ("gemma3", "causal"), ("mistral", "window"), ("llama4", "causal")]
)
def test_tokens_are_balanced_for_the_layers_that_see_most(model, kind):
    _, shard = shard_batch(batch_of(ROWS), None, CONFIGS[model])
    np.testing.assert_array_equal(dense_mask(shard.key.mask), expected(LAYERS[kind][1]))


def test_tokens_are_balanced_for_chunks_where_all_layers_have_them():
    config = copy.deepcopy(CONFIGS["llama4"])
    config.layer_types = ["chunked_attention"] * 2
    _, shard = shard_batch(batch_of(ROWS), None, config)
    np.testing.assert_array_equal(dense_mask(shard.key.mask), expected(LAYERS["chunks"][1]))


def test_tokens_come_with_positions_labels_and_ones_of_their_rows():
    labels = torch.arange(72).view(3, 24)
    local, shard = shard_batch(batch_of(ROWS, labels=labels), None, CONFIGS["llama"])
    assert (shard.batch_size, shard.seqlen) == (3, 24)
    assert local["position_ids"].tolist() == [[i for row in ROWS for n in row for i in range(n)]]
    assert local["labels"].tolist() == [list(range(72))]
    assert local["shift_labels"].view(3, 24)[:, :-1].equal(labels[:, 1:])
    assert local["shift_labels"].view(3, 24)[:, -1].tolist() == [-100] * 3, "the next row is no successor"
    assert local["attention_mask"].dtype == torch.bool and local["attention_mask"].shape == (1, 72)
    assert shard.undispatch(local["labels"]).equal(labels)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("positions", [[*range(5), *range(3, 14), *range(8)], [*range(5, 29)]], ids=["several", "one"])
def test_documents_whose_positions_begin_elsewhere_are_those_of_one_rank(kind, positions):
    function, _ = LAYERS[kind]
    position_ids = torch.tensor([positions] * 3)
    _, shard = shard_batch({"input_ids": position_ids * 0, "position_ids": position_ids}, None, CONFIGS["llama"])
    number = masking_utils.find_packed_sequence_indices(position_ids)
    if number is not None:
        function = since_5_24(function, position_ids, number)
    seen = masking_utils.sdpa_mask(3, 24, 24, mask_function=function, allow_is_causal_skip=False).expand(3, -1, -1, -1)
    found = dense_mask(shard.layer_mask(LAYERS[kind][0]).key.mask).reshape(3, 24, 3, 24)
    for i in range(3):
        np.testing.assert_array_equal(found[i, :, i], seen[i, 0].numpy())


def test_all_rows_of_a_shards_mask_are_itself_and_fewer_are_refused():
    _, shard = shard_batch(batch_of(ROWS), None, CONFIGS["llama"])
    mask = shard.layer_mask(masking_utils.causal_mask_function)
    assert mask[:, :, 0:, :] is mask
    with pytest.raises(ValueError, match=r"^logits_to_keep: "):
        mask[:, :, -1:, :]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_by_either_of_its_names_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name}: a cache cannot be sharded"):
        shard_batch(batch_of(ROWS, **{name: object()}), None, CONFIGS["llama"])


@pytest.mark.parametrize("keep", [1, torch.tensor([71])])
def test_some_logits_alone_would_be_those_of_other_tokens(keep):
    shard_batch(batch_of(ROWS, logits_to_keep=0), None, CONFIGS["llama"])
    with pytest.raises(ValueError, match=r"^logits_to_keep: "):
        shard_batch(batch_of(ROWS, logits_to_keep=keep), None, CONFIGS["llama"])
