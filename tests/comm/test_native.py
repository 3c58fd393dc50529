"""Ranks that reach each other's memory get the same bits as by any other way, and end when one does not come."""

from __future__ import annotations

import ctypes
import gc
import struct
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.comm import peer_kernels, peer_tables, peers, row_memory, sm_budget
from megatron_magi.comm import slots as native_slots
from megatron_magi.comm.group_collective import GroupCastArgs, group_cast, group_reduce
from megatron_magi.comm.impl import native
from megatron_magi.comm.peer_tables import CHUNK_ROWS, PeerRows
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.cuda import build as cuda_build
from megatron_magi.cuda import driver
from megatron_magi.testing.spawn import run_ranks
from tests.comm import peer_simulation as simulation
from tests.comm.random_transfers import Transfers, check_casts, random_tensor
from tests.comm.test_group_collective import cast_everything, merge_lse, reduce_low_precision, same_bits
from tests.cuda.struct_layout import layout_checks


def many_rows(num_ranks: int, seed: int, most: int = 60) -> Transfers:
    """Random rows; one rank may need everything, one nothing."""
    rng = np.random.default_rng(seed)
    num_rows = rng.integers(1, most, num_ranks).tolist()
    share = rng.choice([0.0, 0.1, 0.5, 1.0], (num_ranks, num_ranks))
    rows = [
        [np.flatnonzero(rng.random(num_rows[i]) < share[i, j]) if i != j else np.arange(0) for j in range(num_ranks)]
        for i in range(num_ranks)
    ]
    received = [sum(len(rows[i][j]) for i in range(num_ranks)) for j in range(num_ranks)]
    order = [rng.permutation(n).astype(np.int64) if rng.random() < 0.7 else None for n in received]
    return Transfers(num_rows, rows, order)


@settings(max_examples=60)
@given(num_ranks=st.integers(2, 8), seed=st.integers(0, 10_000), shift=st.integers(0, 6))
def test_the_tables_lead_each_row_to_its_place_and_back(num_ranks, seed, shift):
    transfers = many_rows(num_ranks, seed)
    ranks = [simulation.Rank(transfers, r) for r in range(num_ranks)]
    rng = np.random.default_rng(seed)
    x = [rng.normal(size=(n, 3)) for n in transfers.num_rows]
    bounds = transfers.peers(0)
    received = simulation.cast(ranks, x, shift, bounds.most_recv)
    pulled = simulation.pulled(ranks, x, max(shift, 4), bounds.most_rows)
    for r, got in enumerate(received):
        np.testing.assert_array_equal(got, transfers.expected([torch.from_numpy(a) for a in x], r).numpy())
        np.testing.assert_array_equal(pulled[r], got)
    back = simulation.give_back(ranks, received, shift, bounds.most_send)
    added = simulation.add(ranks, received, x, shift, bounds.most_send)
    for r in range(num_ranks):
        np.testing.assert_array_equal(back[r], simulation.expected_back(transfers, received, r))
        count = np.bincount(np.concatenate(transfers.rows[r]).astype(np.int64), minlength=transfers.num_rows[r])
        np.testing.assert_allclose(added[r], x[r] * (1 + count[:, None]), rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owner_rows": np.array([0])}, "expected 2 owner_rows"),
        ({"owner_rows": np.array([0, 5])}, "expected 2 owner_rows below 3"),
        ({"first_there": [0]}, "expected first_there of 2 ranks"),
        ({"first_there": [0, 2]}, "expected first_there of 2 ranks, up to 3 rows"),
        ({"first_back": [0, -1]}, "expected first_back"),
        ({"most_rows": 2, "owner_rows": np.array([0, 1])}, "bounds 2, 3, 2 are below 3, 2, 2"),
        ({"most_recv": 1}, "expected first_there"),
    ],
)
def test_a_wrong_other_side_is_refused(change, message):
    rows = PeerRows(np.array([0, 2]), [0, 1], [0, 0], 3, 3, 2)
    with pytest.raises(ValueError, match=f"peers: {message}"):
        GroupCastArgs.build(np.array([0, 2]), [0, 2], [0, 2], peers=rows._replace(**change))


