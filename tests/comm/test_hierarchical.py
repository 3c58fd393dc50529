"""In two levels the same bits arrive, rows cross between nodes once, and partial rows are summed before they cross."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.comm import nodes, timeouts
from megatron_magi.comm.collective_checks import calls_of
from megatron_magi.comm.group_collective import (
    CastTables,
    LevelArgs,
    LevelTables,
    group_cast,
    group_reduce,
    group_reduce_lse,
)
from megatron_magi.comm.groups import timeout_s
from megatron_magi.comm.impl import hierarchical
from megatron_magi.comm.movement import Started
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.plan import Transfer
from megatron_magi.plan.hierarchy import two_levels
from megatron_magi.plan.partition import Ranges, Runs
from megatron_magi.testing.spawn import run_ranks
from tests.comm.random_transfers import Transfers, check_casts, random_tensor, random_transfers, same_bits
from tests.comm.test_group_collective import IMPLS

SHAPES = [pytest.param((2, 2), id="2x2"), pytest.param((4, 2), id="4x2")]
"""Nodes, and ranks of each."""
HELD_CYCLES = 20_000_000
"""Of the clock: about ten milliseconds."""


def held_and_fetched(transfers: Transfers) -> tuple[Ranges, Runs]:
    """Every row that travels, alone, and where it is: the tokens of the ranks alternate at random."""
    num_ranks = len(transfers.rows)
    holder = np.random.default_rng(0).permutation(np.repeat(np.arange(num_ranks), transfers.num_rows))
    token_of = [np.flatnonzero(holder == rank) for rank in range(num_ranks)]
    local = np.empty_like(holder)
    for held in token_of:
        local[held] = np.arange(len(held))
    fetched: list[tuple[int, int, int]] = []
    for j in range(num_ranks):
        tokens = np.concatenate([token_of[i][rows[j]] for i, rows in enumerate(transfers.rows)])
        order = transfers.recv_order[j]
        places = np.arange(len(tokens)) if order is None else np.argsort(order)
        fetched += [(j, token, place) for token, place in sorted(zip(tokens.tolist(), places.tolist(), strict=True))]
    dst, token, place = np.array(fetched, dtype=np.int64).reshape(-1, 3).T
    start = np.arange(len(holder))
    return Ranges(dst, token, token + 1, place), Runs(start, start + 1, holder, local)


def level_args(transfers: Transfers, rank: int, per_node: int, device: torch.device | str = "cpu") -> LevelArgs:
    levels = two_levels(*held_and_fetched(transfers), rank, len(transfers.rows), per_node)
    parts = (_tables(part) for part in (levels.near, levels.far, levels.relay))
    return LevelArgs.build(LevelTables(per_node, *parts, levels.near_rows, levels.relay_rows), device)


def _tables(part: Transfer) -> CastTables:
    peers = PeerRows(part.owner_rows, part.first_there, part.first_back, part.most_rows, part.most_recv, part.most_send)
    return CastTables.of(part.send_index, part.send_splits, part.recv_splits, part.recv_order, peers)


def distinct(transfers: Transfers, per_node: int) -> np.ndarray:
    """``[num_ranks, num_nodes]``: rows of each rank that any rank of another node needs."""
    num_ranks = len(transfers.rows)
    counts = np.zeros((num_ranks, num_ranks // per_node), dtype=np.int64)
    for i in range(num_ranks):
        for node in range(num_ranks // per_node):
            if node != i // per_node:
                needed = transfers.rows[i][node * per_node : (node + 1) * per_node]
                counts[i, node] = len(np.unique(np.concatenate(needed)))
    return counts


@settings(max_examples=60)
@given(shape=st.sampled_from([(2, 2), (3, 2), (2, 4), (4, 2)]), seed=st.integers(0, 10_000))
def test_two_levels_bring_each_row_to_its_place_and_cross_once(shape, seed):
    num_nodes, per_node = shape
    num_ranks = num_nodes * per_node
    transfers = random_transfers(num_ranks, seed, with_order=seed % 3 > 0)
    rows = held_and_fetched(transfers)
    views = [two_levels(*rows, r, num_ranks, per_node) for r in range(num_ranks)]
    counts = distinct(transfers, per_node)
    x = [r * 1000 + np.arange(n) for r, n in enumerate(transfers.num_rows)]

    def exchange(parts: list[Transfer], members: list[int], sources: list[np.ndarray]) -> dict[int, np.ndarray]:
        """What each of ``members`` gets of the others, by what each side says of it."""
        got = {}
        for at, rank in enumerate(members):
            received = [
                sources[i][parts[i].send_index][sum(parts[i].send_splits[:at]) : sum(parts[i].send_splits[: at + 1])]
                for i in range(len(members))
            ]
            mine = parts[at]
            assert tuple(len(rows) for rows in received) == mine.recv_splits
            got[rank] = np.concatenate(received)
            owner = np.repeat(np.arange(len(members)), mine.recv_splits)
            seen = [sources[o][row] for o, row in zip(owner, mine.owner_rows, strict=True)]
            np.testing.assert_array_equal(got[rank], np.array(seen, dtype=np.int64))
            assert mine.most_rows == parts[0].most_rows and mine.most_recv == max(sum(p.recv_splits) for p in parts)
        counts = np.array([part.send_splits for part in parts])
        for i, part in enumerate(parts):
            assert part.first_there == tuple(counts[:i].sum(axis=0))
            assert part.first_back == tuple(counts[:, :i].sum(axis=1))
            assert part.most_send == counts.sum(axis=1).max()
        return got

    far: dict[int, np.ndarray] = {}
    for place in range(per_node):
        members = list(range(place, num_ranks, per_node))
        far |= exchange([views[r].far for r in members], members, [x[r] for r in members])
    for node in range(num_nodes):
        members = list(range(node * per_node, (node + 1) * per_node))
        near = exchange([views[r].near for r in members], members, [x[r] for r in members])
        relayed = exchange([views[r].relay for r in members], members, [far[r] for r in members])
        for r in members:
            whole = np.full(len(near[r]) + len(relayed[r]), -1)
            whole[views[r].near_rows], whole[views[r].relay_rows] = near[r], relayed[r]
            expected = transfers.expected([torch.from_numpy(a) for a in x], r).numpy()
            np.testing.assert_array_equal(whole, expected)
            assert views[r].far.send_splits == tuple(counts[r].tolist())


def cast_all(rank, num_ranks, per_node, device="cpu", impls=IMPLS):
    compared = 0
    for seed in range(3):
        transfers = random_transfers(num_ranks, seed, with_order=seed % 3 > 0)
        args = level_args(transfers, rank, per_node, device)
        kinds = [((), torch.int64), ((2, 3), torch.bfloat16), ((5,), torch.float32)]
        compared += check_casts(transfers, args, rank, kinds, impls, device)
    return compared


def returned(transfers: Transfers, partials: list[np.ndarray], rank: int) -> list[tuple[int, int, np.ndarray]]:
    """Row of ``rank``, rank that has a part for it, and the part."""
    found = []
    for j in range(len(transfers.rows)):
        order = transfers.recv_order[j]
        received = partials[j] if order is None else partials[j][np.argsort(order)]
        first = sum(len(transfers.rows[i][j]) for i in range(rank))
        rows = transfers.rows[rank][j].tolist()
        found += [(row, j, received[first + k]) for k, row in enumerate(rows)]
    return found


def reduce_all(rank, num_ranks, per_node, device="cpu", impls=IMPLS):
    """Sums of several dtypes: repeatable, and off the exact sum by one rounding of each node's sum and the last."""
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    compared = 0
    for seed, (partial, wide) in enumerate(((fp64, fp64), (fp32, fp32), (bf16, fp32), (bf16, bf16))):
        transfers = random_transfers(num_ranks, seed, with_order=seed % 2 > 0)
        args = level_args(transfers, rank, per_node, device)
        received = [sum(len(transfers.rows[i][j]) for i in range(num_ranks)) for j in range(num_ranks)]
        shapes = [(4, 8), (3,)]
        everyone = [[random_tensor((n, *s), partial, seed + 7 * j) for s in shapes] for j, n in enumerate(received)]
        base = [random_tensor((transfers.num_rows[rank], *s), wide, seed) for s in shapes]
        results = []
        for impl in (*impls, *impls[:1], *impls[:1]):
            parts = [x.clone().to(device) for x in everyone[rank]]
            into = [x.clone().to(device) for x in base]
            if device == "cuda":
                torch.cuda._sleep(HELD_CYCLES)  # the second step does not begin before the caller's stream has
            handle = group_reduce(parts, args, into=into, impl=impl)
            for x in parts:
                x.fill_(float("nan"))  # what was given may be overwritten at once
            results.append(handle.wait())
        for other in results[1:]:
            compared += 1
            assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True)), (seed, partial, wide)
        for i, got in enumerate(results[0]):
            parts = [x[i].double().flatten(1).numpy() for x in everyone]
            exact = base[i].double().flatten(1).numpy().copy()
            nodes_sums = np.zeros((num_ranks // per_node, *exact.shape))
            size = np.abs(exact)
            for row, j, part in returned(transfers, parts, rank):
                exact[row] += part
                size[row] += np.abs(part)
                if j // per_node != rank // per_node:
                    nodes_sums[j // per_node, row] += part
            error = np.abs(got.double().cpu().reshape(exact.shape).numpy() - exact)
            accumulated = torch.finfo(fp64 if partial == fp64 else fp32).eps
            bound = torch.finfo(wide).eps * np.abs(exact) + 8 * accumulated * size
            bound += torch.finfo(partial).eps / 2 * np.abs(nodes_sums).sum(axis=0) * (1 + 8 * accumulated)
            assert (error <= bound).all(), (seed, partial, wide)
    return compared


def merge_all(rank, num_ranks, per_node):
    transfers = random_transfers(num_ranks, 2, with_order=True)
    args = level_args(transfers, rank, per_node)
    heads, dim = 2, 3
    received = [sum(len(transfers.rows[i][j]) for i in range(num_ranks)) for j in range(num_ranks)]
    outs = [random_tensor((n, heads, dim), torch.float64, j) for j, n in enumerate(received)]
    lses = [20 * random_tensor((n, heads), torch.float64, 50 + j) for j, n in enumerate(received)]
    for lse in lses:
        lse[::3] = -torch.inf
    num_rows = transfers.num_rows[rank]
    out, lse = (
        random_tensor((num_rows, heads, dim), torch.float64, 5),
        random_tensor((num_rows, heads), torch.float64, 6),
    )
    merged = group_reduce_lse(outs[rank], lses[rank], args, into=(out.clone(), lse.clone())).wait()
    for row in range(num_rows):
        parts = [(out[row].numpy(), lse[row].numpy())]
        of_outs = returned(transfers, [x.numpy() for x in outs], rank)
        of_lses = returned(transfers, [x.numpy() for x in lses], rank)
        parts += [(o, m) for (r, _, o), (_, _, m) in zip(of_outs, of_lses, strict=True) if r == row]
        all_out, all_lse = (torch.from_numpy(np.stack(x)) for x in zip(*parts, strict=True))
        weights = torch.softmax(all_lse, dim=0).unsqueeze(-1)
        torch.testing.assert_close(merged[0][row], (weights * all_out).sum(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged[1][row], torch.logsumexp(all_lse, 0), rtol=1e-12, atol=1e-12)


def count_crossing(rank, num_ranks, per_node, impl):
    """Bytes that the backend is given for ranks of other nodes, what handles say of it, and the least possible."""
    crossed = sent = 0
    exchange, send = dist.all_to_all_single, dist.batch_isend_irecv

    def is_far(group, peer):
        return dist.get_process_group_ranks(group)[peer] // per_node != rank // per_node

    def all_to_all(received, rows, recv_splits, send_splits, group, async_op):
        nonlocal crossed, sent
        crossed += sum(n for peer, n in enumerate(send_splits) if is_far(group, peer)) * rows.shape[1]
        sent += sum(n for peer, n in enumerate(send_splits) if peer != group.rank()) * rows.shape[1]
        return exchange(received, rows, recv_splits, send_splits, group=group, async_op=async_op)

    def point_to_point(ops):
        nonlocal crossed, sent
        crossed += sum(op.tensor.numel() for op in ops if op.op is dist.isend and is_far(op.group, op.group_peer))
        sent += sum(op.tensor.numel() for op in ops if op.op is dist.isend)
        return send(ops)

    dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, point_to_point
    results = []
    for seed in range(2):
        transfers = random_transfers(num_ranks, seed, with_order=True)
        args = level_args(transfers, rank, per_node)
        counts = distinct(transfers, per_node)
        fetched = sum(counts[r, rank // per_node] for r in range(rank % per_node, num_ranks, per_node))
        x = torch.zeros(transfers.num_rows[rank], 6)
        for back, least in ((False, counts[rank].sum()), (True, fetched)):
            crossed = sent = 0
            if back:
                handle = group_reduce([torch.zeros(args.num_recv, 6)], args, into=[x], impl=impl)
            else:
                handle = group_cast([x], args, impl=impl)
            handle.wait()
            results.append((crossed, handle.far_sent_bytes, 24 * int(least)))
            assert handle.sent_bytes == sent
    dist.all_to_all_single, dist.batch_isend_irecv = exchange, send
    return results


def many_handles(rank, num_ranks):
    transfers = [random_transfers(num_ranks, seed, with_order=True) for seed in (2, 4, 6)]
    everyone = [[random_tensor((n, 4), torch.float32, r) for r, n in enumerate(t.num_rows)] for t in transfers]
    handles = [group_cast([e[rank]], level_args(t, rank, 2)) for e, t in zip(everyone, transfers, strict=True)]
    for at in (2, 0, 1):
        (got,) = handles[at].wait()
        assert same_bits(got, transfers[at].expected(everyone[at], rank))
    assert len(nodes._known[dist.group.WORLD]) == 1  # the groups are made once


def refuse(rank, num_ranks):
    args = level_args(random_transfers(4, 1, with_order=False), rank, 2)
    with pytest.raises(ValueError, match="impl: 'native' is for GPUs and NCCL"):
        group_cast([torch.zeros(20, 1)], args, impl="native")
    with pytest.raises(ValueError, match="ranks_per_node: 4 ranks are no whole number of nodes of 3"):
        nodes.nodes_of(dist.group.WORLD, 3)
    for seed in range(4):
        transfers = random_transfers(4, seed, with_order=False)
        assert level_args(transfers, rank, 2).num_rows_min == 1 + max(
            rows.max(initial=-1) for rows in transfers.rows[rank]
        )
    three = level_args(random_transfers(6, 1, with_order=False), rank, 2)
    with pytest.raises(ValueError, match="args: splits for 6 ranks, but group has 4"):
        group_cast([torch.zeros(20, 1)], three)


def make_again(rank, num_ranks):
    """Groups that end and are made again, by ranks that are in different numbers of others."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    transfers = random_transfers(num_ranks, 3, with_order=True)
    args = level_args(transfers, rank, 2)
    x = [random_tensor((n, 3), torch.float32, r) for r, n in enumerate(transfers.num_rows)]
    c10d, others = dist.distributed_c10d, len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        group = dist.new_group(timeout=timedelta(seconds=50))
        (got,) = group_cast([x[rank]], args, group).wait()
        assert same_bits(got, transfers.expected(x, rank))
        assert timeout_s(nodes.nodes_of(group, 2).far) == 50
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert len(c10d._world.pg_map) == others, "those inside nodes and between them end with it"
    assert c10d._process_group_name([0], use_hashed_name=True) == c10d._hash_ranks_to_str([0])


def move_everything(rank, num_ranks, per_node):
    """All that is asked of a shape, by one set of ranks; of four also what needs no other number."""
    moved, reduced = cast_all(rank, num_ranks, per_node), reduce_all(rank, num_ranks, per_node)
    bytes_of = {impl: count_crossing(rank, num_ranks, per_node, impl) for impl in IMPLS}
    if num_ranks == 4:
        merge_all(rank, num_ranks, per_node)
        many_handles(rank, num_ranks)
        refuse(rank, num_ranks)
        make_again(rank, num_ranks)
    return moved, reduced, bytes_of


@pytest.fixture(scope="module", params=SHAPES)
def found(request):
    num_nodes, per_node = request.param
    return run_ranks(move_everything, num_nodes * per_node, per_node)


def test_casts_in_two_levels_bring_the_same_bits(found):
    assert all(compared == 3 * 2 * 3 for compared, _, _ in found)


def test_reductions_in_two_levels_are_right_to_the_rounding_of_each_nodes_sum_and_repeat(found):
    assert all(compared == 4 * 3 for _, compared, _ in found)


@pytest.mark.parametrize("impl", IMPLS)
def test_bytes_that_cross_are_those_of_distinct_rows_for_each_node(found, impl):
    for _, _, bytes_of in found:
        for given_to_backend, told, least in bytes_of[impl]:
            assert given_to_backend == told == least
    assert any(least for _, _, bytes_of in found for _, _, least in bytes_of[impl])


def test_partial_results_merge_handles_wait_in_any_order_misfits_are_refused_and_groups_are_made_again(found):
    assert len(found) in (4, 8)  # the ranks of four have looked


class Move(NamedTuple):
    operation: str


def raise_on_one_rank(rank, num_ranks):
    """The others are in collectives of their nodes, and between nodes, in which it does not take part."""
    timeouts.LOOK_S, timeouts.ASK_S, timeouts.BUSY_S, timeouts.GRACE_S = 0.1, 0.1, 0.02, 0.3
    group = dist.group.WORLD
    args = level_args(random_transfers(num_ranks, 2, with_order=True), rank, 2)
    x = torch.zeros(20, 3)

    def move(fails):
        with calls_of(group, num_ranks) as calls:
            calls.agree(Move("move"))
            if fails:
                raise KeyError("lost")
            for _ in range(2):
                group_cast([x], args).wait()

    move(fails=False)
    began = time.monotonic()
    with pytest.raises((RuntimeError, KeyError)) as error:
        move(fails=rank == 1)
    assert time.monotonic() - began < 30
    return f"{type(error.value).__name__}: {error.value}"


def test_an_error_on_one_rank_ends_the_collectives_of_all_levels(ranks):
    found = ranks(4, raise_on_one_rank)
    assert found[1] == "KeyError: 'lost'"
    for text in found[:1] + found[2:]:
        assert "rank 1 of the group (global rank 1) raised KeyError: 'lost'" in text


def test_the_second_step_waits_for_the_callers_stream_though_the_first_has_no_work_to_wait_for(monkeypatch):
    """In a group of one rank the first step is done on the caller's stream."""
    log = []
    side = SimpleNamespace(
        wait_stream=lambda stream: log.append(f"waits for {stream}"), record_event=lambda: log.append("event")
    )
    monkeypatch.setattr(hierarchical, "_side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    first = Started((), (), lambda: log.append("first"))
    hierarchical._Next(first, lambda _: Started((), (), lambda: log.append("second")), torch.device("cuda", 0))
    assert log == ["waits for the caller's", "first", "second", "event"]


def on_gpus(rank, num_ranks, per_node):
    impls = ("native", "all_to_all", "auto")
    return cast_all(rank, num_ranks, per_node, "cuda", impls), reduce_all(rank, num_ranks, per_node, "cuda", impls)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(
    ("num_ranks", "per_node"),
    [pytest.param(n, per_node, marks=pytest.mark.ranks(n)) for n, per_node in ((2, 1), (4, 2))],
)
def test_two_levels_on_gpus_do_what_they_do_on_cpus(num_ranks, per_node):
    found = run_ranks(on_gpus, num_ranks, per_node, backend="nccl", timeout_s=120)
    assert found == [(3 * 3 * 3, 4 * 4)] * num_ranks
