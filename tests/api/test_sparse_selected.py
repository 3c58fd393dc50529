"""Sparse attention under context parallelism that fetches what lists name: equal to one rank's, with fewer bytes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_magi import api, block_sparse_attention, index_sparse_attention, latent_sparse_attention
from megatron_magi.api import sparse, sparse_keys
from megatron_magi.backends.costs import DEFAULT
from megatron_magi.comm import dispatch as dispatch_module
from megatron_magi.config import AttendConfig, CommConfig, DispatchConfig, MagiConfig
from megatron_magi.cost_model import Rates
from megatron_magi.plan.sparse_ways import SparseShape
from tests.api.test_sparse import of_rank
from tests.comm.test_collective_checks import be_quick

HEADS_Q, HEADS_KV, DIM, DIM_V = 4, 2, 8, 12
NAMES = ("out", "lse", "max_logits", "dq", "dk", "dv", "dsink")
LATENT_NAMES = ("out", "lse", "max_logits", "dq", "dkv", "dsink")
LATENT = {"dim_v": 6, "softmax_scale": 0.3}


@dataclass(frozen=True)
class Case:
    """One call: lists, where tokens lie, and options.

    Attributes:
        form: ``keys``, ``latent``, ``mask``, ``lists`` or ``csr``.
        layout: ``contiguous``, ``zigzag``, ``scattered``.
        num_lists: 1 or the number of key heads.
        share: of the keys, or blocks, that a list names.
    """

    form: str
    total: int
    q_block: int = 1
    k_block: int = 64
    causal: bool = False
    layout: str = "scattered"
    num_lists: int = HEADS_KV
    share: float = 0.2
    seed: int = 0
    dtype: torch.dtype = torch.float64

    @property
    def is_single(self) -> bool:
        """Whether lists are of single keys."""
        return self.form in ("keys", "latent")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results."""
        return LATENT_NAMES if self.form == "latent" else NAMES

    @property
    def sizes(self) -> dict:
        """Arguments of the attention over blocks."""
        return {"q_block_size": self.q_block, "k_block_size": self.k_block, "causal": self.causal}


def inputs(case: Case) -> list[torch.Tensor]:
    """q, k, v (or one tensor of both), sink, dout of the whole sequence."""
    generator = torch.Generator().manual_seed(case.seed)
    n = case.total
    shapes = [(n, HEADS_Q, DIM), (n, HEADS_KV, DIM), (n, HEADS_KV, DIM_V), (1, HEADS_Q), (n, HEADS_Q, DIM_V)]
    if case.form == "latent":
        shapes[2:] = (1, HEADS_Q), (n, HEADS_Q, LATENT["dim_v"])
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(case.dtype) for shape in shapes]