def rank_says(**change):
    common = {"host": ["a", "boot"], "device": "GPU-0", "capability": [9, 0]}
    return {**common, "sms": 132, "groups": 0, "captured": False, **change}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([rank_says(), rank_says(device="GPU-1")], None),
        ([rank_says()], "is for 2 to 8 ranks"),
        ([rank_says(device=f"GPU-{i}") for i in range(9)], "is for 2 to 8 ranks"),
        ([rank_says(), rank_says(device="GPU-1", host=["a", "other"])], "on one host"),
        ([rank_says(), rank_says(device="GPU-1", capability=[8, 0])], "compute capability 9.0, 10.0 or 10.3"),
        ([rank_says(), rank_says()], "a GPU for each rank"),
        ([rank_says(), rank_says(device="GPU-1", groups=16)], "at most 16 groups"),
        ([rank_says(groups=9), rank_says(device="GPU-1", groups=9)], None),
        ([rank_says(), rank_says(device="GPU-1", groups=9, sms=78)], "at most 9 groups"),
        ([rank_says(sms=60), rank_says(device="GPU-1")], "at most 0 groups"),
        ([rank_says(captured=True), rank_says(device="GPU-1")], "no other group of a GPU on which CUDA graphs"),
    ],
)
def test_ranks_reach_each_others_memory_on_one_host_with_hopper_gpus(said, reason):
    found = peers.refusal_of(said)
    assert found is None if reason is None else reason in found


def meet(rank, num_ranks):
    rendezvous = peers.Rendezvous(dist.group.WORLD)
    assert rendezvous.gather({"rank": rank}) == [{"rank": r} for r in range(num_ranks)]
    assert peers.Rendezvous(dist.group.WORLD).gather(rank) == list(range(num_ranks))  # another generation
    rendezvous.timeout_s = 0.3
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 of the group \(global rank 1\) did not arrive within 0.3 s"):
            rendezvous.gather(None)


def test_a_rank_that_does_not_meet_the_others_is_named(ranks):
    ranks(2, meet)


def test_what_ranks_decide_by_is_the_same_whatever_their_tensors_lie_like():
    x = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    layouts = [RowLayout.of([x, x]), RowLayout.of([x[:0], torch.zeros(3, 9, 128, dtype=torch.bfloat16)[:, 1:]])]
    assert {native_slots.slot_row_bytes(layout) for layout in layouts} == {4096} and native_slots.chunk_shift(4096) == 4
    assert native_slots.slot_row_bytes(RowLayout.of([torch.zeros(1, 3, dtype=torch.uint8)])) == 16
    assert [native_slots.sent_shift(4096, n) for n in (1, 16, 1024, 4096, 1 << 20)] == [1, 1, 3, 4, 4]
    assert native_slots.sent_shift(1 << 20, 50) == 0 and native_slots.sent_shift(16, 1 << 25) == 12
    assert native_slots.chunk_shift(1 << 20) == CHUNK_ROWS.bit_length() - 1 and native_slots.chunk_shift(16) == 12


class Block:
    """Shared memory of one rank, as `peers.Shared`."""

    def __init__(self, rank: int) -> None:
        self.addresses, self.done = [1000, 2000, 3000], []
        self.rank = rank

    def close(self) -> None:
        self.done.append("closed")

    def free(self) -> None:
        self.done.append("freed")


