"""What ranks tell each other in the store of their group."""

from __future__ import annotations

import torch.distributed as dist

from megatron_magi.comm.store_channel import StoreChannel


def boards_of_two_lives(rank, num_ranks):
    old = StoreChannel(dist.group.WORLD)
    old.post({"kind": "failed", "call": 1, "text": "long ago"})
    voted = old.vote(1, "digest")
    dist.barrier()
    new = StoreChannel(dist.group.WORLD)
    first = new.unread()
    dist.barrier()
    return len(old.unread()), first, voted, new.vote(1, "digest")


def test_a_group_reads_nothing_of_one_that_had_its_name(ranks):
    found = ranks(2, boards_of_two_lives)
    assert [events for events, *_ in found] == [1, 1] and all(first == [] for _, first, *_ in found)
    assert sorted(voted for *_, voted, _ in found) == sorted(again for *_, again in found) == [False, True]


def tell_on_boards(rank, num_ranks):
    channel, found = StoreChannel(dist.group.WORLD), []
    concluded = channel.conclude(2, f"by rank {rank}")
    channel.answer(2, {"from": rank})
    for done in (2, 3):
        channel.clear(done)
        dist.barrier()
        channel.answers(2, known := {})
        found.append(known)
        dist.barrier()
    return concluded, channel.conclusion(2), channel.conclusion(3), found


def test_the_first_conclusion_holds_and_answers_stay_until_all_are_past_their_call(ranks):
    found = ranks(2, tell_on_boards)
    assert len({text for concluded, read, *_ in found for text in (concluded, read)}) == 1
    for *_, none, answers in found:
        assert none is None and answers == [{0: {"from": 0}, 1: {"from": 1}}, {}]
