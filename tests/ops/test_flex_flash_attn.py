import numpy as np
import pytest
import torch

from megatron_magi.mask import AttnMask, AttnRanges
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from tests import forced
from tests.ops.naive import Case, assert_close

ROWS = [(0, 4, 0, 4, 1), (4, 9, 0, 7, 0), (4, 9, 7, 10, 3)]
Q_RANGES, K_RANGES, TYPES = [r[:2] for r in ROWS], [r[2:4] for r in ROWS], [r[4] for r in ROWS]


def make_case(**options):
    return Case(AttnMask(ROWS, 10, 11), 1, 2, **options)


def call(case, *args, **options):
    def attend(q, k, v, sink):
        out, meta = flex_flash_attn_func(q, k, v, *args, sink=sink, return_max_logits=True, **options)
        return out, meta.lse, meta.max_logits

    return case.run(attend)


@pytest.mark.parametrize("kind", ["lists", "int32 tensors", "int64 arrays", "ranges"])
def test_ranges_of_any_kind_mean_the_same(kind):
    args = {
        "lists": (Q_RANGES, K_RANGES, TYPES),
        "int32 tensors": tuple(torch.tensor(x, dtype=torch.int32) for x in (Q_RANGES, K_RANGES, TYPES)),
        "int64 arrays": tuple(np.array(x) for x in (Q_RANGES, K_RANGES, TYPES)),
        "ranges": (AttnRanges.from_ranges(Q_RANGES), AttnRanges.from_ranges(K_RANGES), TYPES),
    }[kind]
    case = make_case()
    assert_close(call(case, *args), case.expected())


@pytest.mark.gpu
def test_ranges_may_be_on_the_gpu():
    case = make_case(device="cuda")
    args = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (Q_RANGES, K_RANGES, TYPES))
    assert_close(call(case, *args), case.expected())


def test_without_types_every_slice_is_full_and_without_ranges_everything_is_seen():
    case = Case(AttnMask([(0, 4, 0, 4, 0), (4, 10, 0, 11, 0)], 10, 11))
    assert_close(call(case, [(0, 4), (4, 10)], [(0, 4), (0, 11)]), case.expected())
    case = Case(AttnMask([(0, 10, 0, 11, 0)], 10, 11))
    assert_close(call(case), case.expected())


def test_no_range_means_that_nothing_is_seen():
    case = Case(AttnMask([], 10, 11))
    for ranges in ([], torch.zeros(0, 2, dtype=torch.int32)):
        assert_close(call(case, ranges, ranges), case.expected())


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_both_sink_layouts_with_a_scale_and_a_cap_of_logits(layout):
    case = make_case(sink=layout, softmax_scale=0.8, softcap=1.5)
    options = {"sink_layout": layout, "softmax_scale": 0.8, "softcap": 1.5}
    assert_close(call(case, Q_RANGES, K_RANGES, TYPES, **options), case.expected())


def test_the_flags_of_other_kernels_change_no_bit():
    case = make_case(dtype=torch.float32)
    plain = call(case, Q_RANGES, K_RANGES, TYPES)
    names = (
        "disable_fwd_atomic_reduction disable_bwd_dkv_atomic_reduction auto_range_merge swap_ab pack_gqa cat_gqa "
        "sparse_load swap_bwd_qk_loop deterministic"
    )
    flags = dict.fromkeys(names.split(), True)
    flags |= {"ref_block_size": (64, 128), "max_seqlen_q": 5, "max_seqlen_k": 7, "sm_margin": 8}
    flagged = call(case, Q_RANGES, K_RANGES, TYPES, **flags)
    assert all(torch.equal(plain[name], flagged[name]) for name in plain)


def test_meta_holds_lse_always_and_max_logits_when_asked():
    case = make_case()
    out, meta = flex_flash_attn_func(case.q, case.k, case.v, Q_RANGES, K_RANGES, TYPES)
    assert out.shape == (10, 2, 4) and meta.lse.shape == (10, 2) and meta.max_logits is None


@pytest.mark.parametrize(
    "args, options, message",
    [
        (([(0, 4)], None), {}, "q_ranges, k_ranges: give both"),
        (([(0, 4)], [(0, 4), (4, 8)]), {}, "lengths disagree: 1, 2, 1"),
        (([(0, 4)], [(0, 4)], [0, 1]), {}, "lengths disagree: 1, 1, 2"),
        (([(0, 4, 5)], [(0, 4)]), {}, "q_ranges: expected shape"),
        (([(0, 4), (5,)], [(0, 4), (0, 4)]), {}, "q_ranges: expected entries of one length"),
        (([(0, 4)], torch.zeros(1, 2)), {}, "k_ranges: expected integers"),
        (([(0, 12)], [(0, 4)]), {}, "q_range of slice 0"),
        (([(4, 0)], [(0, 4)]), {}, "q_range of slice 0"),
        (([(0, 4)], [(0, 12)]), {}, "k_range of slice 0"),
        (([(0, 4)], [(0, 4)], [4]), {}, "mask_type of slice 0"),
        (([(0, 4), (3, 8)], [(0, 4), (2, 8)]), {}, "slice 0 .* and slice 1 .* overlap: both cover query 3, key 2"),
        ((), {"sink_layout": "shd"}, "sink_layout"),
        ((), {"sink": torch.zeros(2, 2), "sink_layout": "ssh"}, "sink: layout 'ssh' has 3 dimensions"),
        ((), {"sink": torch.zeros(2, 3)}, r"sink: expected shape \[num_sinks, 2\]"),
    ],
)
def test_bad_arguments_get_an_error_that_names_them(args, options, message):
    case = make_case()
    with pytest.raises(ValueError, match=message):
        flex_flash_attn_func(case.q, case.k, case.v, *args, **forced.on_device(options))


def test_kernels_for_gpus_are_refused_by_name_on_a_cpu():
    case = make_case(device="cpu")
    with pytest.raises(ValueError, match=r"^impl: 'ffa' (needs a Hopper GPU|is for .*) .* use '"):
        flex_flash_attn_func(case.q, case.k, case.v, impl="ffa")
