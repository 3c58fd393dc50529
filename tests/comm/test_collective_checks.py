"""Ranks that disagree in a call get one message, within seconds, that names them and what differs; none hangs."""

from __future__ import annotations

import gc
import math
import re
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_magi import api
from megatron_magi.comm import collective_checks, timeouts
from megatron_magi.comm.store_channel import StoreChannel
from megatron_magi.config import AttendConfig, CommConfig, MagiConfig
from megatron_magi.testing.spawn import run_ranks

TOTAL = 48
ODD = 1
"""The rank that does something else."""


def be_quick():
    """Shorter waits, in this process alone: the tests are many."""
    timeouts.LOOK_S, timeouts.ASK_S, timeouts.BUSY_S, timeouts.GRACE_S = 0.1, 0.1, 0.02, 0.3


def new_key(group):
    return api.magi_attn_varlen_key([0, 20, TOTAL], [0, 20, TOTAL], causal=True, cp_group_or_mesh=group)


def attend(
    key, *, dtype=torch.float32, heads_q=4, heads_kv=2, dim=8, dim_v=8, grad=False, rows=None, sink=False, **more
):
    rows = len(api.get_position_ids(key)) if rows is None else rows
    q, k, v = (torch.ones(rows, *shape, dtype=dtype) for shape in ((heads_q, dim), (heads_kv, dim), (heads_kv, dim_v)))
    sink = torch.zeros(1, heads_q) if sink else None
    return api.calc_attn(q.requires_grad_(grad), k, v, key, sink=sink, **more)[0]


def undispatch(key, width=3, grad=False, **more):
    return api.undispatch(torch.ones(len(api.get_position_ids(key)), width, requires_grad=grad), key, **more)


def dispatch(key, grad=False, **more):
    return api.dispatch(torch.ones(TOTAL, 3, requires_grad=grad), key, **more)


def roll(key, shift=-1):
    return api.roll(torch.ones(len(api.get_position_ids(key)), 2), shift, 0, key)


CASES = {
    "dtype": (attend, {"dtype": torch.float16}, "attention: .* has dtype torch.float16 instead of torch.float32"),
    "heads_kv": (attend, {"heads_kv": 4}, "has num_heads_kv 4 instead of 2"),
    "heads_q": (attend, {"heads_q": 8}, "has num_heads_q 8 instead of 4"),
    "dim": (attend, {"dim": 16, "softmax_scale": 1 / math.sqrt(8)}, "has head_dim 16 instead of 8"),
    "dim_v": (attend, {"dim_v": 4}, "has head_dim_v 4 instead of 8"),
    "grad": (attend, {"grad": True}, "has gradient True instead of False"),
    "max_logits": (attend, {"return_max_logits": True}, "has max_logits True instead of False"),
    "sink": (attend, {"sink": True}, r"has sink \('sh', 1, False\) instead of None"),
    "softcap": (attend, {"softcap": 2.0}, "has softcap 2.0 instead of 0.0"),
    "scale": (attend, {"softmax_scale": 0.5}, "has softmax_scale 0.5 instead of 0.35"),
    "two": (attend, {"dim_v": 4, "softcap": 2.0}, "has head_dim_v 4 instead of 8 and softcap 2.0 instead of 0.0"),
    "rows": (attend, {"rows": 7}, r"raised ValueError: q: expected \[\d+, heads, dim\]"),
    "width": (undispatch, {"width": 4}, r"undispatch: .* has row_shape \(4,\) instead of \(3,\)"),
    "grad of rows": (undispatch, {"grad": True}, "undispatch: .* has gradient True instead of False"),
    "partial": (undispatch, {"is_partial_grad": True}, "has is_partial_grad True instead of False"),
    "shift": (roll, {"shift": 2}, r"roll: .* has shift 2 instead of \d+"),
    "no flag": (attend, {"return_max_logits": 1}, "attention: .* raised ValueError: return_max_logits: expected True"),
    "no flag of rows": (undispatch, {"is_partial_grad": 0}, "undispatch: .* raised ValueError: is_partial_grad: expec"),
    "no shift": (roll, {"shift": 0.5}, "roll: .* raised ValueError: shift: expected an integer"),
}