def lists_of(case: Case) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Lists of the whole sequence, some of them empty; with numbers of -1, and some twice, where the form has these."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    single = case.is_single
    rows, columns = (-(-case.total // size) for size in ((1, 1) if single else (case.q_block, case.k_block)))
    mask = torch.rand(case.num_lists, rows, columns, generator=generator) < case.share
    mask &= torch.rand(case.num_lists, rows, 1, generator=generator) < 0.9
    if case.form == "mask":
        return mask
    if case.form == "csr":
        offsets = torch.nn.functional.pad(mask.sum(-1).flatten().cumsum(0), (1, 0))
        at = torch.arange(rows + 1) + rows * torch.arange(case.num_lists)[:, None]
        return offsets[at], mask.nonzero()[:, 2]
    width = max(1, int(mask.sum(-1).max()))
    scores = torch.rand(mask.shape, generator=generator).masked_fill(~mask, -1)
    found = scores.topk(width)
    entries = found.indices.masked_fill(found.values < 0, -1)
    twice = torch.rand(entries.shape, generator=generator) < 0.1
    entries = torch.where(twice, entries[..., :1], entries)
    return entries.transpose(0, 1).int() if single else entries


def layout_of(case: Case, num_ranks: int) -> str | list[torch.Tensor]:
    """Whole blocks of queries in any order on ranks of uneven lengths, the last one of four without any."""
    if case.layout != "scattered":
        return case.layout
    rng = np.random.default_rng(case.seed)
    last = -(-case.total // case.q_block) - 1
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for block in [*rng.permutation(last).tolist(), last]:  # the last one may be short
        start = block * case.q_block
        stay = (
            held[block % min(2, num_ranks)]
            if rng.random() < 0.5
            else held[rng.integers(0, num_ranks - (num_ranks >= 4))]
        )
        stay += range(start, min(start + case.q_block, case.total))
    short = next(rows for rows in held if case.total - 1 in rows)
    assert short[-1] == case.total - 1
    held[0] += [case.total, case.total + 1]
    return [torch.tensor(rows, dtype=torch.int64) for rows in held]


def whole(case: Case) -> list[torch.Tensor]:
    """Results of one rank by the dense definition in fp64."""
    *qkv, sink, dout = (x.double().requires_grad_() for x in inputs(case))
    options = {"sink": sink, "return_max_logits": True, "impl": "reference"}
    if case.form == "latent":
        out, meta = latent_sparse_attention(*qkv, lists_of(case), **LATENT, **options)
    elif case.is_single:
        out, meta = index_sparse_attention(*qkv, lists_of(case), **options)
    else:
        out, meta = block_sparse_attention(*qkv, lists_of(case), **case.sizes, **options)
    grads = torch.autograd.grad(out, (*qkv, sink), dout.detach())
    return [out.detach(), meta.lse, meta.max_logits, *grads]


def key_of(
    case: Case,
    num_ranks: int,
    rates: Rates | None = None,
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
    **attend,
) -> api.DistAttnRuntimeKey:
    """The key of a case; its mask does not matter."""
    bounds, group = [0, case.total], group or (dist.group.WORLD if num_ranks > 1 else None)
    comm = CommConfig(dsink_all_reduce="sum", verify=verify)
    config = MagiConfig(DispatchConfig(rates=rates), comm=comm, attend=AttendConfig(**attend))
    return api.magi_attn_varlen_key(
        bounds, bounds, cp_group_or_mesh=group, dist_attn_config=config, layout=layout_of(case, num_ranks)
    )


class Mine:
    """A rank's part of a case."""

    def __init__(self, case: Case, num_ranks: int, **options) -> None:
        self.case, self.key = case, key_of(case, num_ranks, **options)
        *qkv, self.sink, self.dout = inputs(case)
        self.qkv = [api.dispatch(x, self.key).requires_grad_() for x in qkv]
        self.sink.requires_grad_()
        self.real = api.dispatch(torch.ones(case.total), self.key).bool()
        positions = api.get_position_ids(self.key)[self.real]
        form = "keys" if case.is_single else case.form
        self.lists = of_rank(lists_of(case), form, positions, case.q_block)
        if case.is_single:
            padding = torch.full((len(self.real) - len(positions), *self.lists.shape[1:]), 7, dtype=torch.int32)
            self.lists = torch.cat([self.lists, padding])

    def attend(self, **options) -> tuple[torch.Tensor, api.AttnForwardMeta]:
        """The call."""
        options = {"sink": self.sink, "return_max_logits": True, "fetch": "selected"} | options
        if self.case.form == "latent":
            return api.calc_latent_sparse_attn(*self.qkv, self.lists, self.key, **LATENT, **options)
        if self.case.is_single:
            return api.calc_index_sparse_attn(*self.qkv, self.lists, self.key, **options)
        return api.calc_block_sparse_attn(*self.qkv, self.lists, self.key, **self.case.sizes, **options)

    def grads(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Of q, k, v and the sink; those of padding rows are nobody's."""
        dout = api.dispatch(self.dout, self.key, pad_value=5.0)
        return list(torch.autograd.grad(out, (*self.qkv, self.sink), dout))

    def results(self, **options) -> list[torch.Tensor]:
        """Those of all ranks brought together, as `whole` has them."""
        out, meta = self.attend(**options)
        assert not out[~self.real].any() and meta.lse[~self.real].isneginf().all()
        *grads, dsink = self.grads(out)
        assert not any(grad[~self.real].any() for grad in grads)
        rows = [api.undispatch(x.detach(), self.key) for x in (out, meta.lse, *grads)]
        return [*rows[:2], meta.max_logits, *rows[2:], dsink]

    def share(self) -> float:
        """What the capacity has to hold."""
        sizes = {} if self.case.is_single else self.case.sizes
        return api.selected_key_share(self.lists, self.key, num_heads_kv=HEADS_KV, **sizes)


def check(case: Case, found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for name, x, y in zip(case.names, found, expected, strict=True):
        torch.testing.assert_close(
            x.double(), y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{case}: {name}: {text}"
        )


def check_all(todo: list[Case], found: list[list[tuple]]) -> None:
    """What `run_cases` found on each rank."""
    for at, case in enumerate(todo):
        expected = whole(case)
        for of_rank_found in found:
            for results in of_rank_found[at]:
                check(case, results, expected)


def run_cases(rank: int, num_ranks: int, todo: list[Case]) -> list[tuple]:
    found = []
    for case in todo:
        mine = Mine(case, num_ranks)
        share = mine.share()
        # As many rows as are needed are enough, and no other way is taken.
        found.append((mine.results(), mine.results(capacity=max(share, 1e-9))))
    return found


@st.composite
def drawn_cases(draw) -> Case:
    form = draw(st.sampled_from(["keys", "latent", "mask", "lists", "csr"]))
    single = form in ("keys", "latent")
    return Case(
        form,
        draw(st.sampled_from([50, 97] if single else [200, 333, 512])),
        1 if single else draw(st.sampled_from([8, 16, 40, 64])),
        draw(st.sampled_from([64, 128])),
        not single and draw(st.booleans()),
        draw(st.sampled_from(["contiguous", "zigzag", "scattered"])) if single else "scattered",
        draw(st.sampled_from([1, HEADS_KV])),
        draw(st.sampled_from([0.0, 0.02, 0.1, 0.4, 1.0])),
        draw(st.integers(0, 1 << 16)),
    )


def check_drawn(num_ranks: int, ranks) -> None:
    """Hypothesis draws lists of cases, the simplest first: ranks are started once a list."""

    @settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
    @given(todo=st.lists(drawn_cases(), min_size=8, max_size=8))
    def drawn(todo: list[Case]) -> None:
        check_all(todo, ranks(num_ranks, run_cases, todo))

    drawn()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_lists_in_any_layout_give_what_one_rank_does(ranks, num_ranks: int) -> None:
    check_drawn(num_ranks, ranks)


def test_layouts_cut_blocks_of_keys(ranks) -> None:
    """Runs that begin and end inside blocks of keys, in scattered layouts several of a rank in one block."""
    todo = [
        Case(form, total, 8, k_block, causal, layout, share=0.5, seed=total)
        for form, total, k_block, causal, layout in (
            ("lists", 288, 128, True, "zigzag"),
            ("mask", 240, 64, True, "zigzag"),
            ("csr", 336, 128, True, "contiguous"),
            ("csr", 192, 128, False, "zigzag"),
            ("lists", 333, 64, True, "scattered"),
            ("mask", 400, 128, True, "scattered"),
        )
    ]
    check_all(todo, ranks(3, run_cases, todo))


class Bytes:
    """Counts what a rank receives from others in collectives of keys and requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        exchange, gather = dist.all_to_all_single, dispatch_module.all_gather_single
        scatter = dispatch_module.reduce_scatter_single

        def exchanged(into, *args, **options):
            self.count += into.nbytes
            return exchange(into, *args, **options)

        def gathered(into, out_of, **options):
            self.count += into.nbytes - out_of.nbytes
            return gather(into, out_of, **options)

        def scattered(into, out_of, **options):
            self.count += out_of.nbytes - into.nbytes
            return scatter(into, out_of, **options)

        monkeypatch.setattr(dist, "all_to_all_single", exchanged)
        monkeypatch.setattr(dispatch_module, "all_gather_single", gathered)
        monkeypatch.setattr(dispatch_module, "reduce_scatter_single", scattered)

    def taken(self) -> int:
        """Since the last time."""
        count, self.count = self.count, 0
        return count


NEAR = Case("lists", 1024, 64, 64, layout="contiguous", num_lists=1)
"""Blocks of queries see their own and the one before."""


def near_lists(mine: Mine) -> torch.Tensor:
    blocks = api.get_position_ids(mine.key)[::64] // 64
    return torch.stack([blocks, blocks - 1], -1)[None]


def run_bytes(rank: int, num_ranks: int) -> dict:
    found, mine = {}, Mine(NEAR, num_ranks, rates=replace(DEFAULT, gbytes_per_s=0.001))
    mine.lists = near_lists(mine)
    with pytest.MonkeyPatch.context() as patch:
        counter = Bytes(patch)
        for name, options in {
            "all": {"fetch": "all"}, "selected": {"capacity": 0.25}, "bound": {},
            "auto": {"fetch": "auto"}, "auto bounded": {"fetch": "auto", "capacity": 0.25},
        }.items():  # fmt: skip
            out, _ = mine.attend(**options)
            forward = counter.taken()
            mine.grads(out)
            found[name] = forward, counter.taken()
    return found | {"share": mine.share()}


def test_fewer_bytes_move_for_sparse_lists(ranks) -> None:
    row, keys = HEADS_KV * (DIM + DIM_V) * 8, 256  # of a rank
    everything = 3 * keys * row
    for found in ranks(4, run_bytes):
        assert found["all"] == found["auto"] == (everything, everything)
        # A quarter of the keys of each other rank, and for each key a bit, and how many are selected.
        assert found["selected"] == found["auto bounded"] == (everything // 4 + 3 * (keys // 8 + 4), everything // 4)
        # Without a capacity as many as four blocks of queries can name, which is all.
        assert found["bound"] == (everything + 3 * keys // 8, everything)
        assert found["share"] == 64 / 256


def run_overflows(rank: int, num_ranks: int, case: Case) -> dict:
    mine = Mine(case, num_ranks)
    found: dict = {"expected": mine.results(fetch="all")}
    needed = mine.share()
    enough = mine.results(capacity=needed)
    check(case, enough, [x.double() for x in found["expected"]])
    less = needed - 1 / (case.total // num_ranks)
    with pytest.raises(RuntimeError) as caught:
        mine.attend(capacity=less)
    found["text"] = str(caught.value)
    check(case, mine.results(capacity=less, on_overflow="gather"), [x.double() for x in found["expected"]])
    # Where the host does not read the number: as on GPUs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_keys, "_host_reads", lambda device: False)
        out, meta = mine.attend(capacity=less)
        grads = mine.grads(out)
        found["nan"] = [bool(x.isnan().all()) for x in (out, meta.lse, *grads[:1])]
        with pytest.raises(RuntimeError) as caught:
            mine.attend(capacity=less)
        found["later"] = str(caught.value)
        check(case, mine.results(capacity=needed), [x.double() for x in found["expected"]])
    return {name: value for name, value in found.items() if name != "expected"} | {"share": needed}


@pytest.mark.parametrize("form", ["keys", "lists"])
def test_lists_that_name_more_keys_than_the_capacity_are_told_to_all_ranks(ranks, form: str) -> None:
    case = Case(form, 384, 64 if form == "lists" else 1, 64, layout="contiguous", share=0.01 if form == "keys" else 0.4)
    found = ranks(3, run_overflows, case)
    assert all(x == found[0] for x in found)
    needed = round(found[0]["share"] * 128)
    assert 0 < needed < 128 or form == "lists"
    assert found[0]["text"].startswith(f"capacity: lists of a rank name {needed} keys of another, the capacity is")
    assert found[0]["nan"] == [True] * 3
    assert found[0]["later"].startswith(
        f"in an earlier call, whose results are NaN: capacity: lists of a rank name {needed}"
    )


NOT_FINITE = [
    ("keys", "all", "q"), ("lists", "all", "v"), ("latent", "selected", "kv"), ("keys", "selected", "sink"),
    ("lists", "selected", "dout"), ("latent", "all", "dout"),
]  # fmt: skip


def run_not_finite(rank: int, num_ranks: int, verify: bool) -> list[str]:
    be_quick()
    found = []
    for form, fetch, name in NOT_FINITE:
        case = Case(form, 128, 16 if form == "lists" else 1, causal=form == "lists", layout="contiguous", share=0.5)
        group = dist.new_group(range(num_ranks))  # an error ends the use of a group
        mine = Mine(case, num_ranks, group=group, verify=verify, sanity_check=True)
        names = ("q", "kv") if form == "latent" else ("q", "k", "v")
        tensors = dict(zip((*names, "sink", "dout"), (*mine.qkv, mine.sink, mine.dout), strict=True))
        if rank == 1:
            tensors[name].data[{"sink": 0, "dout": 64 + 3}.get(name, 3)] = torch.nan
        try:
            mine.grads(mine.attend(fetch=fetch)[0])
            found.append("no error")
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("verify", [True, False])
def test_a_number_that_is_not_finite_on_one_rank_is_named_on_all(ranks, verify: bool) -> None:
    """In the backward too, and where calls are not compared otherwise."""
    for other, owner, (form, _, name) in zip(*ranks(2, run_not_finite, verify), NOT_FINITE, strict=True):
        where = "" if name == "sink" else "it may be hidden or visible, "
        text = f"{name}: row {0 if name == 'sink' else 3} holds nan; {where}on rank 1 of the group (global rank 1)"
        assert owner == f"ValueError: {text}", (form, name)
        assert other.startswith("RuntimeError: ") and f"raised ValueError: {text}" in other, (form, name)


def run_without_memory(rank: int, num_ranks: int) -> str:
    be_quick()
    mine = Mine(NEAR, num_ranks)
    error = torch.OutOfMemoryError("none left") if rank == 1 else None
    failing = mock.patch.object(sparse, "block_sparse_attention", wraps=block_sparse_attention, side_effect=error)
    with failing, pytest.raises(RuntimeError) as caught:
        mine.attend(return_max_logits=True)
    return str(caught.value)


def test_attention_that_fails_on_one_rank_is_told_to_those_that_reduce_the_largest_logits(ranks) -> None:
    first, second = ranks(2, run_without_memory)
    assert second == "none left" and "raised OutOfMemoryError: none left" in first


def run_twice(rank: int, num_ranks: int, cases: list[Case]) -> list[list[list[torch.Tensor]]]:
    return [
        [Mine(case, num_ranks, deterministic=True).results(**options) for options in ({}, {}, {"fetch": "all"})]
        for case in cases
    ]


def test_results_repeat_bit_by_bit_and_are_as_exact_as_with_all_keys(ranks) -> None:
    cases = [
        Case("keys", 96, share=0.3, num_lists=1, dtype=torch.bfloat16),
        Case("latent", 96, share=0.3, num_lists=1, dtype=torch.bfloat16),
        Case("csr", 320, 16, 64, True, share=0.5, dtype=torch.bfloat16),
    ]
    found = ranks(4, run_twice, cases)
    for at, case in enumerate(cases):
        first, second, gathered = found[0][at]
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), case
        for name, x, y, exact in zip(case.names, first, gathered, whole(case), strict=True):
            error, of_all = ((z.double() - exact).norm() for z in (x, y))
            assert error <= 1.05 * of_all + 1e-6, (case, name, error, of_all)


def run_differing(rank: int, num_ranks: int) -> list[str]:
    mine, found = Mine(NEAR, num_ranks), []
    for options in ({"capacity": 0.25 if rank else 0.5}, {"fetch": "all" if rank else "selected"}):
        with pytest.raises(RuntimeError) as caught:
            mine.attend(**options)
        found.append(str(caught.value))
    return found


def test_ranks_that_differ_get_one_message(ranks) -> None:
    found = ranks(2, run_differing)
    assert found[0] == found[1]
    assert "capacity" in found[0][0] and "operation" in found[0][1], found[0]


def run_differing_options(rank: int, num_ranks: int) -> dict[str, str]:
    q, k, v = torch.zeros(3, 4, 1, 8).unbind()
    lists, sink, blocks = torch.zeros(4, 1, 1, dtype=torch.int64), torch.zeros(1, 1), torch.zeros(1, 1, dtype=bool)
    of_keys = functools.partial(api.calc_index_sparse_attn, q, k, v, lists)
    of_blocks = functools.partial(api.calc_block_sparse_attn, q, k, v, blocks, q_block_size=4, k_block_size=64)
    latent = functools.partial(api.calc_latent_sparse_attn, q, k, lists, dim_v=8)
    calls = {
        "max_logits": functools.partial(of_keys, return_max_logits=not rank),
        "softmax_scale": functools.partial(latent, softmax_scale=0.5 if rank else 1.0),
        "sink": functools.partial(of_keys, sink=sink if rank else None),
        "sink gradient": functools.partial(of_keys, sink=sink.clone().requires_grad_(not rank)),
        "causal": functools.partial(of_blocks, causal=bool(rank)),
    }
    found = {}
    for name, call in calls.items():
        group = dist.new_group(range(num_ranks))  # an error ends the use of a group
        key = api.magi_attn_varlen_key([0, 8], [0, 8], cp_group_or_mesh=group, layout="contiguous")
        with pytest.raises(RuntimeError) as caught:
            call(key=key)
        found[name] = str(caught.value)
    return found


def test_options_that_differ_are_named_before_anything_is_sent(ranks) -> None:
    """Else the rank that reduces largest logits, or the gradient of a sink, would wait for the other one."""
    found = ranks(2, run_differing_options)
    assert found[0] == found[1]
    for name, text in found[0].items():
        assert "ranks disagree" in text and name.split()[0] in text, found[0]


def run_lists_of_dtypes(rank: int, num_ranks: int) -> list[SparseShape]:
    q, k, v = torch.zeros(3, 4, 1, 8).unbind()
    lists = torch.zeros(4, 1, 1, dtype=torch.int32 if rank else torch.int64)
    key = api.magi_attn_varlen_key([0, 8], [0, 8], cp_group_or_mesh=dist.group.WORLD, layout="contiguous")
    with mock.patch.object(sparse_keys, "ways_us", wraps=sparse_keys.ways_us) as ways:
        api.calc_index_sparse_attn(q, k, v, lists, key)
    return [call.args[0] for call in ways.call_args_list]


def test_ranks_whose_lists_have_different_dtypes_choose_alike(ranks) -> None:
    """Else one would send all keys, and the other wait for requests."""
    first, second = ranks(2, run_lists_of_dtypes)
    assert first == second and len(first) == 1


def run_wrong_on_one_rank(rank: int, num_ranks: int) -> list[str]:
    q, k, lists = torch.zeros(4, 1, 8), torch.zeros(4, 1, 8), torch.zeros(4, 1, 1, dtype=torch.int64)
    found = []
    for wrong in ({"dim_v": 9, "softmax_scale": 1.0}, {"dim_v": 8, "softmax_scale": None}):
        group = dist.new_group(range(num_ranks))
        key = api.magi_attn_varlen_key([0, 8], [0, 8], cp_group_or_mesh=group, layout="contiguous")
        options = {"dim_v": 8, "softmax_scale": 1.0} if rank else wrong
        with (
            mock.patch.object(sparse, "_keys", side_effect=AssertionError("keys were sent")),
            pytest.raises((ValueError, RuntimeError)) as caught,
        ):
            api.calc_latent_sparse_attn(q, k, lists, key=key, **options)
        found.append(str(caught.value))
    return found


def test_arguments_of_latent_calls_are_checked_before_keys_are_sent(ranks) -> None:
    own = [
        "dim_v: expected at most the head_dim of kv, 8, got 9",
        "softmax_scale: expected a number, that of the heads",
    ]
    first, second = ranks(2, run_wrong_on_one_rank)
    for expected, here, there in zip(own, first, second, strict=True):
        assert here.startswith(expected) and expected in there


def run_twice_differentiated(rank: int, num_ranks: int) -> None:
    for case in (NEAR, replace(NEAR, form="keys", q_block=1)):
        for fetch in ("all", "selected"):
            mine = Mine(case, num_ranks)
            weight = torch.ones((), dtype=torch.float64, requires_grad=True)
            q, k, v = mine.qkv
            mine.qkv = q, k * weight, v
            out, _ = mine.attend(fetch=fetch)
            (dk,) = torch.autograd.grad(out.square().sum(), mine.qkv[1], create_graph=True)
            with pytest.raises(RuntimeError, match="cannot differentiate twice"):
                torch.autograd.grad(dk.square().sum() + weight, weight)


def test_second_derivatives_are_refused_however_keys_are_fetched(ranks) -> None:
    """A penalty on gradients would else be left out without a word."""
    ranks(2, run_twice_differentiated)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fetch": "some"}, "fetch: expected one of auto, all, selected, got 'some'"),
        ({"capacity": 0}, "capacity: expected a share of a rank's keys"),
        ({"capacity": 1.5}, "capacity: expected a share of a rank's keys"),
        ({"capacity": True}, "capacity: expected a share of a rank's keys"),
        ({"capacity": math.nan}, "capacity: expected a share of a rank's keys"),
        ({"on_overflow": "wait"}, "on_overflow: expected one of raise, gather, got 'wait'"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Mine(replace(NEAR, total=128), 1).attend(**options)


def test_a_short_block_that_is_not_a_ranks_last_is_refused() -> None:
    bounds, q = [0, 20], torch.zeros(20, HEADS_Q, DIM)
    key = api.magi_attn_varlen_key(bounds, bounds, layout=[[16, 17, 18, 19, *range(16)]])
    blocks = torch.ones(3, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^q_block_size: .* a short one last"):
        api.calc_block_sparse_attn(q, q[:, :2], q[:, :2], blocks, key, q_block_size=8, k_block_size=64)
