"""Attention whose queries other ranks compute, against dense attention, on gloo and on GPUs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import distributed, distributed_attention, travel
from megatron_magi.attention.prepared_batch import AttnShape, prepare_batch
from megatron_magi.comm.group_collective import group_cast, group_reduce
from megatron_magi.config import AttendConfig, MagiConfig, OverlapConfig
from megatron_magi.plan import Dispatch, Plan, given_dispatch, make_plan
from megatron_magi.runtime.upload import current_device
from tests import forced
from tests.attention import cases as cs
from tests.attention.test_distributed import run_case
from tests.attention.test_layouts import check, check_drawn, check_on_gpus, scattered, two_nodes


def plans_of(case: cs.Case, num_ranks: int) -> list[Plan]:
    """Over several layouts, computed in others; with four ranks and more the last rank of a scattered one is empty."""
    n, seed = case.mask.total_seqlen_q, case.seed
    contiguous, zigzag = (given_dispatch(name, n, num_ranks) for name in ("contiguous", "zigzag"))
    some = given_dispatch(scattered(n, num_ranks, seed), n, num_ranks)
    pairs: list[tuple[Dispatch | None, Dispatch]] = [(contiguous, zigzag), (zigzag, some), (some, contiguous)]
    pairs.append((None, on_one(n, num_ranks, seed % num_ranks)))
    return [make_plan(case.mask, case.config, num_ranks, *pair) for pair in pairs]


def on_one(total_seqlen: int, num_ranks: int, rank: int) -> Dispatch:
    """All tokens on one rank."""
    return given_dispatch([range(total_seqlen if r == rank else 0) for r in range(num_ranks)], total_seqlen, num_ranks)


def run_travel(rank: int, num_ranks: int, todo: list[cs.Case], device: str = "cpu") -> list[list[dict]]:
    device = str(current_device()) if device == "cuda" else device
    return [[run_case(c, rank, plan, device) for plan in plans_of(c, num_ranks)] for c in todo]


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_queries_computed_anywhere_equal_dense_attention(ranks, num_ranks: int) -> None:
    check_drawn(lambda todo: ranks(num_ranks, run_travel, todo))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_option_works_with_queries_that_travel(ranks, num_ranks: int) -> None:
    todo = [c for c in cs.variants() if not c.config.dispatch.uneven_shard or c.mask.total_seqlen_q >= num_ranks]
    todo += [cs.Case(cs.documents([20, 31]), MagiConfig(), head_dim=24, head_dim_v=16)]
    todo = two_nodes(todo) if num_ranks == 4 else todo
    check(todo, ranks(num_ranks, run_travel, todo))


def run_prepared(rank: int, num_ranks: int, case: cs.Case, device: str = "cpu") -> list[tuple[torch.Tensor, ...]]:
    """Results of two plans over one layout, and of the same from a prepared batch."""
    device = str(current_device()) if device == "cuda" else device
    config, n = case.config, case.mask.total_seqlen_q
    shape = AttnShape(case.num_heads_q, case.num_heads_kv, case.head_dim, case.head_dim_v, case.dtype)
    shape = shape.kernels_for(device, config.attend.impl)
    x, found = cs.inputs(case), []
    home, hosts = (given_dispatch(scattered(n, num_ranks, at), n, num_ranks) for at in (3, 4))
    for is_prepared in (False, True):
        plans = {
            name: make_plan(mask, config, num_ranks, home, hosts).for_rank(rank)
            for name, mask in (("documents", case.mask), ("window", cs.window(n, 9)))
        }
        if is_prepared:
            prepare_batch(plans, shape, config).to(device)
            assert all(plan.runtime.moves for plan in plans.values())
        rows = torch.from_numpy(np.minimum(home.global_index(rank), n - 1))
        for plan in plans.values():
            q, k, v = (x[name][rows].to(device, case.dtype).requires_grad_() for name in "qkv")
            out, _ = distributed_attention(q, k, v, plan, dist.group.WORLD, config=config)
            out[: plan.num_tokens].sum().backward()
            found.append(tuple(t[: plan.num_tokens].detach().cpu() for t in (out, q.grad, k.grad, v.grad)))
    return found


def assert_prepared_is_plain(results: list[list[tuple[torch.Tensor, ...]]]) -> None:
    for plain_documents, plain_window, documents, window in results:
        for plain, prepared in ((plain_documents, documents), (plain_window, window)):
            assert all(torch.equal(a, b) for a, b in zip(plain, prepared, strict=True))


def test_prepared_batches_and_several_masks_over_one_layout_travel(ranks) -> None:
    case = cs.Case(cs.documents([30, 34]), MagiConfig(attend=AttendConfig(impl=forced.impl("torch"))))
    assert_prepared_is_plain(ranks(3, run_prepared, case))


def run_not_finite(rank: int, num_ranks: int) -> str:
    """The error of each rank where a row of rank 1 that rank 0 computes is not finite."""
    config = MagiConfig(attend=AttendConfig(impl=forced.impl("torch"), sanity_check=True))
    home, hosts = (given_dispatch(name, 64, num_ranks) for name in ("contiguous", "zigzag"))
    plan = make_plan(cs.documents([64]), config, num_ranks, home, hosts).for_rank(rank)
    q, k, v = (torch.ones(32, heads, 8) for heads in (4, 2, 2))
    distributed_attention(q, k, v, plan, dist.group.WORLD, config=config)
    q[plan.moves.rows[0] if rank == 1 else 0] = torch.nan if rank == 1 else 1.0
    with pytest.raises((ValueError, RuntimeError)) as caught:
        distributed_attention(q, k, v, plan, dist.group.WORLD, config=config)
    return str(caught.value)


def test_a_row_that_travels_and_is_not_finite_is_named_before_it_is_sent(ranks) -> None:
    other, here = ranks(2, run_not_finite)
    assert here.startswith("q: row 16 holds nan; another rank computes it, on rank 1 of the group")
    assert "rank 1" in other and "q: row 16 holds nan" in other


def run_counting(rank: int, num_ranks: int, case: cs.Case) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this rank receives in a step, as collectives count them and as the plan says."""
    received = {"keys": 0, "gradients of keys": 0, "moves": 0}

    def counting(collective, what: str):
        def call(*args, **options):
            handle = collective(*args, **options)
            received[what] += handle.received_bytes
            return handle

        return call

    distributed.group_cast, distributed.group_reduce = (
        counting(group_cast, "keys"),
        counting(group_reduce, "gradients of keys"),
    )
    travel.group_cast = counting(group_cast, "moves")
    home, hosts = (given_dispatch(scattered(64, num_ranks, at), 64, num_ranks) for at in (3, 4))
    plan = make_plan(case.mask, case.config, num_ranks, home, hosts)
    run_case(case, rank, plan)
    stats, of_rank, size = plan.stats(), plan.for_rank(rank), case.dtype.itemsize
    of_key = case.num_heads_kv * (case.head_dim + case.head_dim_v) * size
    dim, dim_v, num_sent = case.head_dim, case.head_dim_v, len(of_rank.moves.rows)
    # q and dout arrive for guests; out, lse (at least fp32) and dq of rows that others compute.
    of_lse = max(size, 4)
    moved = stats.guest_rows[rank] * (dim + dim_v) * size + num_sent * ((dim_v + dim) * size + of_lse)
    return received, {
        "keys": 2 * stats.received_rows[rank] * of_key,
        "gradients of keys": sum(transfer.num_send for transfer in of_rank.transfers) * of_key,
        "moves": moved * case.num_heads_q,
    }


