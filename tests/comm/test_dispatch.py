"""dispatch, undispatch and roll against operations on the whole tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.comm.dispatch import UndispatchArgs, dispatch, dispatch_replicated, undispatch
from megatron_magi.comm.roll import RollArgs, make_roll_args, roll
from megatron_magi.testing.spawn import run_ranks
from tests.comm.random_transfers import random_tensor

# (total_seqlen, shard_lengths): even, odd and uneven, padded, an empty shard, nothing but padding on a rank.
CASES = [
    (12, (6, 6)),
    (13, (6, 7)),
    (11, (6, 6)),
    (11, (3, 0, 8)),
    (7, (4, 4, 4)),
    (17, (5, 5, 5, 5)),
]


def shards(total_seqlen: int, shard_lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Global rows of each rank, ascending; rows from total_seqlen on are padding."""
    padded = sum(shard_lengths)
    owner = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(shard_lengths)), shard_lengths))
    assert padded >= total_seqlen
    return [np.flatnonzero(owner == r) for r in range(len(shard_lengths))]


def test_dispatch_fills_padding_and_keeps_the_dtype():
    index = torch.tensor([1, 4, 3, 5])
    assert dispatch(torch.tensor([10, 11, 12, 13]), index, pad_value=-7).tolist() == [11, -7, 13, -7]
    flags = dispatch(torch.tensor([True, True, True, True]), index)
    assert flags.dtype == torch.bool and flags.tolist() == [True, False, True, False]
    wide = dispatch(torch.arange(8.0).view(2, 4, 1), index, dim=1, pad_value=0.5)
    assert wide.shape == (2, 4, 1) and wide[1, :, 0].tolist() == [5.0, 0.5, 7.0, 0.5]
    assert dispatch(torch.zeros(2, 0, 3), torch.tensor([0]), dim=1, pad_value=3).tolist() == [[[3.0] * 3]] * 2
    most = 2**63 - 1
    assert dispatch(torch.zeros(0, dtype=torch.int64), torch.tensor([0]), pad_value=most).tolist() == [most]
    empty = torch.zeros(0, 2, requires_grad=True)
    padding = dispatch(empty, torch.tensor([0, 1]), pad_value=3)
    assert padding.tolist() == [[3.0, 3.0]] * 2
    padding.sum().backward()  # as with any other length
    assert empty.grad.shape == empty.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch(empty.half(), torch.tensor([0])).dtype == torch.float16


def quantized(rank, num_ranks, device="cpu"):
    index = shards(7, (4, 4), seed=1)
    mine = torch.from_numpy(index[rank]).to(device)
    args = UndispatchArgs.build(index, 7, rank, device)
    rolling = RollArgs.build(make_roll_args(index, 1, 7, rank), device)
    values = torch.arange(1.0, 15.0).view(7, 2)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        x = values.to(dtype).to(device)
        with torch.device("meta"):  # of new tensors, which does not matter
            local = dispatch(x, mine, pad_value=0.5)
        assert local.dtype == dtype and (local.float()[mine == 7] == 0.5).all()
        assert torch.equal(dispatch(x.T, mine, dim=1, pad_value=0.5).T.float(), local.float())
        assert torch.equal(undispatch(local, args).float(), x.float())
        assert torch.equal(roll(local, rolling).float(), dispatch(x.float().roll(1, 0), mine, pad_value=0.5))
    short = torch.arange(-7, 7, dtype=torch.int16, device=device).view(7, 2) * 4096  # all signs and exponents
    local = dispatch(short, mine, pad_value=2)
    assert torch.equal(undispatch(local, args), short)
    assert torch.equal(roll(local, rolling), dispatch(short.roll(1, 0), mine, pad_value=2))
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        most = torch.iinfo(dtype).max
        x = torch.tensor([[0, most], *[[i, most - i] for i in range(6)]], dtype=dtype).to(device)
        local = dispatch(x, mine, pad_value=most)
        padding = [row for row, source in zip(local.tolist(), mine.tolist(), strict=True) if source == 7]
        assert local.dtype == dtype and padding == [[most, most]] * int((mine == 7).sum())
        assert undispatch(local, args).tolist() == x.tolist()
        assert undispatch(roll(local, rolling), args).tolist() == [x[-1].tolist(), *x[:-1].tolist()]
    packed = torch.arange(14, dtype=torch.uint8, device=device).view(7, 2).view(torch.float4_e2m1fn_x2)
    back = undispatch(dispatch(packed, mine), args)
    assert back.dtype == packed.dtype and torch.equal(back.view(torch.uint8), packed.view(torch.uint8))


def test_rows_of_dtypes_with_few_operations_are_moved_too(ranks):
    ranks(2, quantized)