def test_memory_is_given_back_when_all_ranks_have_left_and_not_before(monkeypatch):
    words: dict[int, int] = {}
    monkeypatch.setattr(peers, "write_word", lambda address, value, device: words.__setitem__(address, value))
    monkeypatch.setattr(peers, "read_words", lambda at, n, device: [words.get(at + 4 * i, 0) for i in range(n)])
    monkeypatch.setattr(peers, "_LEAVE_S", 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ranks = []
    for rank in range(3):
        owned = peers._Owned(rank, torch.device("cuda", 0), torch.zeros(4, dtype=torch.int32), Block(rank))
        owned.data = [Block(rank)]
        ranks.append(owned)
    for i, owned in enumerate(ranks):
        owned.leave()
        peers._give_back_what_all_have_left()
        assert int(owned._notice[0]) == 1 and owned.data[0].done[:1] == owned._control.done[:1] == ["closed"]
        assert [("freed" in r.data[0].done, "freed" in r._control.done) for r in ranks] == [(i == 2, i == 2)] * 3
    assert not peers._left


def ask_for_native(rank, num_ranks):
    """The outcome of the first time holds, an error too."""
    asked, group = [], dist.new_group(list(range(num_ranks)))

    def decide(group, device):
        asked.append(group)
        raise RuntimeError("native: rank 1 did not arrive within 2 s")

    native._decide = decide
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 did not arrive within 2 s"):
            native.native_of(group, torch.device("cpu"))
    native._decide = lambda group, device: (None, "needs a GPU for each rank")
    for _ in range(2):
        assert native.native_of(dist.group.WORLD, torch.device("cpu")) == (None, "needs a GPU for each rank")
    assert len(asked) == 1


def test_whether_ranks_reach_each_others_memory_is_decided_once(ranks):
    ranks(2, ask_for_native)


@pytest.mark.parametrize(
    ("source", "defines"),
    [
        peer_kernels.put_kernel(1, 4096),
        peer_kernels.put_kernel(16, 4096),
        peer_kernels.put_kernel(16, 64, (torch.bfloat16, torch.float32), 8),
        peer_kernels.put_kernel(16, 4096, (torch.bfloat16, torch.float32), 8),
        ("get_rows", ("UNIT=16",)),
    ],
)
def test_parameters_lie_where_the_kernels_read_them(monkeypatch, source, defines):
    pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")
    params, control = peer_kernels.params_of(source), peers.control_struct()
    more = f'static_assert(sizeof(Route) == {8 * peer_tables.ROUTE_WORDS}, "route");'
    checks = (
        layout_checks(params), layout_checks(control), more if source != "get_rows" else "",
        f"static_assert(kMaxChunks == {native_slots.MAX_CHUNKS} && kSlots == {peers._NUM_SLOTS}, "
        f'"bounds");static_assert(__INTADDR__(&static_cast<Notice*>(0)->part) == 16, "notice");'
        f'static_assert(kMaxRanks == {peers.MAX_RANKS} && kMaxTensors == {row_memory.MOST_TENSORS}, "ranks");',
    )  # fmt: skip
    flatten = cuda_build.flatten_source
    monkeypatch.setattr(cuda_build, "flatten_source", lambda path: flatten(path) + "\n".join(checks) + "\n")
    cuda_build.compile_kernel(f"group_collective/{source}.cu", defines)


def test_rows_of_a_slot_have_their_tensors_side_by_side():
    packed = row_memory.slot_rows([(4096, 512, 256), (8192, 64, 32)], 288, 16, 8)
    numbers = struct.unpack("4Q4q4i2iq", packed)
    assert numbers == (4096, 8192, 0, 0, 512, 64, 0, 0, 0, 16, 18, 18, 18, 2, 288)


@pytest.mark.parametrize("num_sms", [132, 114, 78])
def test_kernels_that_wait_for_other_ranks_have_sms_of_their_own_however_many_groups_there_are(num_sms):
    assert sm_budget.most_groups(132) == sm_budget.MOST_GROUPS
    for num_groups in range(1, sm_budget.most_groups(num_sms) + 1):
        share = sm_budget.share_of(num_sms, num_groups)
        casts, sums = (peer_kernels.blocks_apart(share, is_sum) for is_sum in (False, True))
        # One kernel sends while another takes, of the same call or the next, but none sends beside one that takes sums.
        apart = max(sum(casts), sum(sums), sums[0] + casts[1])
        assert apart <= share and min(*casts, *sums) > 0
        others = [peer_kernels.blocks_of(name, share) for name in ("put_rows", "get_rows")]
        assert 0 < peer_kernels.blocks_that_pull(others[1]) < others[1]
        free = num_sms - num_groups * max(apart, *others)
        # NCCL's kernel in clusters, which need SMs of one GPC, wherever the others lie; then one cluster more.
        clusters = (free - 3 * sm_budget.NUM_GPCS) // sm_budget.NCCL_CLUSTER
        assert clusters * sm_budget.NCCL_CLUSTER >= sm_budget.NCCL_CHANNELS + sm_budget.NCCL_CLUSTER
    assert all(shape.threads * 64 <= 65536 for shape in peer_kernels.SHAPES.values())  # registers of an SM


on_gpus = pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n)]) for n in (2, 4, 8)],
)


