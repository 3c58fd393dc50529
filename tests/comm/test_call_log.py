"""The log of calls where ranks come in an order that is rare, and what its thread sees of a call that begins."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from megatron_magi.comm import collective_checks
from megatron_magi.comm.dispatch import RowsCall
from tests.comm.test_collective_checks import ODD, attend, be_quick, new_key, outcome, roll, undispatch


class Watched(collective_checks.CallLog):
    """Notes, after each change of an attribute, whether the thread would take a call for one it could tell of."""

    unknown: list = []  # noqa: RUF012

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        call = self._count
        if call and self.has_begun(call) and not any(number == call for number, *_ in self._records):
            self.unknown.append(name)


def watch(rank, num_ranks):
    key = new_key(dist.group.WORLD)
    collective_checks.log_of(dist.group.WORLD).__class__ = Watched
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


class Slow(collective_checks.CallLog):
    """Its thread takes long to answer a question, until this rank has raised an error if it can."""

    answers, failed = threading.Event(), threading.Event()

    def _own_answer(self, call):
        told = super()._own_answer(call)
        if threading.current_thread() is self._thread:
            self.answers.set()
            self.failed.wait(1)
        return told

    def _fail(self, error):
        super()._fail(error)
        self.failed.set()


def until(is_so):
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.02)
    raise AssertionError("did not come")


def fail_while_a_question_is_answered(rank, num_ranks):
    be_quick()
    log = collective_checks.log_of(dist.group.WORLD)
    log.__class__ = Slow
    with suppress(MemoryError), log:
        log.agree(RowsCall("test", None, ()))
        log._channel.post({"kind": "question", "call": log._count})
        assert Slow.answers.wait(20)
        raise MemoryError
    until(lambda: not log._questions)
    dist.barrier()
    told = {}
    log._channel.answers(log._count, told)
    return [told[rank].get("failed") for rank in range(num_ranks)]


def test_an_error_is_told_though_a_question_is_being_answered(ranks):
    """The next call waits until all ranks have told theirs."""
    assert ranks(2, fail_while_a_question_is_answered) == [["raised MemoryError: "] * 2] * 2


def fail_when_asked(rank, num_ranks):
    be_quick()
    key = new_key(dist.group.WORLD)
    log = collective_checks.log_of(dist.group.WORLD)
    if rank == ODD:
        until(lambda: log._questions)
    outcome(attend, key, rows=7 if rank == ODD else None)
    dist.barrier()
    until(lambda: log._channel._num_read == log._channel._store().add("events", 0) and not log._questions)


def test_a_question_about_a_call_that_failed_is_not_kept(ranks):
    """The thread would look at the store ten times a second from then on."""
    ranks(2, fail_when_asked)
