"""Malformed arguments of every public function: a ValueError that begins with the argument's name."""

import math

import numpy as np
import pytest
import torch

import megatron_magi
from megatron_magi import api
from megatron_magi.mask import AttnMask, builders

NAN = float("nan")
HUGE = 2**63
BEYOND = 10**400
PAIR = torch.tensor([1.0, 2.0])


@pytest.fixture(autouse=True)
def no_plans_left_over():
    api.clear_cache()


def flex_key(**options):
    ranges = {"q_ranges": [[0, 8]], "k_ranges": [[0, 8]], "attn_mask_type": "causal"}
    return api.magi_attn_flex_key(**{**ranges, "total_seqlen_q": 8, "total_seqlen_k": 8, **options})


def varlen_key(total=8, **options):
    cu_seqlens = {"cu_seqlens_q": [0, total], "cu_seqlens_k": [0, total]}
    return api.magi_attn_varlen_key(**{**cu_seqlens, **options})


def new_flex_key(**options):
    ranges = {"q_ranges": [[0, 8]], "k_ranges": [[0, 8]], "attn_mask_type": "causal", "key_for_dispatch": flex_key()}
    return api.make_flex_key_for_new_mask_after_dispatch(**{**ranges, **options})


def new_varlen_key(**options):
    cu_seqlens = {"cu_seqlens_q": [0, 8], "cu_seqlens_k": [0, 8], "key_for_dispatch": flex_key()}
    return api.make_varlen_key_for_new_mask_after_dispatch(**{**cu_seqlens, **options})


def inferred_mask(**options):
    return api.infer_attn_mask_from_cu_seqlens(**{"cu_seqlens_q": [0, 8], "cu_seqlens_k": [0, 8], **options})


def window(**options):
    return api.infer_attn_mask_from_sliding_window(
        **{"q_range": [0, 8], "k_range": [0, 8], "window_size": (1, 1), **options}
    )


def dispatch(x=None, **options):
    return api.dispatch(torch.zeros(8, 2) if x is None else x, **{"key": flex_key(), **options})


def dispatch_integers(**options):
    return dispatch(torch.zeros(8, dtype=torch.int64), **options)


def dispatch_bytes(**options):
    return dispatch(torch.zeros(8, dtype=torch.uint8), **options)


def dispatch_flags(**options):
    return dispatch(torch.zeros(8, dtype=torch.bool), **options)


def dispatch_half(**options):
    return dispatch(torch.zeros(8, dtype=torch.float16), **options)


def dispatch_fp8(**options):
    return dispatch(torch.zeros(8).to(torch.float8_e4m3fn), **options)


def dispatch_exponents(**options):
    return dispatch(torch.ones(8).to(torch.float8_e8m0fnu), **options)


def dispatch_fp4(**options):
    return dispatch(torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), **options)


def deprecated_dispatch(**options):
    with pytest.warns(DeprecationWarning, match="use magi_attn_varlen_key"):
        return api.magi_attn_varlen_dispatch(
            **{"x": torch.zeros(8), "cu_seqlens_q": [0, 8], "cu_seqlens_k": [0, 8]} | options
        )


def undispatch(**options):
    return api.undispatch(**{"x": torch.zeros(8, 2), "key": flex_key(), **options})


def roll(**options):
    return api.roll(**{"x": torch.zeros(8, 2), "shift": 1, "dim": 0, "key": flex_key(), **options})