IMPLS = ("native", "all_to_all", "auto")


def extremes(num_ranks: int) -> list[Transfers]:
    """Nobody needs anything; one rank needs everything, and nobody else anything."""
    num_rows, nothing = [40] * num_ranks, np.arange(0)
    return [
        Transfers(
            num_rows,
            [[np.arange(40) if j == taker != i else nothing for j in range(num_ranks)] for i in range(num_ranks)],
            [None] * num_ranks,
        )
        for taker in (None, num_ranks - 1)
    ]


def cast_rows_of_heads(rank, num_ranks, device="cpu", impls=("reference", "all_to_all")):
    """Rows long enough for TMA, in every order, kept or not; returns the number of comparisons."""
    compared = 0
    for transfers in (*(many_rows(num_ranks, seed, 300) for seed in range(8)), *extremes(num_ranks)):
        args = transfers.args(rank, device)
        for kinds in ([((8, 128), torch.bfloat16)] * 2, [((1100,), torch.float32), ((2, 8), torch.bfloat16)]):
            compared += check_casts(transfers, args, rank, kinds, impls, device)
            everyone = [random_tensor((k, *kinds[0][0]), kinds[0][1], 10 * r) for r, k in enumerate(transfers.num_rows)]
            (got,) = group_cast([everyone[rank].to(device)], args, impl=impls[0], kept=True).wait()
            assert same_bits(got.cpu(), transfers.expected(everyone, rank))
    return compared


@on_gpus
@pytest.mark.parametrize("check", [cast_everything, cast_rows_of_heads, reduce_low_precision, merge_lse])
def test_native_collectives_do_what_the_others_do(check, num_ranks):
    native_ones = run_ranks(check, num_ranks, "cuda", IMPLS, backend="nccl", timeout_s=120)
    reference = run_ranks(check, num_ranks, "cpu")
    for a, b in zip(native_ones, reference, strict=True):
        if isinstance(a, torch.Tensor):
            assert same_bits(a, b)
        elif a is not None:
            assert a // len(IMPLS) == b // 2


def reduce_each_type(rank, num_ranks):
    """Sums of random tables: at once or at the end, equal to each other and to NCCL's, and to fp64 but for rounding."""
    bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    types = ((bf16, fp32), (fp16, fp32), (fp32, fp32), (bf16, bf16), (fp32, bf16), (fp64, fp64))
    for seed in range(24):
        partial, wide = types[seed // 2 % len(types)]
        transfers = many_rows(num_ranks, seed, 300)
        args = transfers.args(rank, "cuda")
        all_recv = [sum(len(transfers.rows[i][j]) for i in range(num_ranks)) for j in range(num_ranks)]
        shapes = [(8, 128), (8, 128)] if seed % 2 else [(3, 5), (7,), (1,)]
        everyone = [[random_tensor((n, *s), partial, seed + 7 * j) for s in shapes] for j, n in enumerate(all_recv)]
        base = [random_tensor((transfers.num_rows[rank], *s), wide, seed) for s in shapes]
        partials = [x.cuda() for x in everyone[rank]]
        results = [
            group_reduce(partials, args, into=[x.cuda() for x in base], impl=impl, at_once=at_once, kept=kept).wait()
            for impl, at_once, kept in (
                ("native", True, False),
                ("native", False, False),
                ("native", True, True),
                ("all_to_all", True, False),
            )
        ]
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True)), (seed, partial, wide)
        send_index = np.concatenate(transfers.rows[rank])
        for i, got in enumerate(results[0]):
            parts = [x[i].double().flatten(1).numpy() for x in everyone]
            exact = base[i].double().flatten(1).numpy()
            size = np.abs(exact)
            returned = simulation.expected_back(transfers, parts, rank)
            np.add.at(exact, send_index, returned)
            np.add.at(size, send_index, np.abs(returned))
            error = np.abs(got.double().cpu().reshape(exact.shape).numpy() - exact)
            bound = torch.finfo(wide).eps * np.abs(exact) + 4 * torch.finfo(fp64 if wide == fp64 else fp32).eps * size
            assert (error <= bound).all(), (seed, partial, wide)


