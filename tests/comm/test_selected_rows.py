"""Rows that are selected on a device: sums of their gradients, and a host that waits for nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.comm import selected_rows
from megatron_magi.comm.selected_rows import KeyPlaces, OverflowWatch, Requests, exchange_requests, fetch
from megatron_magi.operands.selected_blocks import BlockTables, PackedBlocks, Run, listed, packed_rows
from megatron_magi.operands.sparse_pattern import SparsePattern

TOTAL, CAPACITY, DIM = 40, 4, 3
INDEX = [np.array([3, 1, 2, 0, 10, 11]), np.arange(12, 39), np.array([39, 4, 5, 6, 7, 8, 9, 40, 41])]
"""Tokens of three ranks; the last has two rows of padding."""


def places_of(rank: int, device: str = "cpu") -> KeyPlaces:
    return KeyPlaces.build(INDEX, TOTAL, rank, device)


def test_tables_say_who_holds_which_tokens():
    places = places_of(2)
    assert places.num_keys == (6, 27, 7) and places.num_own == 7 and places.width == 32
    assert places.place[[0, 12, 39, 9]].tolist() == [3, 32, 64, 70]
    assert places.token[2, :8].tolist() == [39, 4, 5, 6, 7, 8, 9, 40] and (places.token[0, 6:] == TOTAL).all()


def run_fetch(rank: int, num_ranks: int) -> dict:
    places, group = places_of(rank), dist.group.WORLD
    kv = torch.arange(TOTAL, dtype=torch.bfloat16)[INDEX[rank][: places.num_own]][:, None, None].repeat(1, 2, DIM)
    kv[:, 1] += 100
    selected = torch.zeros(2, TOTAL, dtype=torch.bool)
    selected[0, [0, 20, 39, 30]] = True
    selected[1, [5, 4, 3]] = True
    requests = exchange_requests(selected, places, CAPACITY, group, True)
    found = fetch(kv.requires_grad_(), requests, group)
    # Each head of a row is another key; those that are not selected lie nowhere.
    for head in range(2):
        for token in range(TOTAL):
            row = int(requests.source[head, token])
            assert (row >= 0) == bool(selected[head, token])
            if row >= 0:
                assert (found[row, head] == token + 100 * head).all(), (head, token)
    # 1 of the rank itself, and of each other 2^-8: fp32 sums, rounded once, are above 1.
    grad = torch.zeros_like(found)
    for head, token in ((0, 0), (0, 39), (1, 3)):
        owner = int(places.place[token]) // places.width
        grad[requests.source[head, token], head] = 1.0 if owner == rank else 2.0**-8
    (total,) = torch.autograd.grad(found, kv, grad)
    return {"most": int(requests.most), "grad": total}


def test_each_head_gets_the_rows_it_selects_and_gradients_are_summed_once_in_fp32(ranks):
    found = ranks(3, run_fetch)
    assert [x["most"] for x in found] == [2] * 3  # tokens 20 and 30 of the second rank, or 4 and 5 of the third
    expected = [torch.zeros(n, 2, DIM, dtype=torch.bfloat16) for n in (6, 27, 7)]
    expected[0][3, 0] = expected[2][0, 0] = expected[0][0, 1] = 1 + 2.0**-7
    assert all(torch.equal(x["grad"], y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", ["mask", "lists", "csr"])
@pytest.mark.parametrize("causal", [True, False])
def test_no_number_is_read_by_the_host(monkeypatch, form, causal):
    """Tensors without content go through all of it: whatever waits for a number, or has a size of its own, raises."""
    monkeypatch.setattr(selected_rows, "_all_to_all", lambda *_: None)
    places, runs = places_of(0, "meta"), [Run(0, 3, 4), Run(1, 1, 3), Run(3, 0, 1), Run(4, 10, 12)]
    tables = BlockTables.build(INDEX, 0, runs, TOTAL, (1, 8), causal, "meta")
    forms = {
        "mask": (torch.empty(2, 6, 5, dtype=torch.bool, device="meta"),),
        "lists": (torch.empty(2, 6, 3, dtype=torch.int32, device="meta"),),
        "csr": (torch.empty(1, 7, dtype=torch.int64, device="meta"), torch.empty(9, dtype=torch.int32, device="meta")),
    }
    pattern = SparsePattern(forms[form], 1, 8, causal)
    chosen = listed(pattern, TOTAL, tables.ends if causal else None)
    selected = chosen.repeat_interleave(8, 1)[:, :TOTAL]
    requests = exchange_requests(selected, places, CAPACITY, None, True)
    assert requests.rows.shape == (2, CAPACITY, len(chosen)) and requests.fetched.shape == (len(chosen), 2 * CAPACITY)
    packed = PackedBlocks.of(chosen, tables, tables.num_slots(CAPACITY, 5))
    tokens = torch.cat([places.token[0, :6].expand(len(chosen), -1), requests.fetched], 1)
    source = torch.empty(6 + 2 * CAPACITY, 2, DIM, device="meta", requires_grad=True)
    found = packed_rows(source, packed, requests.source, tokens)
    assert found.shape[0] == packed.block.shape[1] * 8
    assert torch.autograd.grad(found.sum(), source)[0].shape == source.shape
    assert len(packed.parts(pattern)) == (len(runs) if causal else 1)


def requests_of(most: int, device: str, capacity: int = 10) -> Requests:
    return Requests(None, capacity, None, None, None, torch.tensor(most, dtype=torch.int32, device=device))


def test_an_overflow_is_told_once_though_calls_queued_meanwhile_copy_it_again():
    watch = OverflowWatch(torch.device("cpu"))
    watch.note(requests_of(10, "cpu"))
    assert watch.take() == 0
    for most in (12, 2**31 - 1):
        watch.note(requests_of(most, "cpu"))
        on_device = watch._seen.clone()
        assert watch.take() == most and watch.take() == 0
        watch._seen.copy_(on_device)  # as by a call that was queued before the host took it
        assert watch.take() == 0
        watch.note(requests_of(3, "cpu"))
        assert watch.take() == 0
    watch.note(requests_of(12, "cpu"))
    watch.note(requests_of(11, "cpu"))
    watch.note(requests_of(4, "cpu"))
    assert watch.take() == 11


def test_a_watch_of_inference_mode_goes_on_outside_of_it():
    with torch.inference_mode():
        watch = OverflowWatch(torch.device("cpu"))
        watch.note(requests_of(3, "cpu"))
    watch.note(requests_of(12, "cpu"))
    assert watch.take() == 12


@pytest.mark.gpu
def test_an_overflow_that_the_host_has_taken_is_not_told_by_calls_that_were_queued_before():
    watch = OverflowWatch(torch.device("cuda"))
    watch.note(requests_of(12, "cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    watch.note(requests_of(3, "cuda"))
    assert watch.take() == 12
    torch.cuda.synchronize()
    assert watch.take() == 0
