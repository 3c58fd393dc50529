"""What models of transformers see with ``attn_implementation="magi"``: the same as with eager attention."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from transformers import BloomConfig, MptConfig
from transformers import masking_utils as hf_masks

from megatron_magi.hf import log_probs
from megatron_magi.hf.attention import attention, layer_mask
from megatron_magi.hf.intervals import Intervals
from megatron_magi.hf.layer_masks import LayerMask
from megatron_magi.hf.mask_functions import inner_and_blocks
from megatron_magi.hf.shard import ShardMask, ShardOnes
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.packing import make_prefix_tree
from tests.hf.models import CONFIGS, VOCABULARY, make_model, packed_batch, padded_batch
from tests.hf.packed_functions import since_5_24, until_5_23


def dense(intervals, num_keys):
    keys = np.arange(num_keys)
    return ((keys >= intervals.lo[..., None]) & (keys < intervals.hi[..., None])).any(axis=0)


def seen_matrix(num_rows, num_keys):
    bits = st.lists(st.booleans(), min_size=num_rows * num_keys, max_size=num_rows * num_keys)
    return bits.map(lambda flat: np.array(flat).reshape(num_rows, num_keys))


@given(seen_matrix(6, 7), seen_matrix(6, 7))
def test_intervals_are_sets_of_keys(one, other):
    a, b = Intervals.of_dense(one), Intervals.of_dense(other)
    assert (dense(a, 7) == one).all()
    assert (dense(a & b, 7) == (one & other)).all()
    assert (dense(a | b, 7) == (one | other)).all()
    assert (dense_mask((a | b).mask(7)) == (one | other)).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 8))
def test_documents_with_windows_are_slices_of_them(lengths, window):
    total = sum(lengths)
    rows = np.arange(total)
    mask = Intervals.of(rows - window, rows + 1, total).within(np.cumsum([0, *lengths])).mask(total)
    assert (dense_mask(mask) == dense_mask(builders.sliding_window(left=window, right=0, doc_lengths=lengths))).all()


def test_a_long_document_is_few_slices():
    rows = np.arange(5000)
    assert len(Intervals.of(rows - 99, rows + 1, 5000).mask(5000).table) == 2


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)


def packed(function, *blocks, of=until_5_23, lengths=(7, 1, 1, 11)):
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].expand(2, -1)
    return of(function, positions(lengths), number, *blocks)


NO_PADDING = torch.zeros(2, dtype=torch.int64)
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, 1, -1, -1, -1, 2, 2, -1, -1, -1, -1]] * 2)
FUNCTIONS = {
    "causal": hf_masks.causal_mask_function,
    "full": hf_masks.bidirectional_mask_function,
    "sliding": hf_masks.sliding_window_causal_mask_function(5),
    "sliding both ways": hf_masks.sliding_window_bidirectional_mask_function(4),
    "chunked": hf_masks.chunked_causal_mask_function(6, NO_PADDING),
    "chunked after padding": hf_masks.chunked_causal_mask_function(6, torch.tensor([0, 4])),
    "packed": packed(hf_masks.causal_mask_function),
    "packed sliding": packed(hf_masks.sliding_window_causal_mask_function(4)),
    "packed chunked": packed(hf_masks.chunked_causal_mask_function(3, NO_PADDING)),
    "packed images": packed(hf_masks.causal_mask_function, hf_masks.blockwise_overlay(BLOCKS)),
    "packed, 5.24": packed(hf_masks.causal_mask_function, of=since_5_24),
    "packed chunked, 5.24": packed(hf_masks.chunked_causal_mask_function(3, NO_PADDING), of=since_5_24),
    "packed images, 5.24": packed(hf_masks.causal_mask_function, hf_masks.blockwise_overlay(BLOCKS), of=since_5_24),
    "images": hf_masks.or_masks(hf_masks.causal_mask_function, hf_masks.blockwise_overlay(BLOCKS)),
    "images in a window": hf_masks.or_masks(
        hf_masks.sliding_window_causal_mask_function(3), hf_masks.blockwise_overlay(BLOCKS)
    ),
    "blocks in two pieces": hf_masks.blockwise_overlay(BLOCKS.clamp(max=1)),
    "a user's": hf_masks.and_masks(hf_masks.causal_mask_function, lambda _b, _h, q, k: (q - k) % 3 == 0),
    "prefix": hf_masks.or_masks(hf_masks.causal_mask_function, lambda _b, _h, _q, k: k < 6),
}
PADDING = {
    "none": None,
    "right": torch.arange(20)[None] < torch.tensor([[13], [20]]),
    "left": torch.arange(20)[None] >= torch.tensor([[0], [4]]),
    "holes": (torch.arange(20)[None] % 7 != torch.tensor([[3], [5]])),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_layer_sees_what_sdpa_would_see(name, padding):
    function, attention_mask = FUNCTIONS[name], PADDING[padding]
    options = {"batch_size": 2, "mask_function": function, "attention_mask": attention_mask}
    for q_offset in (0, 13) if "packed" not in name else (0,):
        lengths = {"q_length": 20 - q_offset, "kv_length": 20, "q_offset": q_offset}
        expected = hf_masks.sdpa_mask(**options, **lengths, allow_is_causal_skip=False)
        mask = layer_mask(**options, **lengths).mask
        ours = torch.from_numpy(dense_mask(mask)).view(2, 20 - q_offset, 2, 20)
        for i in range(2):
            assert torch.equal(ours[i, :, i], expected.expand(2, -1, -1, -1)[i, 0]), i
            assert not ours[i, :, 1 - i].any()


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("name", [*CONFIGS, "gemma4_shared", "gemma3n_shared"])
def test_a_model_computes_what_it_does_with_eager_attention(name, kind):
    batch = {"packed": packed_batch, "padded": padded_batch}[kind]()
    del batch["labels"]
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    eager, magi = make_model(name, "eager").eval(), make_model(name).eval()
    with torch.no_grad():
        if name in ("gpt_oss", "llama4") and kind == "packed":  # which do not look at positions everywhere
            tokens, bounds = batch["input_ids"], [0, 17, 18, 42, 53]
            documents = itertools.pairwise(bounds)
            expected = torch.cat([eager(tokens[:, a:b]).logits for a, b in documents], dim=1)
        else:
            expected = eager(**batch, use_cache=False).logits
        assert (magi(**batch, use_cache=False).logits - expected)[seen].abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_model_under_autocast_computes_what_it_does_with_eager_attention(name):
    logits = []
    for kind in ("magi", "eager"):
        model = make_model(name, kind)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**padded_batch(), use_cache=False)
        out.loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
        logits.append(out.logits.float()[padded_batch()["attention_mask"].bool()])
    assert (logits[0] - logits[1]).abs().mean() < 0.02 * logits[1].abs().mean()


@pytest.mark.parametrize("name", ["gemma3", "llama4", "gemma4_shared", "gemma3n_shared"])
def test_generation_with_a_cache_gives_the_tokens_of_eager_attention(name):
    batch = padded_batch()
    prompt = {"input_ids": batch["input_ids"][:1], "attention_mask": batch["attention_mask"][:1]}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    eager, magi = (make_model(name, kind).eval().generate(**prompt, **options) for kind in ("eager", "magi"))
    assert torch.equal(eager, magi)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_generation_with_a_cache_of_fixed_size_is_that_of_eager_attention(name, padding):
    seen = (torch.arange(12) >= torch.tensor([[0], [padding]])).long()
    asked = {"max_new_tokens": 6, "cache_implementation": "static", "disable_compile": True}
    asked |= {"attention_mask": seen, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    expected, ours = (
        torch.stack(make_model(name, kind).eval().generate(torch.arange(1, 13).repeat(2, 1), **asked).logits)
        for kind in ("eager", "magi")
    )
    assert (ours - expected).abs().max() < 1e-5


def test_a_square_mask_of_a_users_is_taken():
    batch = packed_batch((20,))
    seen = torch.rand(1, 1, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.5
    seen |= torch.eye(20, dtype=torch.bool)
    bias = torch.zeros(1, 1, 20, 20).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = make_model("llama", "eager")(batch["input_ids"], attention_mask=bias).logits
        for attention_mask in (bias, seen):
            ours = make_model("llama")(batch["input_ids"], attention_mask=attention_mask).logits
            assert (ours - expected).abs().max() < 1e-5


def test_a_mask_as_slices_takes_the_place_of_the_models_own():
    batch = packed_batch((20,))
    mask = builders.block_causal(20, block_size=6)
    with torch.no_grad():
        expected = make_model("llama", "eager")(
            batch["input_ids"],
            attention_mask=torch.zeros(1, 1, 20, 20).masked_fill(
                ~torch.from_numpy(dense_mask(mask)), torch.finfo(torch.float32).min
            ),
        ).logits
        ours = make_model("llama")(batch["input_ids"], magi_mask=mask).logits
    assert (ours - expected).abs().max() < 1e-5


def test_a_dense_mask_of_keys_alone_is_that_of_every_row():
    value = torch.arange(12.0).view(2, 1, 6, 1).expand(2, 2, 6, 8)
    hidden = torch.zeros(2, 1, 1, 6)
    hidden[0, ..., 4:] = torch.finfo(torch.float32).min
    tensors = {"query": torch.ones(2, 4, 6, 8), "key": torch.ones(2, 2, 6, 8), "value": value}
    for attention_mask in (hidden, hidden == 0):
        out, _ = call(**tensors, attention_mask=attention_mask)
        assert (out[0] - 1.5).abs().max() < 1e-6 and (out[1] - 8.5).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "gemma3"])
def test_cumulative_lengths_alone_separate_documents(name):
    tokens = packed_batch((9, 30, 13))["input_ids"]
    bounds = torch.tensor([0, 9, 39, 52], dtype=torch.int32)
    model = make_model(name).eval()
    with torch.no_grad():
        packed = model(tokens, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=30, max_length_k=30).logits
        for a, b in itertools.pairwise(bounds.tolist()):
            assert (packed[:, a:b] - model(tokens[:, a:b]).logits).abs().max() < 1e-5, a


LENGTHS = [7, 1, 12, 9, 11]
UNPACKED = {name: function for name, function in FUNCTIONS.items() if not name.startswith(("packed", "chunked after"))}


@pytest.mark.parametrize("padding", ["none", "ones", "right"])
@pytest.mark.parametrize("name", UNPACKED)
def test_documents_by_lengths_are_those_by_positions(name, padding):
    function, cu_seq_lens = UNPACKED[name], torch.tensor([0, *LENGTHS]).cumsum(0)
    attention_mask = {"none": None, "ones": torch.ones(2, 20, dtype=torch.bool), "right": PADDING["right"]}[padding]
    asked = {"batch_size": 2, "q_length": 20, "kv_length": 20, "attention_mask": attention_mask}
    if padding == "right" and name in ("a user's", "prefix", "blocks in two pieces"):
        with pytest.raises(ValueError, match=r"^cu_seq_lens_q: packed documents with padding"):
            layer_mask(**asked, mask_function=function).of_layer(None, cu_seq_lens)
        return
    mask = layer_mask(**asked, mask_function=function).of_layer(None, cu_seq_lens)
    rows = [[7, 1, 12], [9, 11]]
    ours = torch.from_numpy(dense_mask(mask)).view(2, 20, 2, 20)
    for i, own in enumerate(rows):
        number = torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own))[None].expand(2, -1)
        positions = torch.cat([torch.arange(n) for n in own])[None].expand(2, -1)
        inner, blocks = inner_and_blocks(function)
        seen = since_5_24(inner, positions, number, *blocks)
        expected = hf_masks.sdpa_mask(**asked, mask_function=seen, allow_is_causal_skip=False)
        assert torch.equal(ours[i, :, i], expected.expand(2, -1, -1, -1)[i, 0]), i
        assert not ours[i, :, 1 - i].any()


def test_chunks_of_documents_by_lengths_begin_after_their_padding():
    function, cu_seq_lens = hf_masks.chunked_causal_mask_function(6, torch.tensor([4])), torch.tensor([0, 12, 20])
    mask = layer_mask(1, 20, 20, mask_function=function, attention_mask=torch.arange(20)[None] >= 4)
    chunk = np.repeat([0, 1, 2, 3, 4], [4, 6, 2, 6, 2])
    expected = np.tril(chunk[:, None] == chunk) & (np.arange(20) >= 4)
    assert (dense_mask(mask.of_layer(None, cu_seq_lens)) == expected).all()


def test_documents_by_lengths_need_all_tokens():
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: .* cache"):
        layer_mask(1, 2, 20, q_offset=18).of_layer(None, torch.tensor([0, 20]))


def test_the_last_rows_of_a_mask_are_those_of_its_documents():
    mask, cu_seq_lens = layer_mask(2, 20, 20), torch.tensor([0, *LENGTHS]).cumsum(0)
    for documents in (None, cu_seq_lens):
        whole = dense_mask(mask.of_layer(None, documents)).reshape(2, 20, 40)
        for rows, kept in ((slice(-3, None), 3), (slice(0, None), 20), (slice(15, None), 5)):
            part = mask[:, :, rows, :].of_layer(None, documents)
            assert (dense_mask(part) == whole[:, -kept:].reshape(-1, 40)).all()
        assert (
            dense_mask(mask[:, :, 5:, :][:, :, -2:, :].of_layer(None, documents)).reshape(2, 2, 40) == whole[:, -2:]
        ).all()


def call(**changed):
    module = torch.nn.Module()
    shapes = {"query": (1, 4, 6, 8), "key": (1, 2, 6, 8), "value": (1, 2, 6, 8)}
    arguments = {name: torch.ones(shape) for name, shape in shapes.items()}
    return attention(module, **{**arguments, "attention_mask": None, **changed})


def test_no_document_goes_over_the_end_of_a_sequence():
    value = torch.arange(12.0).view(2, 1, 6, 1).expand(2, 2, 6, 8)
    query, key = torch.ones(2, 4, 6, 8), torch.ones(2, 2, 6, 8)
    for bounds in ([0, 12], [0, 6, 12]):
        out, _ = call(query=query, key=key, value=value, cu_seq_lens_q=torch.tensor(bounds))
        assert (out[0, :, 0, 0] - torch.arange(6) / 2).abs().max() < 1e-6
        assert (out[1, :, 0, 0] - 6 - torch.arange(6) / 2).abs().max() < 1e-6


def test_no_mask_means_causal_attention_unless_the_module_says_otherwise():
    value = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 2, 6, 8)
    assert torch.allclose(call(value=value)[0][0, :, 0, 0], torch.arange(6) / 2)
    assert torch.allclose(call(value=value, is_causal=False)[0][0, :, 0, 0], torch.full((6,), 2.5))
    assert call(value=value, sliding_window=2)[0][0, 5, 0, 0] == pytest.approx(4.5)


BIAS = torch.zeros(1, 1, 6, 6)
OF_FEWER_KEYS = LayerMask([Intervals.of_dense(np.tri(6, 5, dtype=bool))], 5)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"dropout": 0.1}, "dropout: attention dropout"),
        ({"head_mask": torch.ones(4)}, "head_mask: not supported"),
        ({"output_attentions": True}, "output_attentions: not supported"),
        ({"block_indices": torch.zeros(1, 2, 6, 1, dtype=torch.int64)}, "block_indices: not supported"),  # MiniMax-M3
        ({"indices": torch.zeros(1, 6, 2, dtype=torch.int64)}, "indices: .* is not known here"),  # DeepSeek-V3.2
        ({"sinks": torch.zeros(1, 4, 6, 1)}, "sinks: not supported"),  # Inkling 2
        ({"attention_mask": BIAS + 0.5}, "attention_mask: a bias"),
        (
            {"attention_mask": torch.eye(6).bool().expand(1, 4, 6, 6).clone().index_fill(1, torch.tensor(2), True)},
            "heads",
        ),
        ({"attention_mask": BIAS[:, :, 1:]}, "attention_mask: expected"),
        ({"attention_mask": "causal"}, "attention_mask: expected"),
        ({"attention_mask": OF_FEWER_KEYS}, "attention_mask: it is over 5 keys, the layer has 6; .* compressed"),
        ({"magi_mask": builders.causal(5)}, "magi_mask: expected a mask over 6 tokens"),
        ({"magi_mask": torch.ones(6, 6)}, "magi_mask: expected an AttnMask over 6 tokens, got Tensor"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q: expected numbers that rise from 0 to 6"),
        ({"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])}, "cu_seq_lens_k"),
    ],
)
def test_what_cannot_be_expressed_is_an_error(changed, message):
    with pytest.raises(ValueError, match=message):
        call(**changed)


def test_a_function_of_a_users_over_many_tokens_is_an_error():
    with pytest.raises(ValueError, match=r"mask_function: .* is none of transformers' own"):
        layer_mask(1, 20000, 20000, mask_function=lambda _b, _h, q, k: q >= k)


def test_what_transformers_composes_is_read_off_at_any_length(monkeypatch):
    monkeypatch.setattr("megatron_magi.hf.attention.MAX_DENSE", 0)
    for name, function in FUNCTIONS.items():
        if name in ("blocks in two pieces", "a user's", "prefix"):
            with pytest.raises(ValueError, match=r"^mask_function: "):
                layer_mask(2, 20, 20, mask_function=function)
        else:
            assert layer_mask(2, 20, 20, mask_function=function).mask.area > 0, name


def test_a_mask_has_the_documents_of_the_positions_that_it_is_asked_with():
    mask = layer_mask(1, 8, 8)
    for lengths in ([8], [3, 5], [6, 1, 1], [3, 5]):
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        found = mask.of_layer(positions, None)
        assert (dense_mask(found) == dense_mask(builders.varlen(doc_lengths=lengths))).all()


def test_rollouts_need_a_model_that_attends_by_their_mask_and_a_tree():
    tree = make_prefix_tree([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(ValueError, match=r"^attn_implementation: expected 'magi', got 'eager'"):
        log_probs(make_model("llama", "eager"), tree)
    with pytest.raises(ValueError, match=r"^tree: expected a PrefixTree, .* got list"):
        log_probs(make_model("llama"), [[1, 2, 3]])


def test_a_mask_in_place_of_a_windows_is_an_error():
    windows = LayerMask([Intervals.of(0, 6, 6)], 6, has_window=True)
    with pytest.raises(ValueError, match="magi_mask: the model has layers with a window"):
        call(attention_mask=windows, magi_mask=builders.causal(6))


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_model_with_attention_of_its_own_is_refused(name):
    config = {
        "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4),
        "mpt": MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=1, n_heads=4),
    }[name]
    with pytest.raises((ValueError, AttributeError), match=r"^attention_mask: this model computes attention by code"):
        make_model(config)(input_ids=torch.arange(8)[None], use_cache=False)


@pytest.mark.parametrize("mask", [OF_FEWER_KEYS, ShardMask(None, None)], ids=["layer", "shard"])
def test_a_mask_that_a_model_takes_for_a_tensor_is_an_error(mask):
    scores = torch.zeros(1, 4, 6, 6)
    uses = [lambda: scores + mask, lambda: scores.masked_fill(mask, 0.0), lambda: mask[:, :, :6], lambda: 1.0 - mask]
    uses += [lambda: mask[:, :, :, :6], lambda: mask[:, :, :4, :], lambda: mask[0]]
    for use in [*uses, lambda: torch.where(mask, scores, 0.0), lambda: mask.dtype]:
        with pytest.raises((ValueError, AttributeError), match=r"^attention_mask: this model computes attention by"):
            use()


def test_views_of_a_shards_mask_lead_to_the_shard_and_results_with_other_tensors_are_plain():
    ones, shard = torch.ones(2, 3, dtype=torch.bool).as_subclass(ShardOnes), object()
    ones.magi_shard = shard
    assert ones.view(1, -1)[:, None].to(torch.int64).magi_shard is shard
    assert type(ones.view(-1)._base) is type(ones._base.view(-1)) is torch.Tensor
    for out in (ones * torch.ones(2, 3), torch.where(input=torch.ones(2, 3), other=torch.zeros(2, 3), condition=ones)):
        assert type(out) is torch.Tensor and out.tolist() == [[1.0] * 3] * 2