@on_gpus
def test_native_sums_are_exact_to_one_rounding_and_repeat_whenever_they_are_formed(num_ranks):
    run_ranks(reduce_each_type, num_ranks, backend="nccl", timeout_s=120)


def cast_many(rank, num_ranks, num_calls):
    """Sizes change from call to call; every row of every call is checked, on the device."""
    rng = np.random.default_rng(0)
    wrong, before = torch.zeros((), dtype=torch.int64, device="cuda"), None
    for call in range(num_calls):
        if call % 10 == 0:
            transfers = many_rows(num_ranks, call, int(rng.choice([20, 400, 3000, 30_000 if call > 500 else 8000])))
            args = transfers.args(rank, "cuda")
            rows = transfers.peers(rank).owner_rows
            owner = np.repeat(np.arange(num_ranks), args.recv_splits)
            content = torch.from_numpy((owner << 24) + rows).cuda()
            content = content if args.recv_order is None else content[args.recv_order]
            local = torch.arange(transfers.num_rows[rank], device="cuda") + (rank << 24)
            width = int(rng.choice([1, 64, 513]))
        x = (local + (call << 32)).unsqueeze(1).expand(-1, width).contiguous()
        handle = group_cast([x, x[:, 0]], args, impl="native")
        x.fill_(-1)  # what was sent may be overwritten at once
        if call % 3 == 0 and before is not None:
            wrong += before.wait()[0].isnan().sum()
        wide, narrow = handle.wait()
        wrong += (wide != (content + (call << 32)).unsqueeze(1)).sum() + (narrow != content + (call << 32)).sum()
        total = torch.zeros(transfers.num_rows[rank], width, dtype=torch.float32, device="cuda")
        partial = torch.ones(args.num_recv, width, dtype=torch.bfloat16, device="cuda")
        back = group_reduce([partial], args, into=[total], impl="native", at_once=call % 2 == 0)
        before = group_cast([torch.ones(len(local), 3, device="cuda")], args, impl="native") if call % 3 == 2 else None
        del partial
        wrong += (back.wait()[0].sum() != args.num_send * width).long()
    if before is not None:
        before.wait()
    free = torch.cuda.mem_get_info()[0]
    return int(wrong), free


@on_gpus
def test_slots_are_used_again_and_grow_over_a_thousand_calls(num_ranks):
    found = run_ranks(cast_many, num_ranks, 1000, backend="nccl", timeout_s=180)
    assert [wrong for wrong, _ in found] == [0] * num_ranks


def stay_away(rank, num_ranks, width, sums):
    group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=2))
    rows = [[np.arange(4 * (i != j)) for j in range(num_ranks)] for i in range(num_ranks)]
    transfers = Transfers([4] * num_ranks, rows, [None] * num_ranks)
    args = transfers.args(rank, "cuda")
    x = torch.ones(4, width, device="cuda")
    group_cast([x], args, group, "native").wait()
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(6)
        return
    begin = time.monotonic()
    if sums:
        rows = group_reduce(
            [x.new_ones(args.num_recv, width)], args, group, into=[x], impl="native", at_once=True
        ).wait()
    else:
        rows = group_cast([x], args, group, "native").wait()
    torch.cuda.synchronize()
    assert 1.5 < time.monotonic() - begin < 4
    absent = slice(0, 4) if sums or rank == 0 else slice(4, 8)  # each rank's sums have a part of rank 1
    assert rows[0][absent].isnan().all()  # nobody goes on with what was there before
    with pytest.raises(RuntimeError, match=r"rank 1 of the group \(global rank 1\) did not arrive within 2 s"):
        group_cast([x], args, group, "native")
    assert torch.ones(3, device="cuda").sum() == 3  # the device is as it was