def outcome(function, *args, **options):
    """``(message, seconds)`` of a call that should raise."""
    began = time.monotonic()
    try:
        function(*args, **options)
    except (RuntimeError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def disagree(rank, num_ranks, num_before):
    be_quick()
    found = {}
    for name, (function, change, _) in CASES.items():
        group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=40))
        key = new_key(group)
        for _ in range(num_before):
            function(key)
        found[name] = (*outcome(function, key, **change if rank == ODD else {}), outcome(function, key)[0])
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_before", [0, 2], ids=["first call", "to the others nothing is new"])
def test_a_call_that_differs_on_one_rank_is_a_message_on_all(ranks, num_ranks, num_before):
    results = ranks(num_ranks, disagree, num_before)
    for name, (_, _, expected) in CASES.items():
        for rank, found in enumerate(results):
            message, seconds, then = found[name]
            where = f"{name}, rank {rank}: {message} after {seconds:.1f} s"
            assert seconds < 10, where
            # Where no rank had begun to send the next call is as good as any.
            assert (then == "no error") == (num_before == 0), f"{where}; then {then}"
            if "raised ValueError" in expected and rank == ODD:
                assert re.search(expected.split("raised ")[1], message), where
                continue
            names = "rank 1 of the group (global rank 1) "
            # Of two ranks neither is in the majority: the lower one is taken to be right.
            assert message.startswith("RuntimeError: ") and names in message, where
            assert re.search(expected, message), where


def key_refused(rank, num_ranks, is_wrong):
    be_quick()
    first = new_key(dist.group.WORLD)
    masks = [
        lambda ends: api.magi_attn_varlen_key([0, ends], [0, ends], cp_group_or_mesh=dist.group.WORLD),
        lambda ends: api.magi_attn_flex_key([[0, ends]], [[0, 9]], "full", 9, 9, cp_group_or_mesh=dist.group.WORLD),
        lambda ends: api.make_varlen_key_for_new_mask_after_dispatch([0, ends], [0, ends], first),
        lambda ends: api.make_flex_key_for_new_mask_after_dispatch([[0, ends]], [[0, TOTAL]], "full", first),
    ]
    make_key = masks[is_wrong["mask"]]
    right = 9 if is_wrong["mask"] < 2 else TOTAL
    found = outcome(lambda: attend(make_key(-1 if rank in is_wrong["ranks"] else right)))
    return found, outcome(lambda: attend(make_key(right)))[0]


@pytest.mark.parametrize("mask", range(4))
def test_a_key_that_one_rank_cannot_make_is_a_message_on_all(ranks, mask):
    results = ranks(3, key_refused, {"mask": mask, "ranks": [ODD]})
    own = results[ODD][0][0]
    assert re.match(r"(ValueError: cu_seqlens_q|RangeError: q_ranges)", own)
    for rank, ((message, seconds), _) in enumerate(results):
        assert seconds < 10
        told = f"RuntimeError: plan: rank {ODD} of the group (global rank {ODD}) raised {own}"
        assert message == (own if rank == ODD else told)


def test_a_key_that_no_rank_can_make_leaves_the_group_as_it_is(ranks):
    for (message, _), then in ranks(2, key_refused, {"mask": 0, "ranks": [0, 1]}):
        assert message.startswith("ValueError: cu_seqlens_q") and then == "no error"


