"""The Hopper kernels as users call them, on random masks with random options, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.mask import AttnMask
from megatron_magi.operands.options import make_options
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from tests.backends.sm90.cases import Inputs, assert_as_good, plain_attention
from tests.ops.naive import Case, masks, packed_causal

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEADS = [(48, 1), (16, 3), (24, 2), (6, 8), (7, 7), (1, 48)]
"""Key heads and query heads of each: so many that errors of single rows even out."""


def call(case: Case, ranges, *, impl: str = "ffa", **options) -> dict[str, torch.Tensor]:
    """Results and gradients of the function that users call."""

    def attend(q, k, v, sink):
        layout = case.sink or "sh"
        out, meta = flex_flash_attn_func(
            q, k, v, *ranges,
            sink=sink, sink_layout=layout, softcap=case.softcap, return_max_logits=True, impl=impl, **options,
        )  # fmt: skip
        return out, meta.lse, meta.max_logits

    return case.run(attend)


def slices_of(mask: AttnMask) -> list[torch.Tensor]:
    """``q_ranges, k_ranges, attn_type_map`` as tensors."""
    table = torch.tensor(mask.table, dtype=torch.int32)
    return [table[:, :2], table[:, 2:4], table[:, 4]]


def check(case: Case, impl: str = "ffa") -> None:
    got, exact = call(case, slices_of(case.mask), impl=impl), case.expected(torch.float64)
    options = make_options(case.q, None, case.softcap, False, 0)
    x = Inputs(case.q, case.k, case.v, case.dout, case.mask.bands, options)
    plain = plain_attention(x, case.sinks, from_out=True)
    for name, value in zip(("out", "dq", "dk", "dv", "dsink"), plain, strict=False):
        assert_as_good(name, got[name], value, exact[name])
    torch.testing.assert_close(got["lse"].double(), exact["lse"], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(got["max_logits"].double(), exact["max_logits"], atol=1e-3, rtol=1e-3)
    visible = case.visible
    for name, unseen in (("out", ~visible.any(1)), ("dq", ~visible.any(1)), ("dk", ~visible.any(0))):
        assert not bool(got[name][unseen].any()), f"{name} of tokens in no pair is not zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [*hopper_kernels.BACKWARD_DIMS, (96, 96), (80, 72)], ids=str)
@settings(max_examples=25)
@given(
    mask=masks(longest=400),
    heads=st.sampled_from(HEADS),
    softcap=st.sampled_from([0.0, 1.5]),
    sink=st.sampled_from([None, "sh", "ssh"]),
    seed=st.integers(0, 99),
)
def test_random_masks_and_options_match_fp64(dims, dtype, mask, heads, softcap, sink, seed):
    check(Case(mask, *heads, *dims, softcap=softcap, sink=sink, dtype=dtype, device="cuda", seed=seed))


@pytest.mark.parametrize("dims", hopper_kernels.BACKWARD_DIMS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_flags_of_other_kernels_change_no_bit(deterministic, dims):
    case = Case(packed_causal([300, 7, 450, 63]), 2, 4, *dims, sink="sh", dtype=torch.bfloat16, device="cuda")
    plain = call(case, slices_of(case.mask), deterministic=deterministic)
    names = (
        "disable_fwd_atomic_reduction disable_bwd_dkv_atomic_reduction auto_range_merge swap_ab pack_gqa cat_gqa "
        "sparse_load swap_bwd_qk_loop"
    )
    flags = dict.fromkeys(names.split(), True)
    flags |= {"ref_block_size": (64, 128), "max_seqlen_q": 5, "max_seqlen_k": 7, "sm_margin": 8}
    flagged = call(case, slices_of(case.mask), deterministic=deterministic, **flags)
    # Sums in memory have no order but where that was asked for.
    for name in plain if deterministic else ("out", "lse", "max_logits"):
        assert torch.equal(plain[name], flagged[name]), name
