"""Padding of tensors and masks that users do by themselves."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_magi import api
from megatron_magi.mask import AttnMask
from megatron_magi.mask.dense import dense_mask


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tensor_grows_on_one_side_of_one_dimension(dim, side):
    x = torch.randn(2, 3, 4, requires_grad=True)
    padded = api.pad_at_dim(x, dim, 5, value=-1.0, side=side)
    length = x.shape[dim]
    first, fill = (5, 0) if side == "left" else (0, length)
    torch.testing.assert_close(padded.narrow(dim, first, length), x)
    assert (padded.narrow(dim, fill, 5) == -1).all() and padded.shape[dim] == length + 5
    padded.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unpadding_takes_off_what_padding_put_on(dim):
    x = torch.arange(24).view(2, 3, 4)
    assert torch.equal(api.unpad_at_dim(api.pad_at_dim(x, dim, 7, value=3), dim, 7), x)
    assert torch.equal(api.unpad_at_dim(x, dim, 0), x) and api.pad_at_dim(x, dim, 0).dtype == x.dtype


def test_what_is_filled_in_is_exact_and_autocast_changes_no_dtype():
    most = 2**63 - 1
    assert api.pad_at_dim(torch.tensor([1]), 0, 1, value=most).tolist() == [1, most]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16):
            padded = api.pad_at_dim(torch.ones(2, dtype=dtype), 0, 1)
        assert padded.dtype == dtype and padded.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "dtype, value",
    [
        (torch.int64, 1.5),
        (torch.int64, math.nan),
        (torch.int64, True),
        (torch.bool, 2),
        (torch.bool, 0.5),
        (torch.bool, math.nan),
        (torch.int8, 300),
        (torch.uint8, -1),
        (torch.uint64, 2**64),
        (torch.float16, 1e6),
        (torch.float32, 1j),
        (torch.float32, "0"),
        (torch.float32, None),
        (torch.complex64, 1e40j),
        (torch.float8_e4m3fn, math.inf),
        (torch.float8_e8m0fnu, -1),
        (torch.float4_e2m1fn_x2, 1),
    ],
    ids=str,
)
def test_a_value_that_the_dtype_does_not_hold_is_refused(dtype, value):
    x = torch.zeros(2, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(2, dtype=dtype)
    with pytest.raises(ValueError, match=r"^value: expected "):
        api.pad_at_dim(x, 0, 1, value=value)


@pytest.mark.parametrize(
    "dtype, value",
    [
        (torch.int8, -128.0),
        (torch.bool, True),
        (torch.uint64, 2**64 - 1),
        (torch.float32, Fraction(1, 2)),
        (torch.float16, -math.inf),
        (torch.float64, np.float32(0.5)),
        (torch.int32, np.int64(-7)),
        (torch.complex64, 1 - 2j),
        (torch.float8_e4m3fn, 0.5),
        (torch.float8_e8m0fnu, 4),
    ],
    ids=str,
)
def test_a_value_that_the_dtype_holds_is_filled_in(dtype, value):
    x = torch.ones(2, 2).to(dtype)
    padded = api.pad_at_dim(x, 1, 1, value=value)
    assert padded.dtype == dtype and padded.shape == (2, 3) and [row[2] for row in padded.tolist()] == [value] * 2
    assert padded[:, :2].tolist() == x.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_nan_may_be_filled_in_where_there_is_one(dtype):
    assert api.pad_at_dim(torch.ones(1).to(dtype), 0, 1, value=math.nan).float()[1].isnan()


def test_numbers_of_four_bits_are_padded_with_zeros():
    x = torch.tensor([[17, 34]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert api.pad_at_dim(x, 1, 2).view(torch.uint8).tolist() == [[17, 34, 0, 0]]


def test_a_padded_mask_is_the_mask_with_rows_that_see_nothing():
    q_ranges, k_ranges = api.AttnRanges.from_ranges([[0, 4], [4, 9]]), api.AttnRanges.from_ranges([[0, 4], [0, 9]])
    types = [api.AttnMaskType.FULL, api.AttnMaskType.CAUSAL]
    padded_q, padded_k, padded_types = api.apply_padding(q_ranges, k_ranges, types, total_seqlen=9, pad_size=3)
    assert (q_ranges.size, k_ranges.size, len(types)) == (2, 2, 2)  # new lists
    assert padded_types == [*types, api.AttnMaskType.FULL]
    before = dense_mask(AttnMask.from_ranges(q_ranges, k_ranges, [0, 1], 9))
    after = dense_mask(AttnMask.from_ranges(padded_q, padded_k, [t.to_int_type() for t in padded_types], 12))
    assert (after == np.pad(before, ((0, 3), (0, 3)))).all()
    key = api.magi_attn_flex_key(padded_q, padded_k, padded_types, 12, 12)
    assert key.q_ranges == padded_q and key.total_seqlen_q == 12


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: api.pad_at_dim(torch.zeros(2, 2), 2, 1), "dim: 2, but x has 2 dimensions"),
        (lambda: api.pad_at_dim(torch.zeros(2, 2), 0, -1), "pad_size"),
        (lambda: api.pad_at_dim([0, 0], 0, 1), "x: expected a tensor"),
        (lambda: api.unpad_at_dim(None, 0, 1), "x: expected a tensor"),
        (lambda: api.pad_at_dim(torch.zeros(2, 2), 0, 1, side="top"), "side: expected 'left' or 'right'"),
        (lambda: api.unpad_at_dim(torch.zeros(2, 2), 0, 3), "pad_size: 3, but x has 2 entries"),
        (lambda: api.unpad_at_dim(torch.zeros(2, 2), -3, 1), "dim: -3"),
        (lambda: api.apply_padding([[0, 2]], [[0, 2]], ["full"] * 2, 2, 1), "attn_mask_type"),
        (lambda: api.apply_padding([[0, 2]], [[0, 2]], "full", 2, -1), "pad_size"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