def test_gradients_that_rows_of_such_dtypes_would_lose_are_refused():
    index = shards(4, (4,))
    args, rolling = UndispatchArgs.build(index, 4, 0, "cpu"), RollArgs.build(make_roll_args(index, 1, 4, 0), "cpu")
    x = torch.ones(4, 2).to(torch.float8_e4m3fn).requires_grad_()
    for move in (
        lambda: dispatch(x, torch.arange(4)), lambda: undispatch(x, args), lambda: roll(x, rolling),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^x: rows of torch\.float8_e4m3fn are moved without gradients"):
            move()
        with torch.no_grad():
            assert move().dtype == x.dtype


def test_padding_is_finite_whatever_lies_beside_it():
    """Kernels multiply hidden keys by 0, so no NaN may ever get into padding: not of a row, not of a gradient."""
    x = torch.full((4, 2), torch.nan, requires_grad=True)
    index = torch.tensor([3, 4, 0, 5])
    local = dispatch(x, index)
    assert (local[[1, 3]] == 0).all() and local[[0, 2]].isnan().all()
    upstream = torch.ones(4, 2)
    upstream[[1, 3]] = torch.nan
    (grad,) = torch.autograd.grad(local, x, upstream)
    assert grad.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    rows = torch.zeros(4, 2, requires_grad=True)
    args = UndispatchArgs.build([np.array([0, 1, 2, 3])], 3, 0, "cpu")
    (grad,) = torch.autograd.grad(undispatch(rows, args), rows, torch.full((3, 2), torch.nan))
    assert (grad[3] == 0).all()
    rolling = RollArgs.build(make_roll_args([np.array([0, 1, 2, 3])], 1, 3, 0), "cpu")
    rolled = roll(torch.cat([torch.full((3, 2), torch.nan), torch.zeros(1, 2)]), rolling)
    assert (rolled[3] == 0).all()


def test_one_rank_sums_the_parts_of_a_gradient_without_a_group():
    args = UndispatchArgs.build([np.array([2, 0, 3, 1])], 3, 0, "cpu")
    rows, upstream = torch.zeros(4, requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    undispatch(rows, args, is_partial_grad=True).backward(upstream)
    assert rows.grad.tolist() == [3.0, 1.0, 0.0, 2.0]


def test_the_gradient_of_dispatch_is_zero_for_rows_of_other_ranks():
    x = random_tensor((5, 3), torch.float64, 0).requires_grad_()
    index = torch.tensor([3, 0, 6, 5])
    upstream = random_tensor((4, 3), torch.float64, 1)
    dispatch(x, index, pad_value=2).backward(upstream)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    expected[3], expected[0] = upstream[0], upstream[1]
    assert torch.equal(x.grad, expected)


def round_trip(rank, num_ranks, total_seqlen, shard_lengths, device="cpu"):
    index = shards(total_seqlen, shard_lengths)
    args = UndispatchArgs.build(index, total_seqlen, rank, device)
    all_rows = UndispatchArgs.build(index, sum(shard_lengths), rank, device)
    mine = torch.from_numpy(index[rank]).to(device)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for dim, shape in (
            (0, (total_seqlen, 3)),
            (1, (2, total_seqlen)),
            (-1, (2, 1, total_seqlen)),
            (-2, (total_seqlen, 3)),
        ):
            x = random_tensor(shape, dtype, 3).to(device)
            local = dispatch(x, mine, dim=dim, pad_value=99)
            back = undispatch(local, args, dim=dim)
            assert torch.equal(back, x)
            padded = undispatch(local, all_rows, dim=dim)
            assert padded.shape[dim] == sum(shard_lengths)
            assert (padded.movedim(dim, 0)[total_seqlen:] == 99).all()


@pytest.mark.parametrize(("total_seqlen", "shard_lengths"), CASES)
def test_dispatch_then_undispatch_is_identity(ranks, total_seqlen, shard_lengths):
    ranks(len(shard_lengths), round_trip, total_seqlen, shard_lengths)


def undispatch_gradients(rank, num_ranks, total_seqlen, shard_lengths, device="cpu"):
    index = shards(total_seqlen, shard_lengths)
    args = UndispatchArgs.build(index, total_seqlen, rank, device)
    is_token = torch.from_numpy(index[rank] < total_seqlen).to(device)
    tokens = torch.from_numpy(index[rank]).to(device)[is_token]
    parts = [random_tensor((2, total_seqlen), torch.float64, 10 + r).to(device) for r in range(num_ranks)]
    for is_partial_grad, upstream, whole in ((False, parts[0], parts[0]), (True, parts[rank], sum(parts))):
        local = random_tensor((2, len(index[rank])), torch.float64, rank).to(device).requires_grad_()
        out = undispatch(local, args, dim=1, is_partial_grad=is_partial_grad)
        out.backward(upstream)
        torch.testing.assert_close(local.grad[:, is_token], whole[:, tokens], rtol=1e-14, atol=1e-14)
        assert (local.grad[:, ~is_token] == 0).all()


@pytest.mark.parametrize(("total_seqlen", "shard_lengths"), CASES)
def test_undispatch_returns_its_slice_of_a_whole_gradient_and_the_sum_of_partial_ones(
    ranks, total_seqlen, shard_lengths
):
    ranks(len(shard_lengths), undispatch_gradients, total_seqlen, shard_lengths)


def roll_everything(rank, num_ranks, total_seqlen, shard_lengths, device="cpu"):
    index = shards(total_seqlen, shard_lengths, seed=1)
    mine = torch.from_numpy(index[rank]).to(device)
    is_token = mine < total_seqlen
    x = random_tensor((2, total_seqlen, 3), torch.float64, 5).to(device)
    upstream = random_tensor((2, total_seqlen, 3), torch.float64, 6).to(device)
    for shift in (0, 1, -1, 5, -total_seqlen + 1, 3 * total_seqlen + 2):
        args = RollArgs.build(make_roll_args(index, shift, total_seqlen, rank), device)
        for impl in ("reference", "all_to_all"):
            local = dispatch(x, mine, dim=1, pad_value=-5).requires_grad_()
            rolled = roll(local, args, dim=1, impl=impl)
            assert torch.equal(rolled, dispatch(torch.roll(x, shift, 1), mine, dim=1, pad_value=-5))
            rolled.backward(dispatch(upstream, mine, dim=1, pad_value=7))
            expected = dispatch(torch.roll(upstream, -shift, 1), mine, dim=1, pad_value=7)
            assert torch.equal(local.grad, expected)
        tokens = dispatch(torch.arange(total_seqlen, device=device), mine, pad_value=-1)
        back = roll(roll(tokens, args), args.inverse)
        assert torch.equal(back, tokens) and (back[~is_token] == -1).all()


@pytest.mark.parametrize(("total_seqlen", "shard_lengths"), CASES)
def test_roll_equals_torch_roll_of_the_whole_and_its_gradient_rolls_back(ranks, total_seqlen, shard_lengths):
    ranks(len(shard_lengths), roll_everything, total_seqlen, shard_lengths)


def test_roll_sends_only_rows_that_change_their_rank():
    # Two contiguous halves: with a shift by one, one row leaves each rank.
    halves = [np.arange(0, 8), np.arange(8, 16)]
    for rank in (0, 1):
        arrays = make_roll_args(halves, 1, 16, rank)
        assert arrays.send_rows.tolist() == [7] and arrays.recv_rows.tolist() == [0]
        assert arrays.send_splits == tuple(1 - (r == rank) for r in (0, 1)) == arrays.recv_splits


def test_roll_and_undispatch_work_on_one_rank_without_a_group():
    index = np.array([0, 1, 2, 3, 4])
    x = torch.arange(5.0)
    args = RollArgs.build(make_roll_args([index], 2, 4, 0), "cpu")
    assert roll(x, args).tolist() == [2.0, 3.0, 0.0, 1.0, 4.0]
    assert undispatch(x, UndispatchArgs.build([index], 4, 0, "cpu")).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_lengths_that_disagree_raise_and_name_the_argument():
    for second in ([1, 2], [2, 4], [1, 3]):
        with pytest.raises(ValueError, match="global_index: does not hold every one of 4 tokens exactly once"):
            make_roll_args([np.array([0, 1]), np.array(second)], 1, 4, 0)
    args = RollArgs.build(make_roll_args([np.arange(4)], 1, 4, 0), "cpu")
    with pytest.raises(ValueError, match="x_local: 3 rows along dim 0, this rank's shard has 4"):
        roll(torch.zeros(3), args)
    args = UndispatchArgs.build([np.arange(4)], 4, 0, "cpu")
    with pytest.raises(ValueError, match="x_local: 3 rows along dim 0, this rank's shard has 4"):
        undispatch(torch.zeros(3), args)
    with pytest.raises(ValueError, match="x: 3 rows along dim 0, but args is for 4"):
        dispatch_replicated(torch.zeros(3), args)
    for index, total_seqlen in (([0, 1, 1], 3), ([0, 1, 3], 3), ([0, -1, 1], 3), ([0, 1, 2], 4)):
        with pytest.raises(ValueError, match=f"global_index: expected every row .* at least {total_seqlen}"):
            UndispatchArgs.build([np.array(index)], total_seqlen, 0, "cpu")


def use_args_of_three(rank, num_ranks):
    args = UndispatchArgs.build(shards(6, (2, 2, 2)), 6, rank, "cpu")
    for move in (lambda: undispatch(torch.zeros(2), args), lambda: dispatch_replicated(torch.zeros(6), args)):
        with pytest.raises(ValueError, match="args: for 3 ranks, group has 2"):
            move()


def test_arguments_for_another_number_of_ranks_are_refused(ranks):
    ranks(2, use_args_of_three)


def test_a_sequence_without_tokens_comes_back():
    args = UndispatchArgs.build([np.array([], dtype=np.int64)], 0, 0, "cpu")
    assert undispatch(torch.zeros(0, 2), args).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_rows_of_dtypes_with_few_operations_are_moved_on_gpus():
    run_ranks(quantized, 2, "cuda", backend="nccl", timeout_s=300)


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", [round_trip, undispatch_gradients, roll_everything])
def test_dispatch_undispatch_and_roll_on_gpus(check):
    run_ranks(check, 2, 13, (6, 8), "cuda", backend="nccl", timeout_s=300)