def raise_inside(rank, num_ranks, fails_on, kind=MemoryError):
    """A rank fails when others wait for its keys already; messages of this call and the next."""
    be_quick()
    key = api.magi_attn_varlen_key([0, TOTAL], [0, TOTAL], cp_group_or_mesh=dist.group.WORLD)
    attend(key)
    with pytest.MonkeyPatch.context() as patch:
        if rank in fails_on:

            def no_memory(*_args, **_options):
                raise kind("none left")

            patch.setattr("megatron_magi.attention.distributed.group_cast", no_memory)
        first = outcome(attend, key)
    return first, outcome(attend, key)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_error_half_way_on_one_rank_is_raised_by_all(ranks, num_ranks):
    told = "RuntimeError: attention: rank 1 of the group (global rank 1) raised MemoryError: none left"
    for rank, (first, second) in enumerate(ranks(num_ranks, raise_inside, [ODD])):
        assert first[0] == ("MemoryError: none left" if rank == ODD else told) and first[1] < 10
        assert second[0] == told and second[1] < 10, "the group is out of step for good, also to the rank that failed"


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])  # of a RuntimeError it is asked what others did
def test_an_error_on_all_ranks_is_each_ones_own_and_the_group_goes_on(ranks, kind):
    assert [(first[0], second[0]) for first, second in ranks(2, raise_inside, [0, 1], kind)] == [
        (f"{kind.__name__}: none left", "no error")
    ] * 2


def ask_for_kernels_of_gpus(rank, num_ranks, impl):
    key = new_key(dist.group.WORLD)
    attend(key)
    bounds, config = [0, TOTAL], MagiConfig(attend=AttendConfig(impl=impl))
    on_gpus = api.magi_attn_varlen_key(bounds, bounds, cp_group_or_mesh=dist.group.WORLD, dist_attn_config=config)
    return [outcome(attend, one)[0] for one in (on_gpus, key, on_gpus, key)]


@pytest.mark.parametrize("impl", ["ffa", "cudnn", "triton"])
def test_a_backend_that_does_not_take_the_call_is_refused_before_anything_is_sent(ranks, impl):
    for first, second, third, fourth in ranks(2, ask_for_kernels_of_gpus, impl):
        assert first == third and first.startswith("ValueError: ") and f"'{impl}'" in first
        assert second == fourth == "no error"


def wrong_rows_everywhere(rank, num_ranks):
    be_quick()
    key = new_key(dist.group.WORLD)
    first = outcome(attend, key, rows=7)[0]
    time.sleep(0.5 * rank)
    attend(key)
    time.sleep(1.0)
    return first, outcome(attend, key, dtype=torch.float16)[0]


def test_ranks_may_be_refused_together_and_go_on_at_different_times(ranks):
    for first, then in ranks(2, wrong_rows_everywhere):
        assert first.startswith("ValueError: q: expected") and then == "no error"


def other_operation(rank, num_ranks):
    be_quick()
    key = new_key(dist.group.WORLD)
    found = []
    for _ in range(2):
        attend(key)
        roll(key)
    if rank == ODD:
        found = outcome(new_key, dist.group.WORLD), outcome(attend, key)
        return found[1]
    return outcome(attend, key)


def test_a_rank_that_makes_a_key_while_others_attend_is_named(ranks):
    for message, seconds in ranks(2, other_operation):
        assert "has operation" in message and "global rank 1" in message and seconds < 10, message
        assert "operation plan instead of attention" in message


def no_group(rank, num_ranks):
    be_quick()
    group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=3))
    key = new_key(None if rank == ODD else group)
    return outcome(attend, key)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_without_a_group_is_named_when_the_time_of_the_group_is_up(ranks, num_ranks):
    for rank, (message, seconds) in enumerate(ranks(num_ranks, no_group)):
        assert seconds < 10
        if rank == ODD:
            assert message == "no error"
        else:
            assert re.search(r"plan: rank 1 of the group \(global rank 1\) did not (arrive|take)", message), message


def count_entries(rank, num_ranks):
    """Looks at the store and waits of the main thread in calls that follow each other as before."""
    be_quick()
    key = new_key(dist.group.WORLD)

    def step(grad):
        out = attend(key, grad=grad)
        attend(key, grad=grad, dim_v=4)
        roll(key)
        undispatch(key)
        if grad:
            out.sum().backward()

    for _ in range(3):
        step(True)
        step(False)
    entries, main = [], threading.get_ident()
    with pytest.MonkeyPatch.context() as patch:
        store = StoreChannel._store

        def counted(channel):
            if threading.get_ident() == main:
                entries.append(channel)
            return store(channel)

        patch.setattr(StoreChannel, "_store", counted)
        for _ in range(5):
            step(True)
            step(False)
        unchanged = len(entries)
        roll(key)  # known, but never after what came last
        in_new_order = len(entries)
        attend(key, heads_q=8)
    return unchanged, in_new_order > unchanged, len(entries) > in_new_order


