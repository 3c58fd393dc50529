"""``sanity_check``: NaN and inf are found in every tensor and pass, in visible, hidden and padding rows."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from megatron_magi import api, slice_attention
from megatron_magi.attention import distributed_attention
from megatron_magi.comm import timeouts
from megatron_magi.config import AttendConfig, CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan import make_plan
from tests import forced

pytestmark = forced.on_device_of_backend

IMPLS = forced.impls("torch", "reference")

# Rows 12 to 15 see nothing, keys 14 and 15 are seen by no row.
MASK = AttnMask([(0, 12, 0, 14, 0)], total_seqlen_q=16)
ROWS = {"q": 13, "k": 14, "v": 15, "dout": 12}


def tensors(num_rows):
    shapes = {"q": (4, 8), "k": (2, 8), "v": (2, 8), "dout": (4, 8)}
    x = {name: torch.ones(num_rows, *shape) for name, shape in shapes.items()}
    return {**x, "sink": torch.zeros(1, 4)}


def both_passes(x, attend):
    leaves = [x[name].requires_grad_(True) for name in ("q", "k", "v", "sink")]
    out, _ = attend(*leaves[:3], sink=leaves[3])
    out.backward(x["dout"])


def one_device(x, impl=IMPLS[0], sanity_check=True):
    def attend(q, k, v, sink):
        return slice_attention(q, k, v, MASK, sink=sink, impl=impl, sanity_check=sanity_check)

    both_passes(x, attend)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_hidden_row_is_named_and_without_the_check_does_no_harm_here(impl, name, value):
    x = tensors(16)
    x[name][ROWS[name] :, 1, 3] = value
    one_device(x, impl, sanity_check=False)
    with pytest.raises(ValueError, match=rf"^{name}: row {ROWS[name]} holds {value}; it is hidden: ") as caught:
        one_device(x, impl)
    assert ("no query sees it" if name in ("k", "v") else "it sees no key") in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_the_first_bad_row_is_named_and_that_it_is_visible(name):
    x = tensors(16)
    x[name][[3, 9]] = torch.inf
    one_device(x, sanity_check=False)
    with pytest.raises(ValueError, match=f"^{name}: row 3 holds inf; it is visible$"):
        one_device(x)


def test_a_sink_may_be_infinite_but_not_nan():
    x = tensors(16)
    x["sink"][0, :2] = torch.tensor([torch.inf, -torch.inf])
    one_device(x)
    x["sink"].data[0, 2] = torch.nan
    with pytest.raises(ValueError, match=r"^sink: row 0 holds nan"):
        one_device(x)


def test_ranges_and_compiled_functions_are_checked_too(fresh_compiler):
    x = tensors(16)
    x["v"][15] = torch.nan
    ranges = torch.tensor([[0, 12]]), torch.tensor([[0, 14]])
    compiled = torch.compile(slice_attention, backend="eager", fullgraph=True)
    for call in (
        lambda: api.flex_flash_attn_func(x["q"], x["k"], x["v"], *ranges, sanity_check=True),
        lambda: compiled(x["q"], x["k"], x["v"], MASK, sanity_check=True),
    ):
        with pytest.raises(ValueError, match="v: row 15 holds nan; it is hidden: no query sees it"):
            call()


def test_without_the_check_nothing_is_looked_at(monkeypatch):
    def looked(*_args):
        raise AssertionError("a tensor was looked at")

    monkeypatch.setattr(torch.Tensor, "isfinite", looked)
    one_device(tensors(16), sanity_check=False)
    plan = make_plan(MASK).for_rank(0)
    both_passes(tensors(16), lambda q, k, v, sink: distributed_attention(q, k, v, plan, None, sink=sink))
    with pytest.raises(AssertionError):
        one_device(tensors(16))


def test_the_variable_switches_it_on_for_keys(monkeypatch):
    x = tensors(16)
    x["v"][15] = torch.nan

    def attend():
        return api.calc_attn(x["q"], x["k"], x["v"], api.magi_attn_flex_key([[0, 12]], [[0, 14]], "full", 16, 16))

    assert attend()[0].isfinite().all() or forced.multiplies_hidden_pairs()
    monkeypatch.setenv("MAGI_ATTENTION_SANITY_CHECK", "1")
    with pytest.raises(ValueError, match="v: row 15 holds nan; it is hidden: no query sees it, on rank 0 of the group"):
        attend()


CASES = {
    # name: tensor, rank, global token (the sequence has 22 tokens, padded to 24), what the message says
    "padding": ("k", -1, 22, "it is padding"),
    "hidden": ("v", -1, 21, "it is hidden: no query sees it"),
    "hidden query": ("q", -1, 20, "it is hidden: it sees no key"),
    "only others see it": ("k", 0, 1, "it is visible"),
    "visible": ("dout", 0, 3, "it is visible"),
    "sees fetched keys only": ("q", 1, 12, "it is visible"),
}


def find_on_ranks(rank, num_ranks, verify):
    timeouts.LOOK_S, timeouts.ASK_S, timeouts.BUSY_S = 0.1, 0.1, 0.02
    # Each query sees the keys of the first rank's tokens alone: of its own, the last rank's keys are seen by no row.
    mask = AttnMask([(12, 16, 0, 8, 0), (0, 4, 2, 3, 0)], total_seqlen_q=22)
    config = MagiConfig(
        dispatch=DispatchConfig(algorithm="sequential"),
        overlap=OverlapConfig(degree=1),
        attend=AttendConfig(sanity_check=True),
        comm=CommConfig(verify=verify),
    )
    config = dataclasses.replace(config, dispatch=dataclasses.replace(config.dispatch, alignment=12 // num_ranks))
    plan = make_plan(mask, config, num_ranks)
    assert plan.dispatch.padded_seqlen == 24
    mine, index = plan.for_rank(rank), plan.dispatch.global_index(rank).tolist()
    found = {}
    for case, (name, _, token, _) in CASES.items():
        x = tensors(len(index))
        if token in index:
            x[name][index.index(token)] = torch.nan
        group = dist.new_group(list(range(num_ranks)))
        try:
            both_passes(
                x,
                lambda q, k, v, sink, group=group: distributed_attention(
                    q, k, v, mine, group, config=config, sink=sink
                ),
            )
            found[case] = "no error"
        except (ValueError, RuntimeError) as error:
            found[case] = f"{type(error).__name__}: {error}"
    for is_bad in (False, False, True, False):  # also in calls that have followed each other before
        x = tensors(len(index))
        if is_bad and rank == 0:
            x["q"][0] = torch.nan
        with pytest.raises((ValueError, RuntimeError), match="q: row 0") if is_bad else nullcontext():
            both_passes(x, lambda q, k, v, sink: distributed_attention(q, k, v, mine, group, config=config, sink=sink))
    return found


@pytest.mark.parametrize(("num_ranks", "verify"), [(2, False), (3, True)])
def test_what_one_rank_finds_is_an_error_on_all(ranks, num_ranks, verify):
    results = ranks(num_ranks, find_on_ranks, verify)
    for case, (name, rank, _, kind) in CASES.items():
        owner = rank % num_ranks
        for other, found in enumerate(results):
            message = found[case]
            where = f"{case}, rank {other}: {message}"
            begins = f"ValueError: {name}: row " if other == owner else "RuntimeError: "
            assert message.startswith(begins) and f"{kind}, on rank {owner} of the group" in message, where
            if other != owner:
                assert f"rank {owner} of the group (global rank {owner}) raised ValueError: {name}: row" in message, (
                    where
                )