@pytest.mark.parametrize("dtype", [forced.DTYPE, torch.bfloat16])
def test_bytes_are_those_of_the_plan(ranks, dtype) -> None:
    case = cs.Case(
        cs.documents([30, 34]), MagiConfig(attend=AttendConfig(impl=forced.impl("torch"))), head_dim_v=4, dtype=dtype
    )
    for counted, planned in ranks(3, run_counting, case):
        assert counted == planned and planned["moves"] > 0


@pytest.mark.gpu
@pytest.mark.ranks(2)
@cs.by_kernels
def test_queries_travel_between_gpus(ranks, variants) -> None:
    check_on_gpus(variants()[::4], ranks, run_travel)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.ranks(2)
@pytest.mark.parametrize("one_launch", [False, True])
def test_prepared_batches_travel_between_gpus(ranks, one_launch) -> None:
    config = MagiConfig(
        overlap=OverlapConfig(one_launch=one_launch), attend=AttendConfig(impl="ffa", deterministic=True)
    )
    case = cs.Case(cs.documents([700, 900]), config, head_dim=64, head_dim_v=64, dtype=torch.bfloat16)
    run = functools.partial(run_prepared, device="cuda")
    assert_prepared_is_plain(ranks(2, run, case, backend="nccl", timeout_s=240.0))
