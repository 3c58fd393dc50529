"""Attention over tokens whose owners are given, against dense attention, on gloo and on GPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_magi.attention import distributed_attention
from megatron_magi.attention.prepared_batch import AttnShape, prepare_batch
from megatron_magi.config import AttendConfig, MagiConfig, OverlapConfig
from megatron_magi.plan import Dispatch, given_dispatch, make_plan
from megatron_magi.runtime.upload import current_device
from tests import forced
from tests.attention import cases as cs
from tests.attention.test_distributed import assert_case_within_budget, dense_of, gather, run_case

SHAPES = ((4, 4), (4, 2), (4, 1), (1, 1))
"""Query and key heads."""


def scattered(total_seqlen: int, num_ranks: int, seed: int) -> list[list[int]]:
    """Runs of a few tokens in any order on ranks of uneven lengths, with three rows of padding; with four ranks and
    more one holds nothing.
    """
    rng = np.random.default_rng(seed)
    bounds = np.unique([0, total_seqlen, *rng.integers(0, total_seqlen + 1, 3 * num_ranks)])
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    runs = [range(*pair) for pair in zip(bounds.tolist(), bounds[1:].tolist(), strict=False)]
    runs = [runs[at] for at in rng.permutation(len(runs))] + [
        range(total_seqlen + i, total_seqlen + i + 1) for i in range(3)
    ]
    for run in runs:
        held[rng.integers(0, num_ranks - (num_ranks >= 4))] += run
    return held


def layouts_of(case: cs.Case, num_ranks: int) -> list[Dispatch]:
    n = case.mask.total_seqlen_q
    names = [given_dispatch(name, n, num_ranks) for name in ("contiguous", "zigzag")]
    if n % (4 * num_ranks) == 0:
        names.append(given_dispatch("zigzag_documents", n, num_ranks, cu_seqlens=[0, n // 2, n]))
    return [*names, given_dispatch(scattered(n, num_ranks, case.seed), n, num_ranks)]


def run_layouts(rank: int, num_ranks: int, todo: list[cs.Case], device: str = "cpu") -> list[list[dict]]:
    device = str(current_device()) if device == "cuda" else device
    return [
        [run_case(c, rank, make_plan(c.mask, c.config, num_ranks, d), device) for d in layouts_of(c, num_ranks)]
        for c in todo
    ]


def check(todo: list[cs.Case], results: list[list[list[dict]]]) -> None:
    """Compares with dense attention what each rank found for each case, in each of its layouts or plans."""
    for i, case in enumerate(todo):
        is_exact = case.dtype == forced.DTYPE
        dense = (cs.dense_attention(case, cs.inputs(case)),) if is_exact else dense_of(case)
        for j in range(len(results[0][i])):
            found, where = gather(case, [r[i][j] for r in results]), f"case {i} plan {j}"
            if is_exact:
                for name, value in dense[0].items():
                    torch.testing.assert_close(
                        found[name].double(),
                        value,
                        rtol=cs.EXACT,
                        atol=cs.EXACT,
                        msg=lambda m, w=where, n=name: f"{w} {n}: {m}",
                    )
            else:
                assert_case_within_budget(where, case, found, dense)


@st.composite
def drawn_cases(draw) -> cs.Case:
    heads_q, heads_kv = draw(st.sampled_from(SHAPES))
    seed = draw(st.integers(0, 1 << 16))
    attend = AttendConfig(impl=draw(st.sampled_from(forced.impls("torch", "reference"))))
    return cs.Case(
        cs.random_mask(draw(st.sampled_from([24, 37, 64])), draw(st.integers(0, 5)), seed),
        MagiConfig(overlap=OverlapConfig(degree=draw(st.sampled_from([None, 0, 1, 2]))), attend=attend),
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        num_sinks=draw(st.integers(0, 1)),
        dtype=draw(st.sampled_from([forced.DTYPE, torch.bfloat16])),
        seed=seed,
    )


def check_drawn(start: Callable[[list[cs.Case]], list[list[list[dict]]]]) -> None:
    """`check` of drawn cases; ``start``: computes them on all ranks."""

    # Hypothesis draws lists of cases: ranks are started once a list. The first list is the simplest one.
    @settings(
        max_examples=2,
        phases=[Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(todo=st.lists(drawn_cases(), min_size=6, max_size=6))
    def drawn(todo: list[cs.Case]) -> None:
        check(todo, start(todo))

    drawn()


def check_on_gpus(todo: list[cs.Case], ranks: Callable, run: Callable) -> None:
    """`check` of what ``run`` computes on two ranks, a GPU each."""
    check(todo, ranks(2, functools.partial(run, device="cuda"), todo, backend="nccl", timeout_s=240.0))


def two_nodes(todo: list[cs.Case]) -> list[cs.Case]:
    """Every second case, on nodes of two ranks."""
    comm = dataclasses.replace(todo[0].config.comm, ranks_per_node=2)
    return [dataclasses.replace(c, config=dataclasses.replace(c.config, comm=comm)) for c in todo[::2]]


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_any_layout_equals_dense_attention(ranks, num_ranks: int) -> None:
    check_drawn(lambda todo: ranks(num_ranks, run_layouts, todo))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_option_works_over_given_layouts(ranks, num_ranks: int) -> None:
    todo = cs.variants()
    todo = two_nodes(todo) if num_ranks == 4 else todo
    check(todo, ranks(num_ranks, run_layouts, todo))


def run_prepared(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a plan, and of the same from a prepared batch."""
    case = cs.Case(cs.documents([30, 34]), MagiConfig(attend=AttendConfig(impl=forced.impl("torch"))))
    shape = AttnShape(case.num_heads_q, case.num_heads_kv, case.head_dim, case.head_dim_v, case.dtype)
    x, outs = cs.inputs(case), []
    for is_prepared in (False, True):
        dispatch = given_dispatch(scattered(64, num_ranks, 3), 64, num_ranks)
        plan = make_plan(case.mask, case.config, num_ranks, dispatch).for_rank(rank)
        index = dispatch.global_index(rank)
        if is_prepared:
            arrays = prepare_batch({"a": plan}, shape, case.config, {"positions": index}).to("cpu")
            assert arrays["positions"].tolist() == index.tolist()
        rows = torch.from_numpy(np.minimum(index, 63))
        qkv = (x[name][rows] for name in "qkv")
        outs.append(distributed_attention(*qkv, plan, dist.group.WORLD, config=case.config)[0][: plan.num_tokens])
    return outs[0], outs[1]


def test_prepared_batches_take_given_layouts(ranks) -> None:
    for plain, prepared in ranks(3, run_prepared):
        assert torch.equal(plain, prepared)


@pytest.mark.gpu
@pytest.mark.ranks(2)
@cs.by_kernels
def test_gpus_take_given_layouts(ranks, variants) -> None:
    check_on_gpus(variants()[::4], ranks, run_layouts)