def qkv():
    return {name: torch.zeros(8, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}


def calc_attn(**options):
    return api.calc_attn(**{**qkv(), "key": flex_key(), **options})


def flex_attn(**options):
    return api.flex_flash_attn_func(**{**qkv(), "q_ranges": [[0, 8]], "k_ranges": [[0, 8]], **options})


def slice_attn(**options):
    return megatron_magi.slice_attention(**{**qkv(), "mask_or_bands": builders.causal(8), **options})


def pad_size(**options):
    return api.compute_pad_size(**{"total_seqlen_q": 8, "cp_size": 2, "chunk_size": 4, **options})


def batch_mask(**options):
    return api.infer_varlen_mask_from_batch(**{"batch_size": 2, "seq_len": 4, "device": "cpu", **options})


def squash(**options):
    return api.squash_batch_dim(**{"x": torch.zeros(2, 4), **options})


NOT_RANGES = [None, 3, "08", b"x", {0: 8}, {(0, 8)}, [0, 8], [[0, 4, 8]], [["0", "8"]], [[0, 7.5]], [[False, True]],
              [[-1, 4]], [[4, 1]], [[0, 9]], [[0, HUGE]], [[0, BEYOND]], [None], torch.tensor(2), torch.tensor([0, 8]),
              torch.tensor([[0.0, 8.0]]), torch.zeros(1, 2, device="meta"), api.AttnRanges([3])]  # fmt: skip
NOT_CUMULATIVE = [None, 8, "08", [], [1, 8], [0, 5, 3], [0, -8], [0.0, 8.0], [[0, 8]], [False, True], [0, 2**31],
                  [0, HUGE], [0, BEYOND], torch.tensor(8), torch.tensor([[0, 8]]), PAIR, torch.zeros(2, device="meta"),
                  np.array([0, HUGE], dtype=np.uint64)]  # fmt: skip
NO_COUNT = [0, -1, 2.0, 2.5, True, "4", [4], NAN, HUGE, BEYOND, torch.tensor(2.0), torch.tensor(True), PAIR]
NO_FLAG = [None, "no", 0, 1, 2.0, [], [True], torch.tensor(True), PAIR]
NO_KEY = [None, "key", 3, [], object()]
NO_TENSOR = [None, "x", 3, 2.0, True, [1.0] * 8, [[0.0, 0.0]] * 8, np.zeros((8, 2)), torch.tensor(1.0),
             torch.zeros(8, 2).to_sparse()]  # fmt: skip
NO_NUMBER = [None, "auto", b"1", [1.0], True, PAIR, BEYOND, 1j, torch.tensor(True), NAN, -1.0, math.inf]
NO_TYPE = [None, "diagonal", 4, -1, True, 1.5, NAN, HUGE, {}, [True], ["full", "full"], [[1]], [None],
           torch.tensor(True), torch.tensor(1.5), torch.tensor([4])]  # fmt: skip
NO_WINDOW = [None, 4, "ab", (1,), (1, 2, 3), (-2, 0), (2.5, 0), (True, 0), (NAN, 0), (0, HUGE), PAIR]
NO_CONFIG = ["config", {}, 3, api.DistAttnConfig, api.DispatchConfig()]
NO_GROUP = ["world", 3, [], object()]

MALFORMED = [
    *((make, name, values)
      for make in (flex_key, varlen_key)
      for name, values in {
          "num_heads_q": NO_COUNT, "num_heads_kv": NO_COUNT, "head_dim": NO_COUNT,
          "chunk_size": [*NO_COUNT, 10**7], "pad_size": [*NO_COUNT[1:], 10**7],
          "cp_group_or_mesh": NO_GROUP, "dist_attn_config": NO_CONFIG,
      }.items()),
    *((make, name, values)
      for make in (flex_key, new_flex_key)
      for name, values in {"q_ranges": NOT_RANGES, "k_ranges": NOT_RANGES, "attn_mask_type": NO_TYPE}.items()),
    *((make, name, values)
      for make in (varlen_key, new_varlen_key, inferred_mask)
      for name, values in {
          "cu_seqlens_q": NOT_CUMULATIVE, "cu_seqlens_k": NOT_CUMULATIVE, "causal": NO_FLAG, "window_size": NO_WINDOW,
      }.items()),
    *((make, "key_for_dispatch", NO_KEY) for make in (new_flex_key, new_varlen_key)),
    *((make, "dist_attn_config", NO_CONFIG) for make in (new_flex_key, new_varlen_key)),
    *((flex_key, name, [None, *NO_COUNT[1:]]) for name in ("total_seqlen_q", "total_seqlen_k")),
    *((flex_key, name, [False, None, 1, "yes", PAIR])
      for name in ("is_same_source", "is_q_permutable", "is_k_permutable")),
    (flex_key, "total_seqlen_k", [0, 9, 10**7]),
    (varlen_key, "cu_seqlens_k", [[0, 7], [0, 4, 8]]),
    (new_varlen_key, "cu_seqlens_q", [[0, 7]]),
    (inferred_mask, "global_window_size", [None, *NO_COUNT[1:]]),
    *((window, name, [None, 3, "ab", [0], [-1, 4], [4, 1], [0, 7.5], [False, True], PAIR])
      for name in ("q_range", "k_range")),
    (window, "window_size", NO_WINDOW),
    *((make, "key", NO_KEY) for make in (dispatch, undispatch, roll, calc_attn)),
    *((make, "x", [*NO_TENSOR[1:], torch.zeros(7, 2)]) for make in (dispatch, undispatch, roll)),
    *((make, "x", NO_TENSOR[:1]) for make in (undispatch, roll, deprecated_dispatch)),
    *((make, "is_partial_grad", NO_FLAG) for make in (dispatch, undispatch, deprecated_dispatch)),
    (dispatch, "pad_value", [None, "0", [0], PAIR, torch.tensor(0.0), 1j, True, NAN, 1e39, BEYOND]),
    (dispatch_integers, "pad_value", [None, "0", 0.5, -0.5, NAN, math.inf, HUGE, BEYOND, True]),
    (dispatch_bytes, "pad_value", [-100, 256]),
    (dispatch_flags, "pad_value", [2, -1, 0.5, NAN]),
    (dispatch_half, "pad_value", [1e5, NAN]),
    (dispatch_fp8, "pad_value", [500, math.inf, -math.inf, NAN, BEYOND]),
    (dispatch_exponents, "pad_value", [-1, math.inf]),
    (dispatch_fp4, "pad_value", [1, -1.0]),
    (roll, "shift", [None, 1.5, "1", True, NAN, PAIR]),
    (roll, "dim", [None, 2, -3, 0.0, "0", True, HUGE]),
    *((make, name, NO_TENSOR) for make in (calc_attn, flex_attn, slice_attn) for name in ("q", "k", "v")),
    *((make, "sink", [*NO_TENSOR[1:], torch.zeros(2, 3)]) for make in (calc_attn, flex_attn, slice_attn)),
    *((make, "softmax_scale", [*NO_NUMBER[1:], 0.0, torch.tensor(0.5, requires_grad=True)])
      for make in (calc_attn, flex_attn, slice_attn)),
    *((make, "softcap", NO_NUMBER) for make in (calc_attn, flex_attn, slice_attn)),
    *((make, "return_max_logits", NO_FLAG) for make in (calc_attn, flex_attn)),
    *((make, name, NO_FLAG) for make in (flex_attn, slice_attn) for name in ("deterministic", "sanity_check")),
    (slice_attn, "return_max_logits", NO_FLAG),
    *((make, "sm_margin", [None, *NO_COUNT[1:]]) for make in (flex_attn, slice_attn)),
    *((make, "impl", [None, "fast", 3, ["torch"], {}]) for make in (flex_attn, slice_attn)),
    (flex_attn, "sink_layout", [None, "hs", 3, ["sh"]]),
    *((flex_attn, name, [3, 2.5, True, "08", torch.tensor(3), [0, 8], [[0, 9]], [[-1, 4]], [[4, 1]], [[0, 7.5]],
                         [[0, HUGE]], torch.zeros(1, 2, device="meta")]) for name in ("q_ranges", "k_ranges")),
    (flex_attn, "attn_type_map", [3, 2.5, True, "1", [4], [-1], [[1]], [1.5], torch.tensor(1)]),
    (slice_attn, "mask_or_bands", [None, "causal", 3, [], np.zeros((1, 5), np.int64), builders.causal(7)]),
    *((pad_size, name, NO_COUNT) for name in ("cp_size", "chunk_size")),
    (pad_size, "total_seqlen_q", [None, *NO_COUNT[1:]]),
    *((batch_mask, name, [None, *NO_COUNT[1:]]) for name in ("batch_size", "seq_len")),
    (batch_mask, "device", ["gpu", -1, 2.5, []]),
    (squash, "x", [*NO_TENSOR, torch.zeros(8)]),
    *((make, "cp_group", NO_GROUP) for make in (api.get_most_recent_key, api.clear_cache)),
    (api.get_position_ids, "key", NO_KEY),
    (api.DistAttnConfig, "dispatch_config", [None, api.OverlapConfig(), api.DispatchConfig, {}]),
    (api.DistAttnConfig, "overlap_config", [None, api.DispatchConfig(), "dynamic"]),
    (api.DistAttnConfig, "grpcoll_config", [None, api.OverlapConfig()]),
    (api.DispatchConfig, "alg", ["min_heap", api.MinHeapDispatchAlg, 3]),
    (api.DispatchConfig, "chunk_size", NO_COUNT),
    (api.DispatchConfig, "uneven_shard", NO_FLAG),
    (api.OverlapConfig, "enable", NO_FLAG),
    (api.OverlapConfig, "mode", [None, "dynamic", "static", api.AttnOverlapMode, 1]),
    *((api.OverlapConfig, name, NO_COUNT[1:]) for name in ("degree", "dynamic_max_degree")),
    *((api.OverlapConfig, name, [None, *NO_COUNT]) for name in ("min_chunk_size", "max_num_chunks")),
    (api.OverlapConfig, "alg", [None, "uniform", api.UniformOverlapAlg, 3]),
    (api.GrpCollConfig, "num_sms", [None, -1, 2.5, True, "24", NAN]),
    (api.ToppHeapDispatchAlg, "top_p", [None, "0.5", True, -0.1, NAN, math.inf]),
    (api.SortedSequentialSelectAlg, "allocation_ratio", [None, "1", True, -0.1, NAN]),
    (api.UniformOverlapAlg, "random_costs", NO_FLAG),
    (api.UniformOverlapAlg, "random_seed", [2.5, "1", True]),
    (api.AttnMaskType.from_int_type, "int_type", [None, 4, -1, True, 1.5, "full", HUGE]),
    *((lambda name=name, **o: AttnMask(**{"slices": [(0, 4, 0, 4, 0)], "total_seqlen_q": 8, **o}), name, NO_COUNT[1:])
      for name in ("total_seqlen_q", "total_seqlen_k")),
    (lambda **o: AttnMask(total_seqlen_q=8, **o), "slices",
     [None, 3, "ab", [(0, 4)], [(0, 9, 0, 8, 0)], [(0, 8, 0, 8, 4)], [(-1, 4, 0, 8, 0)], [(0.5, 4, 0, 8, 0)]]),
]  # fmt: skip


def cases():
    found = []
    for number, (make, name, values) in enumerate(MALFORMED):
        for i, value in enumerate(values):
            text = repr(value) if isinstance(value, int | float | str | type(None)) else type(value).__name__
            found.append(pytest.param(make, name, value, id=f"{number}-{make.__name__}-{name}-{i}-{text[:20]}"))
    return found


@pytest.mark.parametrize("make, name, value", cases())
def test_a_malformed_argument_is_refused_by_name(make, name, value):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        make(**{name: value})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: flex_key(num_heads_q=5, num_heads_kv=2), "num_heads_q: expected a multiple of num_heads_kv, 2, got 5"),
        (lambda: varlen_key(num_heads_q=5, num_heads_kv=2), "num_heads_q: expected a multiple of num_heads_kv"),
        (lambda: new_flex_key(key_for_dispatch=flex_key(num_heads_kv=2), num_heads_q=5), "num_heads_q: expected a mul"),
        (lambda: flex_key(q_ranges=[[-1, 5]]), r"q_ranges\[0\]: "),
        (lambda: flex_key(k_ranges=[[-1, 5]]), r"k_ranges\[0\]: "),
        (lambda: flex_key(q_ranges=[[0, 8]] * 2, k_ranges=[[0, 8]] * 2), "q_ranges, k_ranges: slice 0 .* slice 1"),
        (lambda: flex_attn(q_ranges=[[0, 8]] * 2, k_ranges=[[0, 8]] * 2), "q_ranges, k_ranges: slice 0 .* slice 1"),
        (lambda: flex_key(q_ranges=[], k_ranges=[], attn_mask_type="diagonal"), "attn_mask_type: expected one of"),
        (lambda: varlen_key(16, chunk_size=10**7), "chunk_size: expected at most 65536 for 16 tokens"),
        (lambda: deprecated_dispatch(cp_group=object()), "cp_group_or_mesh: expected a ProcessGroup"),
        (
            lambda: api.DistAttnConfig(api.OverlapConfig(), api.DispatchConfig()),
            "dispatch_config: expected DispatchConfig, got OverlapConfig",
        ),
        (lambda: batch_mask(batch_size=2**16, seq_len=2**15), "batch_size: 65536 sequences of 32768 tokens"),
    ],
)
def test_what_only_a_pair_of_arguments_shows_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_numbers_may_come_as_numpy_and_tensors():
    key = flex_key(total_seqlen_q=np.int64(8), total_seqlen_k=torch.tensor(8), num_heads_q=np.int32(4), num_heads_kv=2)
    assert key == flex_key(num_heads_q=4, num_heads_kv=2)
    expected = calc_attn(softmax_scale=0.5, softcap=2)[0]
    for scale, softcap in ((np.float32(0.5), 2.0), (torch.tensor(0.5), torch.tensor([2]))):
        assert torch.equal(calc_attn(softmax_scale=scale, softcap=softcap)[0], expected)
    assert dispatch(torch.zeros(8), pad_value=-math.inf).shape == (8,)
    assert dispatch_flags(pad_value=True).shape == dispatch_integers(pad_value=-100.0).shape == (8,)
    assert torch.equal(roll(x=torch.arange(8), shift=2**70 + 1), torch.arange(8).roll(2**70 % 8 + 1))
