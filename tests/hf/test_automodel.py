"""The functions of NeMo Automodel: masks, batches, attention, and two models side by side on two ranks."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from torch.distributed.device_mesh import init_device_mesh

from megatron_magi.api import get_position_ids, undispatch
from megatron_magi.hf import automodel
from megatron_magi.hf.automodel import AttnMaskSpec, MagiState, make_magi_attn_func, setup_magi
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.testing.spawn import run_ranks
from tests.dense_attention import dense_attention
from tests.hf.models import VOCABULARY, make_model, packed_batch
from tests.packing.tiny_decoder import VOCABULARY as FEW
from tests.packing.tiny_decoder import TinyDecoder

HEADS = SimpleNamespace(num_attention_heads=2, hidden_size=16, num_key_value_heads=None)
TREE = ([12, 5, 4, 3], [[0, 1], [0, 2, 3], [0, 2]])


def test_a_specification_is_the_mask_of_its_builder():
    for spec, mask in (
        (AttnMaskSpec.causal(9), builders.causal(9)),
        (AttnMaskSpec.varlen([4, 3, 2]), builders.varlen(doc_lengths=[4, 3, 2], causal=True)),
        (AttnMaskSpec.varlen([4, 3], causal=False), builders.varlen(doc_lengths=[4, 3], causal=False)),
        (AttnMaskSpec.prefix_tree(*TREE)[0], builders.prefix_tree(*TREE)[0]),
    ):
        assert spec.mask == mask and AttnMaskSpec.of(mask).fingerprint() == spec.fingerprint()
        assert hash(spec.fingerprint()) == hash(AttnMaskSpec(*vars(spec).values()).fingerprint())
    by_hand = AttnMaskSpec([[0, 4], (4, 9)], [[0, 4], (0, 9)], ["causal", "causal"], 9)
    assert by_hand.mask.area == builders.causal(9).area
    assert by_hand.fingerprint() != AttnMaskSpec.causal(9).fingerprint() != AttnMaskSpec.causal(10).fingerprint()
    assert AttnMaskSpec.prefix_tree(*TREE)[1] == [
        [[0, 12], [12, 17]],
        [[0, 12], [17, 21], [21, 24]],
        [[0, 12], [17, 21]],
    ]


class Dotted:
    """A configuration whose ``get`` takes dotted names alone."""

    def __init__(self, **settings):
        self.settings = {name.replace("__", "."): value for name, value in settings.items()}

    def get(self, name, default=None):
        return self.settings.get(name, default)


def test_the_state_is_as_the_configuration_says(caplog):
    assert setup_magi({"model": {"attn_implementation": "sdpa"}}, None) == MagiState()
    with caplog.at_level(logging.INFO):
        state = setup_magi({"model": {"attn_implementation": "magi"}}, None, label="the draft model")
    assert state == MagiState(enabled=True) and state.hf_dispatch and "the draft model" in caplog.text
    custom = setup_magi(Dotted(model__backend__attn="magi"), None, domain="vlm")
    assert custom == MagiState(enabled=True, custom=True, domain="vlm") and not custom.hf_dispatch
    assert setup_magi(SimpleNamespace(model=SimpleNamespace(attn_implementation="magi")), None).enabled
    assert automodel.get_cp_group(SimpleNamespace(mesh_dim_names=("dp",))) is None


def qkv(*shape):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]


def test_attention_takes_its_mask_from_the_call_or_from_its_state():
    state = MagiState(enabled=True, custom=True)
    attend, other = make_magi_attn_func(0.3, state), make_magi_attn_func(0.3, MagiState(enabled=True, custom=True))
    tensors, bounds = qkv(24), torch.tensor([0, 10, 24])

    def expected(mask):
        return dense_attention(*tensors, dense_mask(mask), softmax_scale=0.3)[0]

    causal, tree = builders.causal(24), AttnMaskSpec.prefix_tree(*TREE)[0]
    documents = builders.varlen(bounds, causal=True)
    torch.testing.assert_close(attend(*tensors), expected(causal))
    torch.testing.assert_close(attend(*tensors, cu_seqlens=bounds, max_seqlen=14), expected(documents))
    torch.testing.assert_close(attend(*tensors, cu_seqlens_q=bounds, qkv_format="thd"), expected(documents))
    torch.testing.assert_close(attend(*tensors, magi_attn_spec=tree), expected(tree.mask))
    window = builders.sliding_window(cu_seqlens=bounds, left=3, right=0)
    for size in ((3, 0), (3, -1), (3, None), 3):  # without a bound to the right attention is causal all the same
        torch.testing.assert_close(attend(*tensors, cu_seqlens=bounds, window_size=size), expected(window))
    torch.testing.assert_close(attend(*tensors, window_size=(-1, 0)), expected(causal))
    state.attn_spec = tree
    torch.testing.assert_close(attend(*tensors), expected(tree.mask))
    torch.testing.assert_close(other(*tensors), expected(causal))
    batch = [x.view(2, 12, -1, 8) for x in tensors]
    torch.testing.assert_close(
        other(*batch).flatten(0, 1), expected(builders.varlen(doc_lengths=[12, 12], causal=True))
    )
    for options, name in (({"alibi_slopes": bounds}, "alibi_slopes"), ({"window_size": 4}, "window_size")):
        with pytest.raises(ValueError, match=f"^{name}: not"):
            attend(*tensors, **options)
    with pytest.raises(ValueError, match=r"^window_size: attention is causal"):
        other(*tensors, window_size=(4, 5))


@pytest.mark.parametrize(
    "size", [2.5, True, "3", (2.5, 0), (3, False), (3, "0"), -2, (1, 2, 3), (1,), "", torch.ones(2)]
)
def test_a_window_that_is_no_pair_of_whole_numbers_is_refused(size):
    with pytest.raises(ValueError, match=r"^window_size: expected (an integer|at least -1)"):
        make_magi_attn_func()(*qkv(6), window_size=size)


def test_arguments_of_attention_are_named():
    attend, (q, k, v) = make_magi_attn_func(), qkv(6)
    assert attend(q, k, v, cu_seqlens=[0, 2, 6]).equal(attend(q, k, v, cu_seqlens=torch.tensor([[0, 2, 6]])))
    for call, message in (
        (lambda: attend([1], k, v), "q: expected a tensor"),
        (lambda: attend(q[0], k[0], v[0]), "q: expected 3 or 4 dimensions"),
        (lambda: attend(q, k[None], v), "k: expected 3 or 4 dimensions"),
        (lambda: attend(q, k, v, magi_attn_spec=3), "magi_attn_spec: expected AttnMaskSpec"),
        (lambda: attend(q, k, v, cu_seqlens_q=torch.tensor([0.0, 6.0])), "cu_seqlens_q: expected integers"),
        (lambda: make_magi_attn_func(True)(q, k, v), "softmax_scale: expected a number, got True"),
        (lambda: make_magi_attn_func(state=3), "state: expected MagiState"),
        (lambda: setup_magi({"model": {"attn_implementation": "magi"}}, None, domain="text"), "domain: expected"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def test_arguments_of_packed_batches_are_named():
    tokens, model = torch.arange(6), SimpleNamespace(config=HEADS)
    batch = {"input_ids": tokens, "labels": tokens, "seq_lens": torch.tensor([2, 4])}
    for wrong, message in (
        ({"input_ids": None}, "input_ids: none were given"),
        ({"input_ids": [1, 2]}, "input_ids: expected a tensor"),
        ({"labels": tokens[:5]}, "labels: expected 6, one a token, got 5"),
        ({"position_ids": tokens[:5]}, "position_ids: expected 6"),
        ({"seq_lens": torch.tensor([2.0, 4.0])}, "seq_lens: expected integers"),
        ({"seq_lens": torch.ones(6, dtype=torch.bool)}, "seq_lens: expected integers"),
        ({"seq_lens": None}, "cu_seqlens: a packed batch needs"),
    ):
        for prepare in (
            lambda given: automodel.magi_prepare_packed_cp(model, given, None),
            lambda given: MagiState(enabled=True, custom=True).prepare_llm_batch(None, given, is_thd=True),
        ):
            with pytest.raises(ValueError, match=f"^{message}"):
                prepare({**batch, **wrong})
    for spec, message in ((3, "spec: expected AttnMaskSpec"), (AttnMaskSpec.causal(5), "spec: expected a mask of 6")):
        with pytest.raises(ValueError, match=f"^{message}"):
            automodel.magi_prepare_packed_cp(model, batch, None, spec)
    state = MagiState(enabled=True, custom=True)
    for options, message in (({"is_thd": "no"}, "is_thd"), ({"is_thd": True}, "prefix_tree: expected a pair")):
        with pytest.raises(ValueError, match=f"^{message}"):
            state.prepare_llm_batch(None, {**batch, "prefix_tree": ([6],)}, **options)
    assert state.prepare_llm_batch(None, {**batch, "seq_lens": [2, 4]}, is_thd=True)[1]["cu_seqlens"].tolist() == [
        0,
        2,
        6,
    ]


def test_a_packed_batch_for_one_rank_is_flat():
    state = MagiState(enabled=True, custom=True)
    tokens = torch.arange(12).view(2, 6)
    lengths = torch.tensor([[4, 2], [6, -1000]])
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": tokens % 6, "seq_lens_padded": lengths}
    context, flat = state.prepare_llm_batch(None, {**batch, "prefix_tree": TREE}, is_thd=True)
    with context():
        assert flat["input_ids"].tolist() == list(range(12)) and flat["cu_seqlens"].tolist() == [0, 4, 6, 12]
    assert state.attn_spec == AttnMaskSpec.prefix_tree(*TREE)[0] and state.key is None
    assert state.make_cp_batch(None, batch, return_local_indices=True)[1] is None and state.attn_spec is None
    without = {name: x for name, x in batch.items() if name != "seq_lens_padded"}
    for name, numbers in (
        ("cu_seqlens_padded", [0, 4, 6, 12, -1000]),
        ("cu_seqlens", [0, 4, 6, 12]),
        ("seq_lens", [4, 2, 6, -1000]),
    ):
        _, flat = state.prepare_llm_batch(None, {**without, name: torch.tensor(numbers)}, is_thd=True)
        assert flat["cu_seqlens"].tolist() == [0, 4, 6, 12]
        assert flat.keys() == {*without, "cu_seqlens", "qkv_format"}
    with pytest.raises(ValueError, match=r"^cu_seqlens: a packed batch needs the bounds"):
        state.prepare_llm_batch(None, without, is_thd=True)
    with pytest.raises(ValueError, match=r"^seq_lens_padded: expected documents of 12 tokens"):
        state.prepare_llm_batch(None, {**batch, "seq_lens_padded": lengths[:1]}, is_thd=True)
    with pytest.raises(ValueError, match=r"^is_thd"):
        MagiState(enabled=True, custom=True, cp_size=2, num_functions=1).prepare_llm_batch(None, batch)


def test_a_tree_for_a_model_of_transformers_is_its_samples():
    rows = [torch.cat([torch.arange(*r) for r in own]) for own in AttnMaskSpec.prefix_tree(*TREE)[1]]
    tokens = torch.randint(0, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.zeros(1, 24, dtype=torch.int64)
    for own in rows:
        positions[0, own] = torch.arange(len(own))
    batch = {"input_ids": tokens, "position_ids": positions, "labels": tokens, "prefix_tree": TREE}
    model, eager = make_model("llama"), make_model("llama", "eager")
    _, local = MagiState(enabled=True).prepare_llm_batch(model, batch)
    assert local.pop("labels")[0, :24].equal(tokens[0]) and "prefix_tree" in batch
    logits = model(**local, use_cache=False).logits[0]
    for own in rows:
        expected = eager(tokens[:, own], use_cache=False).logits[0]
        torch.testing.assert_close(logits[own], expected, rtol=1e-5, atol=1e-5)


def test_images_stay_on_one_rank():
    model = make_model("llama")
    batch = {"input_ids": torch.arange(9)[None]}
    assert MagiState(enabled=True).prepare_vlm_batch(model, batch)[1] is batch
    state = MagiState(enabled=True, domain="vlm", key="of a batch of text before")
    assert state.make_cp_batch(None, batch, model=model, return_local_indices=True) == (batch, None)
    with pytest.raises(ValueError, match=r"^attn_implementation"):
        automodel.magi_prepare_vlm(make_model("llama", "sdpa"), batch, None)


def summed(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def losses_of_transformers(mesh):
    """Two models of transformers, whose forwards and backwards alternate; differences of loss and gradients."""
    cases = {"gemma3": (17, 1, 24, 11), "llama": (30, 7)}
    forwards, out = {}, []
    for name, lengths in cases.items():
        batch = packed_batch(lengths)
        batch["labels"] = torch.randint(
            0, VOCABULARY, batch["labels"].shape, generator=torch.Generator().manual_seed(5)
        )
        expected = make_model(name, "eager")
        logits = expected(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        F.cross_entropy(logits[0], batch["labels"][0], reduction="sum").backward()
        state = setup_magi({"model": {"attn_implementation": "magi"}}, mesh)
        model = make_model(name)
        _, local = state.prepare_llm_batch(model, batch, device_mesh=mesh, is_thd=False, pad_id=0, num_chunks=1)
        forwards[name] = state, model, local, expected
    losses = {}
    for name, (state, model, local, _) in forwards.items():
        labels = local.pop("labels")
        logits = model(**local, use_cache=False).logits
        losses[name] = F.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum")
        assert state.cp_size == 2 and len(get_position_ids(state.key)) == labels.shape[1]
    for name, loss in losses.items():
        loss.backward()
        _, model, _, expected = forwards[name]
        pairs = zip(summed([p.grad for p in model.parameters()]), expected.parameters(), strict=True)
        out.append(max(((g - p.grad).abs().max() / (1 + p.grad.abs().max())).item() for g, p in pairs))
    return out


def losses_of_custom_models(mesh):
    """Likewise two models that attend by a function: packed documents with a window, and a tree."""
    batches = {
        "documents": {"cu_seqlens": torch.tensor([0, 9, 10, 24, -1000]), "position_ids": None},
        "tree": {"seq_lens": torch.tensor([[24]]), "prefix_tree": TREE, "position_ids": torch.arange(24)},
    }
    masks = {
        "documents": builders.sliding_window(cu_seqlens=[0, 9, 10, 24], left=4, right=0),
        "tree": builders.prefix_tree(*TREE)[0],
    }
    draw, made = torch.Generator().manual_seed(3), {}
    for seed, (name, batch) in enumerate(batches.items()):
        tokens, labels = torch.randint(0, FEW, (2, 24), generator=draw)
        torch.manual_seed(seed)
        model = TinyDecoder()
        model.config = HEADS
        whole = model.of_mask(tokens, torch.arange(24), labels, masks[name]).sum()
        expected = torch.autograd.grad(whole, model.parameters())
        state = setup_magi(Dotted(model__backend__attn="magi"), mesh)
        model.attn_func = attend = make_magi_attn_func(state=state if name == "documents" else None)
        batch = {**batch, "input_ids": tokens[None], "labels": labels[None]}
        local, places = state.make_cp_batch(mesh, batch, is_thd=True, model=model, return_local_indices=True)
        assert torch.equal(local["position_ids"], places) and 0 < len(places) < 24
        assert torch.equal(tokens[places][local["labels"] >= 0], local["input_ids"][local["labels"] >= 0])
        made[name] = model, attend, local, whole.detach(), expected
    window = {"documents": {"window_size": (4, 0)}, "tree": {}}
    ours, out = {}, []
    for name, (model, attend, local, *_) in made.items():
        seen = local["labels"] >= 0
        rows = model(
            local["input_ids"],
            local["position_ids"],
            local["labels"].clamp(min=0),
            lambda q, k, v, attend=attend, name=name: attend(q, k, v, qkv_format="thd", **window[name]),
        )
        ours[name] = rows[seen].sum()
    for name, loss in ours.items():
        model, _, _, whole, expected = made[name]
        gradients = summed([g.clone() for g in torch.autograd.grad(loss, model.parameters())])
        (loss,) = summed([loss.detach().clone()])
        pairs = [(loss, whole), *zip(gradients, expected, strict=True)]
        out.append(max((a - b).abs().max().item() for a, b in pairs))
    return out


def on_two_ranks(_rank, num_ranks):
    mesh = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("dp", "cp"))
    state = setup_magi(Dotted(model__backend__attn="magi"), mesh)
    with pytest.raises(ValueError, match=r"^model: has no attention"):
        state.prepare_llm_batch(TinyDecoder(), {"input_ids": torch.arange(4)}, is_thd=True)
    with pytest.raises(ValueError, match=r"^cp_group: images"):
        automodel.magi_prepare_vlm(make_model("llama"), {}, mesh["cp"])
    check_labels_of_padding(mesh)
    return losses_of_transformers(mesh), losses_of_custom_models(mesh)


def check_labels_of_padding(mesh):
    """Rows that even shards need in addition have no loss."""
    model, tokens = SimpleNamespace(config=HEADS), torch.arange(7)
    batch = {"input_ids": tokens, "labels": tokens, "seq_lens": torch.tensor([3, 4])}
    local, key = automodel.magi_prepare_packed_cp(model, batch, mesh["cp"])
    assert key.pad_size == 1 and undispatch(local["labels"], key).equal(tokens)
    assert summed([(local["labels"] != -100).sum()])[0] == 7
    for without in ({"labels": None}, {}):  # to evaluate
        given = {"input_ids": tokens, "seq_lens": torch.tensor([3, 4]), **without}
        local, key = automodel.magi_prepare_packed_cp(model, given, mesh["cp"])
        assert local.keys() == {"input_ids", "position_ids", "qkv_format"}
        assert undispatch(local["input_ids"], key).equal(tokens)


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_two_ranks, 2)


@pytest.mark.ranks(2)
def test_two_models_of_transformers_train_side_by_side_as_each_on_one_rank(results):
    assert max(max(differences) for differences, _ in results) < 1e-5


@pytest.mark.ranks(2)
def test_two_models_with_attention_functions_train_side_by_side_as_each_on_one_rank(results):
    assert max(max(differences) for _, differences in results) < 1e-12
