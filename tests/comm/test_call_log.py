"""The log of calls where ranks come in an order that is rare, and what its thread sees of a call that begins."""

from __future__ import annotations

import re

import torch.distributed as dist

from megatron_magi.comm import calls
from tests.comm.test_calls import ODD, be_quick, new_key, outcome, roll, undispatch


class Watched(calls.CallLog):
    """Notes, after each change of an attribute, whether the thread would take a call for one it could tell of."""

    unknown: list = []  # noqa: RUF012

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        call = self._count
        if call and self.has_begun(call) and not any(number == call for number, *_ in self._records):
            self.unknown.append(name)


def watch(rank, num_ranks):
    key = new_key(dist.group.WORLD)
    calls.log_of(dist.group.WORLD).__class__ = Watched
    roll(key)
    roll(key)
    return Watched.unknown


def test_no_call_has_begun_before_the_thread_can_tell_of_it(ranks):
    """It answers a question once: what is not there then is never told, and who asks waits for the time-out."""
    assert ranks(2, watch) == [[], []]


def come_after_the_message(rank, num_ranks):
    be_quick()
    group = dist.new_group(list(range(num_ranks)))
    store = dist.distributed_c10d._get_process_group_store(group)
    key = new_key(group)
    undispatch(key)
    if rank == 2:
        store.wait(["told"])
    found = outcome(undispatch, key, width=4 if rank == ODD else 5)[0]
    store.set("told", "")
    return found


def test_ranks_that_differ_do_not_wait_for_one_that_may_never_come(ranks):
    for message in ranks(3, come_after_the_message):
        assert re.search(r"rank 1 of the group .* has row_shape \(4,\) instead of \(5,\)", message), message
