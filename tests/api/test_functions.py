"""The public functions as users of MagiAttention call them, on one rank and on several."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from megatron_magi import api
from megatron_magi.api.functions import _RUNTIMES
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.config import OverlapConfig as Overlap
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_mask
from tests.compat.reference_names import NAMES
from tests.dense_attention import dense_attention

HEADS_Q, HEADS_KV, DIM = 4, 2, 8
SHAPE = {"num_heads_q": HEADS_Q, "num_heads_kv": HEADS_KV, "head_dim": DIM}

KEPT = [
    "magi_attn_flex_key",
    "magi_attn_varlen_key",
    "make_varlen_key_for_new_mask_after_dispatch",
    "make_flex_key_for_new_mask_after_dispatch",
    "dispatch",
    "undispatch",
    "roll",
    "roll_simple",
    "calc_attn",
    "get_position_ids",
    "get_most_recent_key",
    "clear_cache",
    "compute_pad_size",
    "squash_batch_dim",
    "infer_varlen_mask_from_batch",
    "infer_attn_mask_from_sliding_window",
    "infer_attn_mask_from_cu_seqlens",
    "flex_flash_attn_func",
]
"""Functions of v1.1 that are here under its names."""


@pytest.fixture(autouse=True)
def no_plans_left_over():
    api.clear_cache()


def world(num_ranks):
    return dist.group.WORLD if num_ranks > 1 else None


def block_causal_key(group, total=96, chunk_size=8, **options):
    """Blocks of 24 tokens that see themselves and all before them."""
    blocks = total // 24
    return api.magi_attn_flex_key(
        q_ranges=api.AttnRanges.from_ranges([[24 * i, 24 * (i + 1)] for i in range(blocks)]),
        k_ranges=api.AttnRanges.from_ranges([[0, 24 * (i + 1)] for i in range(blocks)]),
        attn_mask_type=[api.AttnMaskType.FULL] * blocks,
        total_seqlen_q=total,
        total_seqlen_k=total,
        chunk_size=chunk_size,
        cp_group_or_mesh=group,
        **SHAPE,
        **options,
    )


def random_qkv(seed, num_rows):
    gen = torch.Generator().manual_seed(seed)
    heads = (HEADS_Q, HEADS_KV, HEADS_KV)
    return [torch.randn(num_rows, n, DIM, generator=gen, dtype=torch.float64) for n in heads]


@pytest.mark.parametrize("name", KEPT)
def test_names_and_order_of_arguments_are_those_of_the_reference(name):
    versions = NAMES["magi_attention.api"][name]
    expected = [text.partition("*")[::2] for text in ([versions] if isinstance(versions, str) else versions)]
    ours = list(inspect.signature(getattr(api, name)).parameters)
    assert any(
        ours[: len(args.split())] == args.split() and set(by_name.split()) <= set(ours) for args, by_name in expected
    )
    assert name in api.__all__


def test_flex_flash_attn_func_as_in_the_quick_start():
    total_seqlen = 64
    q, k, v = (x.requires_grad_() for x in random_qkv(0, total_seqlen))
    sink = torch.randn(2, HEADS_Q, dtype=torch.float64, requires_grad=True)
    out, meta = api.flex_flash_attn_func(
        q=q,
        k=k,
        v=v,
        q_ranges=torch.tensor([[0, 32], [32, 64]], dtype=torch.int32),
        k_ranges=torch.tensor([[0, 32], [0, 64]], dtype=torch.int32),
        attn_type_map=torch.tensor([0, 1], dtype=torch.int32),
        sink=sink,
        softmax_scale=None,
        softcap=0,
    )
    visible = dense_mask(AttnMask([(0, 32, 0, 32, 0), (32, 64, 0, 64, 1)], total_seqlen))
    expected, lse = dense_attention(q, k, v, visible, sink=sink)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(meta.lse, lse)
    dout = torch.randn_like(out)
    expected_grads = torch.autograd.grad(expected, (q, k, v, sink), dout)
    out.backward(dout)
    for x, grad in zip((q, k, v, sink), expected_grads, strict=True):
        torch.testing.assert_close(x.grad, grad)


def quick_start_model(total_seqlen):
    """Embeddings, projections to q, k and v, a sink, and weights of the loss."""
    torch.manual_seed(0)
    embed_dim = 16
    x = torch.randn(total_seqlen, embed_dim, dtype=torch.float64, requires_grad=True)
    projections = [nn.Linear(embed_dim, n * DIM, dtype=torch.float64) for n in (HEADS_Q, HEADS_KV, HEADS_KV)]
    sink = nn.Parameter(torch.randn(2, HEADS_Q, dtype=torch.float64))
    return x, projections, sink, torch.randn(total_seqlen, HEADS_Q, DIM, dtype=torch.float64)


def run_quick_start(rank, num_ranks):
    """Embeddings to a loss and back; gradients of parameters summed over ranks, as a framework would."""
    total_seqlen = 96
    x, projections, sink, weight = quick_start_model(total_seqlen)
    key = block_causal_key(world(num_ranks), total_seqlen)
    local_x = api.dispatch(x, key=key)
    local_q, local_k, local_v = (p(local_x).view(local_x.shape[0], -1, DIM) for p in projections)
    local_out, meta = api.calc_attn(q=local_q, k=local_k, v=local_v, key=key, sink=sink, return_max_logits=True)
    total_out = api.undispatch(x=local_out, key=key)
    (total_out * weight).sum().backward()
    grads = [sink.grad, *(p.weight.grad for p in projections)]
    if num_ranks > 1:
        for grad in grads:
            dist.all_reduce(grad)
    lse = api.undispatch(meta.lse, key)
    return [t.detach() for t in (total_out, lse, meta.max_logits, x.grad, *grads)]


def expected_quick_start():
    total_seqlen = 96
    x, projections, sink, weight = quick_start_model(total_seqlen)
    q, k, v = (p(x).view(total_seqlen, -1, DIM) for p in projections)
    visible = torch.as_tensor(dense_mask(builders.block_causal(total_seqlen, 24)))
    out, lse = dense_attention(q, k, v, visible, sink=sink)
    (out * weight).sum().backward()
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS_Q // HEADS_KV, 1)) * DIM**-0.5
    max_logits = logits.masked_fill(~visible, float("-inf")).amax(dim=(1, 2))
    return [t.detach() for t in (out, lse, max_logits, x.grad, sink.grad, *(p.weight.grad for p in projections))]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
def test_flex_key_dispatch_calc_undispatch_as_in_the_quick_start(ranks, num_ranks):
    expected = expected_quick_start()
    results = ranks(num_ranks, run_quick_start) if num_ranks > 1 else [run_quick_start(0, 1)]
    for result in results:
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want)


def run_deprecated_dispatch(rank, num_ranks):
    """The older one-call functions, with the older names of their arguments."""
    group = world(num_ranks)
    batch_size, seqlen = 3, 32
    x_with_batch = torch.randn(batch_size, seqlen, 5, generator=torch.Generator().manual_seed(0))
    x = api.squash_batch_dim(x_with_batch)
    cu_seqlens_q, cu_seqlens_k = api.full_attention_to_varlen_attention(batch_size, seqlen, device="cpu")
    pad_size = api.compute_pad_size(batch_size * seqlen, num_ranks, 16)
    config = api.DistAttnConfig(
        dispatch_config=api.DispatchConfig(alg=api.MinHeapDispatchAlg()),
        overlap_config=api.OverlapConfig(
            enable=True,
            mode=api.AttnOverlapMode.STATIC,
            degree=2,
            min_chunk_size=512,
            max_num_chunks=64,
            alg=api.OverlapAlgType.UNIFORM,
        ),
    )
    with pytest.warns(DeprecationWarning, match="use magi_attn_varlen_key and dispatch"):
        local_x, key = api.magi_attn_varlen_dispatch(
            x, cu_seqlens_q, cu_seqlens_k, head_dim=DIM, pad_size=pad_size, cp_group=group, causal=False,
            dist_attn_config=config,
        )  # fmt: skip
    with pytest.warns(DeprecationWarning, match="use magi_attn_flex_key and dispatch"):
        local_y, flex_key = api.magi_attn_flex_dispatch(
            x,
            q_ranges=api.AttnRanges.from_ranges([[0, 32], [32, 64], [64, 96]]),
            k_ranges=api.AttnRanges.from_ranges([[0, 32], [32, 64], [64, 96]]),
            attn_mask_type=[api.AttnMaskType.FULL] * 3,
            total_seqlen_q=96,
            total_seqlen_k=96,
            head_dim=DIM,
            pad_size=pad_size,
            cp_group=group,
            is_same_source=True,
            is_q_permutable=True,
            is_k_permutable=True,
            dist_attn_config=config,
        )
    assert key == flex_key
    torch.testing.assert_close(local_x, local_y)
    assert local_x.shape == ((96 + key.pad_size) // num_ranks, 5)
    q, k, v = random_qkv(1, 96)
    local_out, _ = api.calc_attn(*(api.dispatch(t, key) for t in (q, k, v)), key)
    expected, _ = dense_attention(q, k, v, dense_mask(builders.varlen([0, 32, 64, 96], causal=False)))
    torch.testing.assert_close(api.undispatch(local_out, key), expected)
    torch.testing.assert_close(api.undispatch(local_x, key), x)


@pytest.mark.ranks(2)
def test_the_deprecated_dispatch_functions_still_work(ranks):
    run_deprecated_dispatch(0, 1)
    ranks(2, run_deprecated_dispatch)


def run_hybrid(rank, num_ranks):
    """Two masks over one dispatch, a roll, and the positions of the rows."""
    total = 90  # not a multiple of the number of ranks times anything
    cu_seqlens = torch.tensor([0, 50, total], dtype=torch.int32)
    key = api.magi_attn_varlen_key(
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, cp_group_or_mesh=world(num_ranks), **SHAPE
    )
    window = api.make_varlen_key_for_new_mask_after_dispatch(
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, key_for_dispatch=key, window_size=(7, 0)
    )
    ranges = api.AttnRanges.from_ranges([[0, 50], [50, total]])
    full = api.make_flex_key_for_new_mask_after_dispatch(ranges, ranges, "full", key_for_dispatch=key)
    assert len({key, window, full}) == 3
    q, k, v = random_qkv(2, total)
    local_qkv = [api.dispatch(t, key) for t in (q, k, v)]
    masks = {
        key: builders.varlen([0, 50, total]),
        window: builders.sliding_window(left=7, right=0, cu_seqlens=[0, 50, total]),
        full: builders.varlen([0, 50, total], causal=False),
    }
    for each, mask in masks.items():
        out, _ = api.calc_attn(*local_qkv, each)
        expected, _ = dense_attention(q, k, v, dense_mask(mask))
        torch.testing.assert_close(api.undispatch(out, each), expected)
    position_ids = api.get_position_ids(window).cpu()
    assert torch.equal(position_ids, api.get_position_ids(key).cpu())
    is_token = position_ids < total
    torch.testing.assert_close(local_qkv[0][is_token], q[position_ids[is_token]])
    assert api.get_most_recent_key(world(num_ranks)) == full
    for shift in (-1, 3):
        rolled = api.undispatch(api.roll(local_qkv[0], shift, 0, key), key)
        torch.testing.assert_close(rolled, torch.roll(q, shift, 0))
        assert torch.equal(api.roll_simple(local_qkv[0], shift, 0, key), api.roll(local_qkv[0], shift, 0, key))


@pytest.mark.ranks(3)
def test_several_masks_share_one_dispatch(ranks):
    run_hybrid(0, 1)
    ranks(3, run_hybrid)


def run_disagreement(rank, num_ranks):
    total = 64 if rank != 1 else 48
    key = api.magi_attn_varlen_key(torch.tensor([0, 64]), torch.tensor([0, 64]), cp_group_or_mesh=world(num_ranks))
    api.calc_attn(*(api.dispatch(t, key) for t in random_qkv(0, 64)), key)
    # Two ranks know this mask already, the other brings a new one.
    cu_seqlens = torch.tensor([0, total, 64] if total < 64 else [0, 64])
    key = api.magi_attn_varlen_key(cu_seqlens, cu_seqlens, cp_group_or_mesh=world(num_ranks))
    local = [api.dispatch(t, key) for t in random_qkv(0, 64)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"plan: ranks disagree: rank 1 of the group"):
            api.calc_attn(*local, key)


@pytest.mark.ranks(3)
def test_ranks_that_bring_different_masks_are_told_which_differs(ranks):
    ranks(3, run_disagreement)


def test_equal_arguments_give_equal_keys_and_one_plan(monkeypatch):
    key, again = block_causal_key(None), block_causal_key(None)
    assert key == again and hash(key) == hash(again) and key is not again
    assert _RUNTIMES.get(key) is _RUNTIMES.get(again)
    assert block_causal_key(None, chunk_size=16) != key
    assert block_causal_key(None, total=48) != key
    monkeypatch.setenv("MAGI_ATTENTION_DETERMINISTIC_MODE", "1")
    deterministic = block_causal_key(None)
    assert deterministic != key and deterministic.config.attend.deterministic


def _copied_with_its_model(rank: int, num_ranks: int) -> bool:
    model = torch.nn.Linear(2, 2)
    model.key = api.magi_attn_varlen_key([0, 30, 64], [0, 30, 64], causal=True, cp_group_or_mesh=dist.group.WORLD)
    copied = copy.deepcopy(model)
    rows = api.dispatch(torch.randn(64, 2, 8), copied.key)
    return copied.key == model.key and api.calc_attn(rows, rows, rows, copied.key)[0].shape == rows.shape


def test_a_model_that_holds_a_key_can_be_copied(ranks):
    """As averages of weights do; process groups cannot be copied."""
    assert ranks(2, _copied_with_its_model) == [True] * 2


def test_a_mask_may_be_empty():
    key = api.magi_attn_flex_key([], [], "full", 8, 8)
    out, meta = api.calc_attn(*(api.dispatch(t, key) for t in random_qkv(0, 8)), key)
    assert (out == 0).all() and meta.lse.isneginf().all()


def test_a_third_mask_may_be_made_from_the_key_of_the_second():
    key = api.magi_attn_varlen_key([0, 30, 64], [0, 30, 64], causal=True)
    second = api.make_varlen_key_for_new_mask_after_dispatch([0, 64], [0, 64], key)
    third = api.make_varlen_key_for_new_mask_after_dispatch([0, 30, 64], [0, 30, 64], second, window_size=(3, 0))
    assert second.key_for_dispatch == third.key_for_dispatch == key
    assert _RUNTIMES.get(third).plan.dispatch is _RUNTIMES.get(key).plan.dispatch
    changed = api.make_flex_key_for_new_mask_after_dispatch(
        [[0, 64]],
        [[0, 64]],
        "causal",
        key,
        num_heads_q=8,
        dist_attn_config=api.DistAttnConfig(
            overlap_config=api.OverlapConfig(degree=2), dispatch_config=api.DispatchConfig(chunk_size=5)
        ),
    )
    assert changed.config.overlap.degree == 2 and changed.num_heads_q == 8
    assert changed.config.dispatch == key.config.dispatch


def test_a_key_shows_its_mask_and_its_padding():
    key = block_causal_key(None, chunk_size=40, pad_size=24)
    assert (key.total_seqlen_q, key.total_seqlen_k, key.pad_size, key.chunk_size) == (120, 120, 24, 40)
    assert key.q_ranges.to_naive_ranges()[1] == (24, 48)
    assert key.k_ranges.to_naive_ranges()[1] == (0, 48)
    # The padding is a slice of its own, which sees no key.
    assert key.q_ranges.to_naive_ranges()[4:] == [(96, 120)] and key.k_ranges.to_naive_ranges()[4:] == [(0, 0)]
    assert key.attn_mask_type == (api.AttnMaskType.FULL,) * 5
    assert len(block_causal_key(None).q_ranges) == 4
    local = api.dispatch(torch.ones(96, 2), key, pad_value=-7.0)
    assert local.shape == (120, 2) and (local[96:] == -7).all()
    assert api.undispatch(local, key).shape == (96, 2)


def test_the_cache_is_bounded_and_a_dropped_key_still_works(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE", "3")
    keys = [api.magi_attn_varlen_key([0, n], [0, n]) for n in range(10, 60)]
    assert len(_RUNTIMES) == 3
    x = torch.randn(10, 2)
    torch.testing.assert_close(api.undispatch(api.dispatch(x, keys[0]), keys[0]), x)
    assert api.get_most_recent_key(None) == keys[-1]
    api.clear_cache()
    assert len(_RUNTIMES) == 0
    with pytest.raises(ValueError, match="cp_group: no key"):
        api.get_most_recent_key(None)
    torch.testing.assert_close(api.undispatch(api.dispatch(x, keys[0]), keys[0]), x)


def test_the_least_recently_used_plan_is_dropped_first(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE", "2")
    first, second = (api.magi_attn_varlen_key([0, n], [0, n]) for n in (8, 9))
    plans = [_RUNTIMES.get(key).plan for key in (second, first)]
    api.magi_attn_varlen_key([0, 10], [0, 10])
    assert _RUNTIMES.get(first).plan is plans[1]
    assert _RUNTIMES.get(second).plan is not plans[0]


def test_configuration_objects_map_to_ours():
    def config(**options):
        return block_causal_key(None, dist_attn_config=api.DistAttnConfig(**options)).config

    default = block_causal_key(None).config
    assert default.dispatch == DispatchConfig(chunk_size=8)
    assert default.overlap.degree is None and default.overlap.cost.num_heads_q == HEADS_Q
    for alg, name in (
        (api.MinHeapDispatchAlg(), "min_heap"),
        (api.ToppHeapDispatchAlg(top_p=0.5), "affinity"),
        (api.SequentialDispatchAlg(), "sequential"),
        (api.SortedSequentialSelectAlg(), "sorted_sequential"),
    ):
        assert config(dispatch_config=api.DispatchConfig(alg=alg)).dispatch.algorithm == name
    assert config(dispatch_config=api.DispatchConfig(uneven_shard=True)).dispatch.uneven_shard
    assert config(overlap_config=api.OverlapConfig()).overlap.degree == 1
    assert config(overlap_config=api.OverlapConfig(enable=False)).overlap.degree == 0
    dynamic = api.OverlapConfig(mode=api.AttnOverlapMode.DYNAMIC, degree=None, dynamic_max_degree=5)
    assert config(overlap_config=dynamic).overlap.degree is None
    assert config(overlap_config=dynamic).overlap.max_degree == 5
    ours = MagiConfig(overlap=Overlap(degree=3), dispatch=DispatchConfig(chunk_size=8))
    assert block_causal_key(None, dist_attn_config=ours).config == ours


@pytest.mark.parametrize("causal, window, num_global", [(True, (-1, -1), 0), (False, (-1, -1), 0), (False, (3, 2), 2)])
def test_inferred_ranges_mean_what_the_builders_mean(causal, window, num_global):
    cu_seqlens = torch.tensor([0, 9, 9, 20], dtype=torch.int32)
    q, k, types, total_q, total_k = api.infer_attn_mask_from_cu_seqlens(
        cu_seqlens, cu_seqlens, causal=causal, window_size=window, global_window_size=num_global
    )
    mask = AttnMask.from_ranges(q, k, [t.to_int_type() for t in types], total_q, total_k)
    left, right = window
    expected = builders.sliding_window(
        left=left, right=0 if causal else right, cu_seqlens=[0, 9, 9, 20], global_tokens=num_global
    )
    assert (dense_mask(mask) == dense_mask(expected)).all()
    assert isinstance(q, api.AttnRanges) and q.to_tensor().dtype == torch.int32


def test_a_window_inside_a_rectangle_keeps_its_place():
    lists = api.infer_attn_mask_from_sliding_window([5, 15], [5, 15], (2, 3))
    q, k, types = lists
    dense = dense_mask(AttnMask.from_ranges(q, k, [t.to_int_type() for t in types], 20))
    inside = dense_mask(builders.sliding_window(10, 2, 3))
    assert (dense[5:15, 5:15] == inside).all() and dense.sum() == inside.sum()


def test_names_of_mask_types_and_small_functions():
    assert [api.AttnMaskType.from_int_type(i).value for i in range(4)] == ["full", "causal", "inv_causal", "bi_causal"]
    by_name = api.magi_attn_flex_key([[0, 8]], [[0, 8]], "causal", 8, 8)
    for same in (["causal"], [api.AttnMaskType.CAUSAL], api.AttnMaskType.CAUSAL, 1):
        assert api.magi_attn_flex_key([[0, 8]], [[0, 8]], same, 8, 8) == by_name
    assert api.magi_attn_flex_key(torch.tensor([[0, 8]]), torch.tensor([[0, 8]]), "causal", 8, 8) == by_name
    assert api.compute_pad_size(total_seqlen_q=100, cp_size=4, chunk_size=16) == 28
    assert api.compute_pad_size(128, 4, 16) == 0
    assert api.squash_batch_dim(torch.zeros(3, 4, 5)).shape == (12, 5)
    assert api.infer_varlen_mask_from_batch(2, 6)[0].is_cuda == torch.cuda.is_available()
    cu_q, cu_k = api.infer_varlen_mask_from_batch(2, 6, device="cpu")
    assert cu_q.tolist() == cu_k.tolist() == [0, 6, 12] and cu_q.dtype == torch.int32
    ranges = api.AttnRanges.from_cu_seqlens([0, 3, 9], 9)
    assert (ranges.size, ranges.max_seqlen, ranges.start, ranges.end, ranges.is_empty()) == (2, 6, 0, 9, False)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: api.magi_attn_flex_key([[0, 9]], [[0, 8]], "full", 8, 8),
            r"^q_ranges\[0\]: expected 0 <= start <= end <= 8, got \[0, 9\)",
        ),
        (lambda: api.magi_attn_flex_key([[0, 8]] * 2, [[0, 8]] * 2, "full", 8, 8), "slice 0 .* slice 1 .* overlap"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], "diagonal", 8, 8), "attn_mask_type"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], ["full"] * 2, 8, 8), "attn_mask_type: 2 types for 1"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], 7, 8, 8), "attn_mask_type: expected one of full.*7"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [], "full", 8, 8), "k_ranges: 0 ranges for 1"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 4]], "full", 8, 4), "total_seqlen_q=8 and total_seqlen_k=4"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], "full", 8, 8, is_same_source=False), "is_same_source"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], "full", 8, 8, pad_size=-1), "pad_size"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], "full", 8, 8, chunk_size="8"), "chunk_size"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], "full", 8, 8, cp_group_or_mesh=3), "cp_group_or_mesh"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[0, 8]], "full", 8, 8, dist_attn_config={}), "dist_attn_config"),
        (
            lambda: block_causal_key(
                None, dist_attn_config=api.DistAttnConfig(dispatch_config=api.DispatchConfig(chunk_size=4))
            ),
            "chunk_size: 8, but the configuration says 4",
        ),
        (lambda: api.magi_attn_varlen_key([0, 5, 3], [0, 5, 3]), "cu_seqlens"),
        (lambda: api.magi_attn_varlen_key([0, 5], [0, 5], causal=True, window_size=(2, 0)), "window_size"),
        (lambda: api.dispatch(torch.zeros(7, 1), block_causal_key(None)), "x: 7 rows, the sequence has 96"),
        (lambda: api.undispatch(torch.zeros(7, 1), block_causal_key(None)), "^x: 7 rows"),
        (lambda: api.calc_attn(*random_qkv(0, 7), block_causal_key(None)), "q: expected"),
        (lambda: api.calc_attn(*random_qkv(0, 7), None), "key"),
        (lambda: api.make_flex_key_for_new_mask_after_dispatch([], [], [], None), "key_for_dispatch"),
        (lambda: api.compute_pad_size(8, 0, 4), "cp_size"),
        (lambda: api.OverlapConfig(degree=None), "degree"),
        (lambda: api.OverlapConfig(degree=-1), "degree"),
        (lambda: api.OverlapConfig(calc_cost_factor=0.0), "calc_cost_factor"),
        (lambda: api.DispatchConfig(alg="min_heap"), "alg"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