def test_calls_that_follow_each_other_as_before_compare_nothing(ranks):
    assert ranks(2, count_entries) == [(0, True, True)] * 2


def come_late(rank, num_ranks):
    be_quick()
    key = new_key(dist.group.WORLD)
    attend(key)
    if rank == ODD:
        time.sleep(1.5)
    attend(key, softcap=1.0)
    if rank == ODD:
        time.sleep(1.5)
    new_key(dist.group.WORLD)
    return outcome(attend, key)[0]


def test_a_rank_that_is_late_is_waited_for(ranks):
    assert ranks(3, come_late) == ["no error"] * 3


def pad_with_text(rank, num_ranks):
    be_quick()
    key = new_key(dist.group.WORLD)
    without = outcome(dispatch, key, pad_value="0")[0] if rank == ODD else ""  # no call: nobody else is told
    attend(key)
    return without, outcome(dispatch, key, grad=True, pad_value="0" if rank == ODD else 0)


def test_what_is_wrong_with_a_dispatch_is_told_where_its_gradient_will_be_gathered(ranks):
    own = "ValueError: pad_value: expected a number, got '0'"
    (_, theirs), (without, mine) = ranks(2, pad_with_text)
    assert without == mine[0] == own and mine[1] < 10
    assert theirs[0] == f"RuntimeError: dispatch: rank 1 of the group (global rank 1) raised {own}" and theirs[1] < 10


def want_gradient_alone(rank, num_ranks):
    be_quick()
    key = new_key(dist.group.WORLD)
    found = outcome(dispatch, key, grad=rank == ODD)
    return found if rank == ODD else outcome(attend, key)


def fail_before(rank, num_ranks):
    """One rank has no room for the index tensors of a call."""
    be_quick()
    found = []
    for call, change in ((undispatch, {}), (roll, {}), (dispatch, {"grad": True})):
        group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=40))
        key = new_key(group)
        with pytest.MonkeyPatch.context() as patch:
            if rank == ODD:

                def no_memory(*_args):
                    raise torch.OutOfMemoryError("none left")

                for module in ("dispatch", "roll"):
                    patch.setattr(f"megatron_magi.comm.{module}.upload", no_memory)
            found.append(outcome(call, key, **change))
    return found


def test_what_one_rank_lacks_for_a_call_is_a_message_on_all(ranks):
    theirs, mine = ranks(2, fail_before)
    for name, (told, seconds), (own, _) in zip(("undispatch", "roll", "dispatch"), theirs, mine, strict=True):
        assert own == "OutOfMemoryError: none left" and seconds < 10
        assert told == f"RuntimeError: {name}: rank 1 of the group (global rank 1) raised {own}"


def test_a_gradient_of_dispatch_that_one_rank_alone_wants_is_a_message(ranks):
    """Without a gradient `dispatch` sends nothing, so the others are in their next call."""
    for message, seconds in ranks(2, want_gradient_alone):
        assert "has operation dispatch instead of attention" in message and "global rank 1" in message, message
        assert seconds < 10


