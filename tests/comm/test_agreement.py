"""Ranks that disagree get one message that names them, and none hangs."""

from __future__ import annotations

import gc
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_magi.comm import agreement, board
from megatron_magi.comm.agreement import start_agreement
from megatron_magi.comm.board import NUM_SLOTS
from megatron_magi.comm.collective_checks import log_of
from megatron_magi.testing.spawn import run_ranks
from tests.comm.test_collective_checks import be_quick
from tests.refusals import error_of


def message_of(rank, num_ranks, values):
    return error_of(lambda: start_agreement(values[rank], None, "plan").wait())


def test_ranks_that_agree_pass(ranks):
    assert ranks(3, message_of, [2**63 - 1] * 3) == [None] * 3


def test_every_rank_hears_which_rank_differs_from_the_majority(ranks):
    messages = ranks(3, message_of, [0x11, 0x22, 0x22])
    assert len(set(messages)) == 1
    assert "rank 0 of the group (global rank 0) has 0x0000000000000011" in messages[0]
    assert "expected 0x0000000000000022, as ranks [1, 2] of the group have" in messages[0]
    assert messages[0].startswith("plan: ")


def test_in_a_tie_the_lowest_rank_is_right(ranks):
    messages = ranks(2, message_of, [5, 7])
    assert "rank 1 of the group" in messages[0] and messages[0] == messages[1]


def message_of_others(rank, num_ranks, others):
    try:
        start_agreement(7 + rank, None, "plan", others[rank]).wait()
    except RuntimeError as error:
        return [line.partition(": ")[0] for line in str(error).splitlines()]
    return None


def test_other_values_are_named_and_none_takes_the_place_of_the_first(ranks):
    assert ranks(2, message_of_others, [{"a": 1, "b": 2}, {"a": 1, "b": 3}]) == [["plan", "b"]] * 2
    assert ranks(2, message_of_others, [{"plan": 1}, {"plan": 1}]) == [["plan"]] * 2
    assert ranks(2, message_of_others, [{}, {"a": 4}]) == [["plan", "values of other names"], ["plan", "a"]]
    with pytest.raises(ValueError, match="others: at most 15 can be compared, got 16"):
        start_agreement(1, None, "plan", dict.fromkeys(map(str, range(16)), 0))


def disagree_in_a_subgroup(rank, num_ranks):
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    handle = start_agreement(rank, group, "mask")
    with pytest.raises(RuntimeError, match=r"mask: .*rank 1 of the group \(global rank 3\)"):
        handle.wait()
    return True


def test_the_message_tells_ranks_of_the_group_from_global_ranks(ranks):
    assert ranks(4, disagree_in_a_subgroup) == [None, True, None, True]


def agree_under_another_default_device(rank, num_ranks):
    with torch.device("meta"):
        return start_agreement(7, None, "plan").values()