@on_gpus
@pytest.mark.parametrize(("width", "sums"), [(128, False), (1024, False), (128, True)], ids=["rows", "bulk", "sums"])
def test_a_rank_that_does_not_come_is_named_its_rows_are_nan_and_nothing_hangs(width, sums, num_ranks):
    run_ranks(stay_away, num_ranks, width, sums, backend="nccl", timeout_s=60)


def allocation_at(address):
    """Begin and bytes of the allocation or mapping of this process that holds an address; None if there is none.

    Free memory of the device would not do: other processes on it allocate and free theirs.
    """
    begin, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    status = driver._libcuda().cuMemGetAddressRange_v2(
        ctypes.byref(begin), ctypes.byref(num_bytes), ctypes.c_uint64(address)
    )
    return None if status else (begin.value, num_bytes.value)


def memory_of_groups(rank):
    """Allocations of all groups of this process by their address, and the bytes of this rank's own."""
    gc.collect()
    shared = [x for x in gc.get_objects() if type(x) is peers.Shared]
    found = {address: allocation_at(address) for x in shared for address in x.addresses}
    return found, sum(found[x.addresses[rank]][1] for x in shared if found[x.addresses[rank]] is not None)


def end_a_group(rank, num_ranks):
    """Arguments are kept, the group is not; other groups, of which several wait at once, go on."""
    args = many_rows(num_ranks, 4, 3000).args(rank, "cuda")
    x = torch.randn(3000, 4096, device="cuda")
    expected = [y.clone() for y in group_cast([x], args, impl="all_to_all").wait()]
    dist.barrier()
    before, _ = memory_of_groups(rank)
    groups = [dist.new_group(list(range(num_ranks))) for _ in range(3)]
    for turn in range(4):
        if rank == 1:
            time.sleep(0.2)
        handles = [group_cast([x], args, group, "native") for group in groups[turn % 3 :] + groups[: turn % 3]]
        for handle in handles:
            assert same_bits(handle.wait()[0], expected[0])
    del handles, handle
    held, own_bytes = memory_of_groups(rank)
    held = {address: found for address, found in held.items() if address not in before}
    assert own_bytes > 3 * 60e6 and len(held) == 3 * 2 * num_ranks and all(held.values())
    for group in groups:
        dist.destroy_process_group(group)
    del group, groups
    gc.collect()
    dist.barrier()
    peers._give_back_what_all_have_left()
    assert not peers._left and len(args.launches) == 0
    assert not [address for address, found in held.items() if allocation_at(address) == found]
    assert same_bits(group_cast([x], args, impl="native").wait()[0], expected[0])


@on_gpus
def test_memory_goes_with_its_group_though_arguments_are_kept_and_groups_wait_beside_each_other(num_ranks):
    run_ranks(end_a_group, num_ranks, backend="nccl", timeout_s=120)


def ask_for_too_much(rank, num_ranks):
    transfers = many_rows(num_ranks, 1)
    args = transfers.args(rank, "cuda")
    x = torch.zeros(transfers.num_rows[rank], 64 << 20, dtype=torch.bool, device="cuda")[:, : 1 << 26]
    with pytest.raises(ValueError, match="impl: 'native' moves at most 1073741824 bytes"):
        group_cast([x], args, impl="native")
    (got,) = group_cast([x], args).wait()
    assert got.shape == (args.num_recv, 1 << 26)
    with pytest.raises(ValueError, match="impl: 'native' moves at most 4 tensors"):
        group_cast([x[:, :1]] * 5, args, impl="native")


@on_gpus
def test_what_is_too_large_is_refused_or_left_to_nccl(num_ranks):
    run_ranks(ask_for_too_much, num_ranks, backend="nccl", timeout_s=60)