def come_late_again_and_again(rank, num_ranks):
    be_quick()
    group = dist.new_group(list(range(num_ranks)))
    key = new_key(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    left = []
    for round in range(4):
        dist.barrier()
        if rank == ODD:
            time.sleep(0.5)
        attend(key, softcap=1.0 + round)
        time.sleep(0.5)  # for the threads to read
        dist.barrier()
        left.append(store.num_keys())
    return left


def test_waiting_leaves_nothing_in_the_store(ranks):
    """What was told of the call before the last is gone, however often ranks are late."""
    for left in ranks(3, come_late_again_and_again):
        assert left[1] == left[2] == left[3], left


def trust(rank, num_ranks):
    config = MagiConfig(comm=CommConfig(verify=False))
    key = api.magi_attn_varlen_key([0, TOTAL], [0, TOTAL], cp_group_or_mesh=dist.group.WORLD, dist_attn_config=config)
    out = attend(key, softcap=float(rank))
    undispatch(key)
    roll(key)
    return out.shape[1:] == (4, 8) and not collective_checks._logs


def test_without_verify_nothing_is_compared(ranks):
    assert ranks(2, trust) == [True, True]


def recompute(rank, num_ranks):
    be_quick()
    key = new_key(dist.group.WORLD)
    for _ in range(3):
        x = torch.ones(len(api.get_position_ids(key)), 4, 8, requires_grad=True)
        out = checkpoint(lambda x: api.calc_attn(x, x[:, :2], x[:, 2:], key)[0], x, use_reentrant=False)
        out.sum().backward()
        assert bool(x.grad.isfinite().all())
    return collective_checks.log_of(dist.group.WORLD)._failures


def test_a_recomputation_that_stops_early_is_no_error(ranks):
    assert ranks(2, recompute) == [set(), set()]


def leave_group(rank, num_ranks):
    be_quick()
    group = dist.new_group([0, 1])
    attend(new_key(group))
    log = collective_checks.log_of(group)
    thread, log = log._thread, weakref.ref(log)
    api.clear_cache()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    thread.join(5.0)
    return thread.is_alive(), log() is None


def test_the_thread_ends_with_its_group(ranks):
    assert ranks(2, leave_group) == [(False, True)] * 2


def disagree_on_gpus(rank, num_ranks, change):
    key = new_key(dist.group.WORLD)
    rows = len(api.get_position_ids(key))

    def call(**options):
        q, k, v = (torch.ones(rows, heads, 64, dtype=torch.float16, device="cuda") for heads in (4, 2, 2))
        api.calc_attn(q[: options.pop("rows", rows)], k, v, key, **options)
        torch.cuda.synchronize()

    call()
    message, seconds = outcome(call, **change if rank == ODD else {})
    # A host does not wait for NCCL: where the first call did not raise, what it had queued has been given up.
    return message if message != "no error" else outcome(call)[0], seconds


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "change, expected", [({"softcap": 2.0}, "has softcap 2.0"), ({"rows": 7}, "raised ValueError")]
)
def test_a_collective_of_nccl_is_given_up_for_a_message(change, expected):
    results = run_ranks(disagree_on_gpus, 2, change, backend="nccl", timeout_s=120)
    for rank, (message, seconds) in enumerate(results):
        assert seconds < 30
        if rank != ODD or "rows" not in change:
            assert "rank 1 of the group (global rank 1)" in message and expected in message, message


class Failing:
    """Something outside of a process group: fails when it is told to."""

    def __init__(self) -> None:
        self.text, self.is_stopped = None, False

    def failure(self) -> str | None:
        return self.text

    def stop(self) -> None:
        self.is_stopped = True


def fail_beside(rank, num_ranks):
    be_quick()
    group, guard, other = dist.group.WORLD, Failing(), Failing()
    collective_checks.add_guard(group, guard)
    collective_checks.add_guard(group, other)  # of what serves the group as well, and has not failed
    key = new_key(group)
    undispatch(key)
    if rank == 0:
        guard.text = "group collective: rank 1 of the group (global rank 1) did not arrive within 2 s"
    end = time.monotonic() + 10
    while not (guard.is_stopped and other.is_stopped) and time.monotonic() < end:
        time.sleep(0.05)
    assert guard.is_stopped and other.is_stopped
    with pytest.raises(RuntimeError, match=r"group collective: rank 1 .* did not arrive within 2 s"):
        undispatch(key)


def test_what_fails_beside_the_group_ends_it_on_all_ranks(ranks):
    ranks(2, fail_beside)
