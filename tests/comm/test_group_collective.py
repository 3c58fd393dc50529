"""group_cast and group_reduce move the right bits, to the right rows, and add up what comes back."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.comm.group_collective import GroupCastArgs, Handle, group_cast, group_reduce, group_reduce_lse
from megatron_magi.comm.movement import Started
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.testing.spawn import run_ranks
from tests.comm.random_transfers import check_casts, random_tensor, random_transfers, same_bits

DTYPES = (torch.int32, torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
IMPLS = ("reference", "all_to_all")


def cast_everything(rank, num_ranks, device="cpu", impls=IMPLS):
    """Casts of every dtype, width, order and implementation; returns the number of comparisons."""
    compared = 0
    for seed in range(6):
        transfers = random_transfers(num_ranks, seed, with_order=seed % 3 > 0)
        args = transfers.args(rank, device)
        for at, dtype in enumerate(DTYPES):
            # k and v of different widths after a tensor of another dtype, of one element a row.
            kinds = (((), DTYPES[at - 1]), ((2, 3), dtype), ((2, 5), dtype))
            compared += check_casts(transfers, args, rank, kinds, impls, device)
    return compared


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_group_cast_moves_exactly_the_asked_for_bits(ranks, num_ranks):
    assert ranks(num_ranks, cast_everything) == [6 * 6 * 2 * 3] * num_ranks


def reduce_everything(rank, num_ranks):
    for seed in range(6):
        transfers = random_transfers(num_ranks, seed, with_order=seed % 3 > 0)
        all_args = [transfers.args(r) for r in range(num_ranks)]
        args = all_args[rank]
        partials = [random_tensor((a.num_recv, 2, 3), torch.float64, 10 * seed + r) for r, a in enumerate(all_args)]
        dense = torch.zeros(transfers.num_rows[rank], 2, 3, dtype=torch.float64)
        for r, partial in enumerate(partials):
            order = transfers.recv_order[r]
            received = (
                partial if order is None else torch.empty_like(partial).index_copy_(0, torch.from_numpy(order), partial)
            )
            start = sum(len(transfers.rows[i][r]) for i in range(rank))
            rows = torch.from_numpy(transfers.rows[rank][r])
            dense.index_add_(0, rows, received[start : start + len(rows)])
        x = random_tensor((transfers.num_rows[rank], 2, 3), torch.float64, 999 + rank)
        for impl in IMPLS:
            base = random_tensor(tuple(dense.shape), torch.float64, 77 + rank)
            into = base.clone()
            (result,) = group_reduce([partials[rank]], args, into=[into], impl=impl).wait()
            assert result is into
            torch.testing.assert_close(into, base + dense, rtol=1e-14, atol=1e-14)
            # <cast x, y> = <x, reduce y>, both summed over all ranks.
            (cast,) = group_cast([x], args, impl=impl).wait()
            sums = torch.stack([(cast * partials[rank]).sum(), (x * (into - base)).sum()])
            dist.all_reduce(sums)
            torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_group_reduce_sums_like_a_dense_computation_and_is_the_adjoint_of_group_cast(ranks, num_ranks):
    ranks(num_ranks, reduce_everything)


def reduce_low_precision(rank, num_ranks, device="cpu", impls=IMPLS):
    transfers = random_transfers(num_ranks, 4, with_order=True)
    args = transfers.args(rank, device)
    results = []
    for impl in (*impls, *impls):
        partials = [random_tensor((args.num_recv, w), torch.bfloat16, 5 * rank + w).to(device) for w in (3, 8)]
        into = [random_tensor((transfers.num_rows[rank], w), torch.float32, w).to(device) for w in (3, 8)]
        handle = group_reduce(partials, args, into=into, impl=impl)
        for x in partials:
            x.fill_(float("nan"))
        results.append(handle.wait())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert same_bits(a, b)
    return results[0][0].cpu()


def test_group_reduce_of_bf16_into_fp32_is_bitwise_repeatable_across_impls_and_runs(ranks):
    first, second = ranks(4, reduce_low_precision), ranks(4, reduce_low_precision)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in first)


def merge_lse(rank, num_ranks, device="cpu", impls=IMPLS):
    """Rank 0 owns 4 rows; every other rank has a partial result for all of them."""
    num_rows, num_heads, head_dim = 4, 2, 3
    others = num_ranks - 1
    rows = np.tile(np.arange(num_rows), others) if rank == 0 else np.zeros(0, dtype=np.int64)
    splits = [0] + [num_rows] * others if rank == 0 else [0] * num_ranks
    recv = [0] * num_ranks if rank == 0 else [num_rows] + [0] * others
    back = [max(rank - 1, 0) * num_rows, *[0] * others]
    peers = PeerRows(np.arange(sum(recv)), [0] * num_ranks, back, num_rows, num_rows, num_rows * others)
    args = GroupCastArgs.build(rows, splits, recv, None, device, peers)
    out = random_tensor((num_ranks, num_rows, num_heads, head_dim), torch.float64, 1).to(device)
    lse = 30 * random_tensor((num_ranks, num_rows, num_heads), torch.float64, 2).to(device)
    lse[0, 0], lse[1:, 1], lse[:, 2], lse[1, 3] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    part_out, part_lse = out.clone(), lse.clone()
    part_out[part_lse == -torch.inf] = float("nan")  # must not be looked at
    for impl in impls:
        into = (part_out[0].clone(), part_lse[0].clone()) if rank == 0 else (out[0, :0].clone(), lse[0, :0].clone())
        mine = slice(None) if rank else slice(0)
        handle = group_reduce_lse(part_out[rank][mine], part_lse[rank][mine], args, into=into, impl=impl)
        merged_out, merged_lse = handle.wait()
        if rank == 0:
            weights = torch.softmax(lse, dim=0).nan_to_num(0.0)
            torch.testing.assert_close(merged_out, (weights.unsqueeze(-1) * out).sum(0), rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(merged_lse, torch.logsumexp(lse, dim=0), rtol=1e-13, atol=1e-13)
            assert (merged_lse[2] == -torch.inf).all() and (merged_out[2] == 0).all()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_group_reduce_lse_equals_a_direct_softmax_also_for_parts_that_saw_nothing(ranks, num_ranks):
    ranks(num_ranks, merge_lse)


def overlapping_handles(rank, num_ranks):
    transfers = [random_transfers(num_ranks, seed, with_order=True) for seed in (2, 4, 6)]
    for impl in IMPLS:
        everyone = [[random_tensor((n, 4), torch.float32, r) for r, n in enumerate(t.num_rows)] for t in transfers]
        handles = [group_cast([e[rank]], t.args(rank), impl=impl) for e, t in zip(everyone, transfers, strict=True)]
        for at in (2, 0, 1):
            (got,) = handles[at].wait()
            assert same_bits(got, transfers[at].expected(everyone[at], rank))


def test_handles_in_flight_together_may_be_waited_for_in_any_order(ranks):
    ranks(3, overlapping_handles)


def count_bytes(rank, num_ranks):
    # Rank 0 sends 3 rows to rank 1 and keeps 2 for itself; no other rank sends.
    sends, receives = [[2, 3], [0, 0]][rank], [[2, 0], [3, 0]][rank]
    args = GroupCastArgs.build(np.arange(sum(sends)), sends, receives)
    tensors = [torch.zeros(5, 2, 4, dtype=torch.bfloat16), torch.zeros(5, 6, dtype=torch.float32)]
    counts = []
    for impl in IMPLS:
        handle = group_cast(tensors, args, impl=impl)
        handle.wait()
        counts.append((handle.sent_bytes, handle.received_bytes))
        back = group_reduce(
            [torch.zeros(args.num_recv, 2, 4, dtype=torch.bfloat16)], args, into=[torch.zeros(5, 2, 4)], impl=impl
        )
        back.wait()
        counts.append((back.sent_bytes, back.received_bytes))
    return counts


def test_handles_count_the_bytes_that_cross_ranks_and_no_others(ranks):
    cast_bytes, reduce_bytes = 3 * (8 * 2 + 6 * 4), 3 * 8 * 2
    assert ranks(2, count_bytes) == [
        [(cast_bytes, 0), (0, reduce_bytes)] * 2,
        [(0, cast_bytes), (reduce_bytes, 0)] * 2,
    ]


def nothing_at_all(rank, num_ranks):
    args = GroupCastArgs.build(np.zeros(0, dtype=np.int64), [0] * num_ranks, [0] * num_ranks)
    for impl in IMPLS:
        (got,) = group_cast([torch.ones(3, 2)], args, impl=impl).wait()
        assert got.shape == (0, 2)
        into = torch.ones(3, 2)
        group_reduce([torch.ones(0, 2)], args, into=[into], impl=impl).wait()
        assert torch.equal(into, torch.ones(3, 2))


def test_a_group_that_moves_nothing_does_not_hang(ranks):
    ranks(2, nothing_at_all)


def refuses(rank, num_ranks):
    args = GroupCastArgs.build(np.zeros(0, dtype=np.int64), [0] * num_ranks, [0] * num_ranks)
    wrong = GroupCastArgs.build(np.zeros(0, dtype=np.int64), [0] * 3, [0] * 3)
    with pytest.raises(ValueError, match="impl: expected one of"):
        group_cast([torch.ones(3, 2)], args, impl="push")
    with pytest.raises(ValueError, match="impl: 'native' is for GPUs and NCCL"):
        group_cast([torch.ones(3, 2)], args, impl="native")
    with pytest.raises(ValueError, match="args: splits for 3 ranks"):
        group_cast([torch.ones(3, 2)], wrong)
    with pytest.raises(ValueError, match="tensors: all must be on the device"):
        group_cast([torch.ones(3, 2, device="meta")], args, impl="all_to_all")
    on_meta = GroupCastArgs.build(np.zeros(0, dtype=np.int64), [0] * num_ranks, [0] * num_ranks, None, "meta")
    with pytest.raises(ValueError, match=r"^group: .*gloo.* cannot move tensors on meta"):
        group_cast([torch.ones(3, 2, device="meta")], on_meta, impl="all_to_all")


def test_unsupported_combinations_raise_and_name_the_argument(ranks):
    ranks(2, refuses)


@pytest.mark.parametrize("impl", ["auto", "reference", "all_to_all"])
def test_one_rank_needs_no_process_group(impl):
    args = GroupCastArgs.build(np.array([2, 0]), [2], [2], np.array([1, 0]))
    x = torch.arange(6.0).view(3, 2)
    handle = group_cast([x], args, impl=impl)
    (got,) = handle.wait()
    assert torch.equal(got, x[[0, 2]]) and handle.sent_bytes == 0
    into = torch.zeros(3, 2)
    group_reduce([got], args, into=[into], impl=impl).wait()
    assert torch.equal(into, x * torch.tensor([[1.0], [0.0], [1.0]]))


def test_what_is_under_way_keeps_its_tables_and_what_is_done_does_not():
    args = GroupCastArgs.build(np.array([0]), [1], [1])
    alive, started = weakref.ref(args), Started((), (torch.zeros(1),), lambda: None)
    handle = Handle(started, started.finish, (0, 0), (0, 0), args)
    del args
    assert alive() is not None
    handle.wait()
    assert alive() is None


def test_waiting_twice_raises():
    handle = group_cast([torch.ones(1, 1)], GroupCastArgs.build(np.array([0]), [1], [1]))
    handle.wait()
    with pytest.raises(RuntimeError, match="waited for already"):
        handle.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [2], [1], None), "send_index: expected 2 rows"),
        (([0], [1], [1, 0], None), "recv_splits: for 2 ranks"),
        (([0], [1], [-1], None), "recv_splits: must not be negative"),
        (([-1], [1], [1], None), "send_index: must not be negative"),
        (([0], [1], [2], [0, 0]), "recv_order: not a permutation"),
        (([0], [1], [2], [0]), "recv_order: not a permutation"),
    ],
)
def test_inconsistent_arguments_raise_and_name_the_argument(arguments, message):
    index, sends, receives, order = arguments
    with pytest.raises(ValueError, match=message):
        GroupCastArgs.build(np.array(index), sends, receives, None if order is None else np.array(order))


def test_tensors_that_do_not_fit_raise_and_name_the_argument():
    args = GroupCastArgs.build(np.array([4]), [1], [1])
    with pytest.raises(ValueError, match="tensors: 4 rows, but args sends row 4"):
        group_cast([torch.ones(4, 2)], args)
    with pytest.raises(ValueError, match="tensors: 2 rows, but args receives 1"):
        group_reduce([torch.ones(2, 2)], args, into=[torch.ones(5, 2)])
    with pytest.raises(ValueError, match="into: 4 rows, but args sends row 4"):
        group_reduce([torch.ones(1, 2)], args, into=[torch.ones(4, 2)])
    with pytest.raises(ValueError, match="into: 1 tensors for 2 to reduce"):
        group_reduce([torch.ones(1, 2)] * 2, args, into=[torch.ones(5, 2)])
    with pytest.raises(ValueError, match="lse: shape"):
        group_reduce_lse(torch.ones(1, 2), torch.ones(1), args, into=(torch.ones(5, 2), torch.ones(5)))
    with pytest.raises(ValueError, match="into: rows must be contiguous"):
        group_reduce([torch.ones(1, 2)], args, into=[torch.ones(5, 4)[:, ::2]])


@pytest.mark.parametrize(
    ("tensors", "offsets", "row_bytes"),
    [
        ([(3, torch.uint8)], (0,), 3),
        ([(3, torch.bfloat16), (1, torch.bfloat16)], (0, 6), 8),
        ([(3, torch.uint8), (1, torch.float32)], (0, 4), 8),
        ([(1, torch.float32), (3, torch.uint8)], (0, 4), 8),
        ([(0, torch.float32)], (0,), 4),  # views of no bytes could not be made
    ],
)
def test_a_row_of_a_message_is_padded_only_where_widths_do_not_fit(tensors, offsets, row_bytes):
    layout = RowLayout.of([torch.empty(0, size, dtype=dtype) for size, dtype in tensors])
    assert (layout.offsets, layout.row_bytes) == (offsets, row_bytes)


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", [cast_everything, reduce_low_precision, merge_lse])
def test_group_collectives_on_gpus_do_what_they_do_on_cpus(check):
    on_gpus, on_cpus = (
        run_ranks(check, 2, device, backend=backend, timeout_s=300)
        for device, backend in (("cuda", "nccl"), ("cpu", "gloo"))
    )
    for a, b in zip(on_gpus, on_cpus, strict=True):
        assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b


def test_what_only_the_reduction_needs_is_made_when_it_is_used():
    args = GroupCastArgs.build(np.array([2, 0, 1]), [3], [3], np.array([1, 2, 0]))
    x = torch.arange(6.0).view(3, 2)
    (received,) = group_cast([x], args).wait()
    assert torch.equal(received, x[[0, 1, 2]]) and not {"arrivals", "recv_position"} & set(vars(args))
    (total,) = group_reduce([received], args, into=[torch.zeros(3, 2)]).wait()
    assert torch.equal(total, x) and {"arrivals", "recv_position"} <= set(vars(args))
    assert args.arrivals is args.arrivals
    made = [
        args.send_index,
        args.recv_order,
        args.recv_position,
        args.arrivals.rows,
        args.arrivals.starts,
        args.arrivals.sources,
    ]
    assert sum(t.numel() for t in made) <= GroupCastArgs.num_indices(args.num_send, args.num_recv)