def agree_outside_of_inference_mode(rank, num_ranks):
    found = []
    for value in range(4):  # the first two by a collective
        with torch.inference_mode():
            handle = start_agreement(value, None, "plan")
        found.append(handle.values())
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_comparison_that_begins_in_inference_mode_may_end_outside(ranks, num_ranks):
    assert (
        ranks(num_ranks, agree_outside_of_inference_mode) == [[[value] * num_ranks for value in range(4)]] * num_ranks
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_default_device_of_new_tensors_does_not_matter(ranks, num_ranks):
    assert ranks(num_ranks, agree_under_another_default_device) == [[7] * num_ranks] * num_ranks


def test_one_rank_without_a_group_agrees_with_itself():
    start_agreement(3, None, "plan").wait()


def start_without_memory(rank, num_ranks, fails_on):
    """What is raised by a comparison that some ranks cannot start, and by the next."""
    be_quick()
    with pytest.MonkeyPatch.context() as patch:
        if rank in fails_on:

            def no_memory(*_args, **_options):
                raise torch.OutOfMemoryError("none left")

            patch.setattr(agreement, "all_gather_single", no_memory)
        first = message_of(rank, num_ranks, [1] * num_ranks)
    return first, message_of(rank, num_ranks, [2] * num_ranks)


def test_a_comparison_that_one_rank_cannot_start_is_a_message_on_all(ranks):
    told = "plan: rank 1 of the group (global rank 1) raised OutOfMemoryError: none left"
    assert ranks(2, start_without_memory, [1]) == [(told, told), ("none left", told)]


def test_a_comparison_that_no_rank_can_start_leaves_the_group_as_it_is(ranks):
    assert ranks(2, start_without_memory, [0, 1]) == [("none left", None)] * 2


@pytest.mark.parametrize("value", [-1, 1 << 63])
def test_a_value_out_of_bounds_raises(value):
    with pytest.raises(ValueError, match="value: expected 63 bits"):
        start_agreement(value, None, "plan").wait()


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_ranks_of_an_nccl_group_hear_who_differs():
    messages = run_ranks(message_of, 2, [5, 7], backend="nccl", timeout_s=300)
    assert "rank 1 of the group" in messages[0] and messages[0] == messages[1]


def agree_while_the_gpu_is_busy(rank, num_ranks):
    start_agreement(1, None, "plan").wait()  # makes communicator, stream and pinned memory
    torch.cuda.synchronize()
    torch.cuda._sleep(8_000_000_000)  # cycles: some seconds
    busy = torch.cuda.current_stream().record_event()
    start_agreement(2, None, "plan").wait()
    agreed_first = not busy.query()
    torch.cuda.synchronize()
    return agreed_first


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_agreeing_does_not_wait_for_queued_compute():
    assert run_ranks(agree_while_the_gpu_is_busy, 2, backend="nccl", timeout_s=300) == [True, True]


def agree_many_times(rank, num_ranks, seed):
    """Values of many comparisons, some of them asked for late or never, between calls of other kinds."""
    generator, late, right = random.Random(seed), [], True
    own = random.Random(rank)
    for i in range(3 * NUM_SLOTS):
        if generator.random() < 0.6:
            with log_of(dist.group.WORLD):
                pass
        one = start_agreement(1000 * i + rank, None, "plan", {"a": i})
        if own.random() < 0.5:
            late.append((i, one))
        elif own.random() < 0.8:
            right &= one.values() == [1000 * i + r for r in range(num_ranks)]
        while late and own.random() < 0.6:
            at, one = late.pop(own.randrange(len(late)))
            right &= one.values() == [1000 * at + r for r in range(num_ranks)]
    right &= all(one.values() == [1000 * at + r for r in range(num_ranks)] for at, one in late)
    one = start_agreement(0, None, "plan")
    return right, type(one._received.done).__name__


def test_each_of_many_comparisons_has_its_own_values_though_ranks_ask_at_any_time(ranks):
    assert ranks(3, agree_many_times, 1) == [(True, "Board")] * 3


def differ_later(rank, num_ranks, num_first):
    for i in range(num_first):
        start_agreement(i, None, "plan").wait()
    return message_of(rank, num_ranks, [7] * (num_ranks - 1) + [9])


@pytest.mark.parametrize("num_first", [0, 1, 2, 5])
def test_ranks_that_differ_hear_the_same_in_every_comparison(ranks, num_first):
    first, *others = ranks(3, differ_later, num_first)
    assert first is not None and others == [first] * 2
    assert "rank 2 of the group (global rank 2) has 0x0000000000000009" in first


def fail_before(rank, num_ranks, num_first):
    """Rank 1 raises where others compare; then all would go on."""
    be_quick()
    for i in range(num_first):
        start_agreement(i, None, "plan").wait()
    found = []
    try:
        with agreement.told(dist.group.WORLD):
            if rank == 1:
                raise ValueError("lengths: wrong")
        start_agreement(1, None, "plan").wait()
    except (RuntimeError, ValueError) as error:
        found.append(str(error))
    return found + [message_of(rank, num_ranks, [i, i]) for i in range(4)]


@pytest.mark.parametrize(("num_first", "has_begun"), [(0, True), (1, True), (2, False), (4, True)])
def test_a_rank_that_raises_before_a_comparison_is_named_on_all(ranks, num_first, has_begun):
    """In the third one ranks first wait for each other, so that none has sent anything and the group can go on."""
    told = "plan: rank 1 of the group (global rank 1) raised ValueError: lengths: wrong"
    later = [told if has_begun else None] * 4
    assert ranks(2, fail_before, num_first) == [[told, *later], ["lengths: wrong", *later]]


def pretend_other_hosts(rank, num_ranks):
    with mock.patch.object(board, "_host", return_value=rank + 1):
        for i in range(4):
            start_agreement(i, None, "plan").wait()
        one = start_agreement(0, None, "plan")
    return type(one._received.done).__name__


def test_ranks_of_several_hosts_compare_by_collectives(ranks):
    assert "Board" not in ranks(2, pretend_other_hosts)


def compare_while_one_is_late(rank, num_ranks, num_hosts, num_between):
    """Seconds that the first rank takes to start two comparisons, while the other sleeps before."""
    with mock.patch.object(board, "_host", return_value=rank % num_hosts + 1):
        for i in range(4):
            start_agreement(i, None, "plan").wait()
        for _ in range(num_between):
            with log_of(dist.group.WORLD):
                pass
        if rank == 1:
            time.sleep(2.5)
        begin = time.monotonic()
        started = [start_agreement(i, None, "plan") for i in (5, 6)]
        took, way = time.monotonic() - begin, type(started[0]._received.done).__name__
        assert [one.values() for one in started] == [[5] * num_ranks, [6] * num_ranks]
    return took, way


@pytest.mark.parametrize(("num_hosts", "num_between"), [(1, 0), (1, 2 * NUM_SLOTS + 7), (2, 0)])
def test_starting_a_comparison_waits_for_no_other_rank(ranks, num_hosts, num_between):
    """However many calls of other kinds came between, by which entries are numbered; and by collectives too."""
    (took, way), _ = ranks(2, compare_while_one_is_late, num_hosts, num_between)
    assert took < 2.0 and (way == "Board") == (num_hosts == 1)


def fail_alone(rank, num_ranks, failing):
    """Rank 1 does not receive the values of one of the first comparisons, which the others do; then all go on."""
    be_quick()
    real, found = agreement._Received._await, []

    def lose(self, log, done):
        real(self, log, done)
        raise RuntimeError("lost")

    for i in range(6):
        one = start_agreement(10 * i, None, "plan", {"a": rank if i == 5 else 1})
        way = type(one._received.done).__name__
        with mock.patch.object(agreement._Received, "_await", lose if rank == 1 and i == failing else real):
            try:
                one.wait()
                found.append("")
            except RuntimeError as error:
                found.append(str(error).partition(":")[0])
    return found, way


@pytest.mark.parametrize(("failing", "has_board"), [(0, True), (1, False), (2, None)])
def test_ranks_compare_in_one_way_though_one_alone_has_not_received_where_they_meet(ranks, failing, has_board):
    (first, way), (second, of_second), (third, of_third) = ranks(3, fail_alone, failing)
    assert first == third == [""] * 5 + ["a"]
    assert second == ["lost" if i == failing else "" for i in range(5)] + ["a"]
    assert way == of_second == of_third
    assert has_board is None or (way == "Board") == has_board


def may_not_map(rank, num_ranks):
    attempts, real = [], board.os.open

    def refuse(path, *options):
        if str(path).startswith("/proc/"):
            attempts.append(path)
            raise PermissionError
        return real(path, *options)

    with mock.patch.object(board.os, "open", refuse if rank == 1 else real):
        for i in range(6):
            one = start_agreement(i, None, "plan")
            way = type(one._received.done).__name__
            one.wait()
    return way, len(attempts), log_of(dist.group.WORLD).comparisons.meeting.is_over


def test_ranks_that_may_not_map_the_memory_of_another_compare_by_collectives_and_ask_once(ranks):
    (way, none, over), (of_second, once, also) = ranks(2, may_not_map)
    assert way == of_second != "Board" and (none, once) == (0, 1) and over and also


def descriptors(rank, num_ranks):
    """Open descriptors of the memory, and mappings of it, after groups have come and gone."""
    for _ in range(3):
        group = dist.new_group(list(range(num_ranks)))
        for i in range(5):
            start_agreement(i, group, "plan").wait()
        log = log_of(group)
        assert log.comparisons.meeting.board is not None
        dist.destroy_process_group(group)
        log.close()
        del group, log
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in [*links, *maps] if "memfd:megatron_magi" in line]


def test_memory_of_groups_that_are_gone_is_given_back(ranks):
    assert ranks(2, descriptors) == [[], []]
