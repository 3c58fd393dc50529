"""Attention whose queries travel by groups of heads, against dense attention, on gloo."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi import api
from megatron_magi.attention import distributed_attention
from megatron_magi.attention.head_groups import from_groups, to_groups
from megatron_magi.attention.prepared_batch import AttnShape, prepare_batch
from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import AttendConfig, CommConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import Plan, given_dispatch, make_plan
from tests import forced
from tests.attention import cases as cs
from tests.attention.test_distributed import gather, run_case
from tests.attention.test_layouts import scattered, two_nodes
from tests.comm.test_collective_checks import be_quick, outcome
from tests.dense_attention import dense_attention


def plans_of(case: cs.Case, num_ranks: int) -> list[Plan]:
    """Over a zigzag and an uneven layout, each group of heads computed in another way."""
    n, config = case.mask.total_seqlen_q, case.config
    config = replace(
        config, overlap=replace(config.overlap, cost=CostModel(num_heads_q=case.num_heads_q, num_heads_kv=2))
    )
    made = []
    for held in (given_dispatch("zigzag", n, num_ranks), given_dispatch(scattered(n, num_ranks, 1), n, num_ranks)):
        host = np.random.default_rng(case.seed).integers(0, num_ranks, 2 * held.padded_seqlen // 4 + 1).repeat(4)
        host = host[: 2 * held.padded_seqlen]
        compute = given_dispatch([np.flatnonzero(host == r) for r in range(num_ranks)], len(host), num_ranks)
        made.append(make_plan(case.mask, config, num_ranks, held, compute, head_groups=2))
        assert made[-1].stats().head_groups == 2
        assert num_ranks == 1 or any(made[-1].stats().guest_rows)
    return made


def cases() -> list[cs.Case]:
    """Both layouts of sinks, rows that see nothing, documents, values of another width, fp32."""
    shapes = {"num_heads_q": 4, "num_heads_kv": 2}
    todo = [cs.Case(cs.random_mask(37, 4, seed), seed=seed, **shapes) for seed in range(3)]
    todo += [
        cs.Case(cs.documents([20, 31, 13]), num_sinks=1, **shapes),
        cs.Case(cs.documents([64]), num_sinks=2, sink_layout="ssh", softcap=1.5, **shapes),
        cs.Case(cs.window(50, 7), head_dim_v=5, softmax_scale=0.8, **shapes),
        cs.Case(cs.documents([20, 31]), MagiConfig(overlap=OverlapConfig(degree=2)), **shapes),
    ]
    return [replace(case, config=replace(case.config, attend=AttendConfig(impl=forced.impl("torch")))) for case in todo]


def run_groups(rank: int, num_ranks: int, todo: list[cs.Case]) -> list[list[dict]]:
    return [[run_case(case, rank, plan) for plan in plans_of(case, num_ranks)] for case in todo]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_groups_of_heads_computed_anywhere_equal_dense_attention(ranks, num_ranks: int) -> None:
    todo = cases()
    todo += two_nodes(todo) if num_ranks == 4 else []
    results = ranks(num_ranks, run_groups, todo)
    for number, case in enumerate(todo):
        expected = cs.dense_attention(case, cs.inputs(case))
        del expected["max_logits"]
        for plan in range(2):
            found = gather(case, [result[number][plan] for result in results])
            for name, value in expected.items():
                where = f"case {number}, plan {plan}, {name}"
                torch.testing.assert_close(
                    found[name].double(), value, rtol=cs.EXACT, atol=cs.EXACT, msg=lambda m, w=where: f"{w}: {m}"
                )


def test_the_order_of_groups_is_undone() -> None:
    x = torch.arange(5 * 6 * 3).view(5, 6, 3)
    assert torch.equal(from_groups(to_groups(x, 3), 3), x)
    assert torch.equal(to_groups(x, 3)[5:10], x[:, 2:4])


def run_key(rank: int, num_ranks: int) -> None:
    """A key by the predicted step: its groups of heads travel, and the same from a prepared batch."""
    total, heads, dim = 1024, (8, 4, 4), 8
    slow = replace(DEFAULT, forward_tflops=3e-4, backward_tflops=3e-4, gbytes_per_s=0.2)
    cost = CostModel(num_heads_q=64, num_heads_kv=4)
    config = MagiConfig(
        DispatchConfig(rates=slow, flatten_head_groups=True),
        OverlapConfig(cost=cost),
        AttendConfig(impl=forced.impl("torch")),
    )
    key = api.magi_attn_flex_key(
        [[0, total]], [[0, total]], "causal", total, total, cp_group_or_mesh=dist.group.WORLD, layout="contiguous",
        dist_attn_config=config,
    )  # fmt: skip
    plan = api.functions._RUNTIMES.get(key).plan
    assert plan.head_groups == 4 and any(plan.stats().guest_rows)
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn(total, n, dim, generator=draw, dtype=forced.DTYPE).requires_grad_() for n in heads]
    weight = torch.randn(total, heads[0], dim, generator=draw, dtype=forced.DTYPE)
    expected, lse = dense_attention(*x, dense_mask(builders.causal(total)))
    grads = torch.autograd.grad(expected, x, weight)
    rows = api.get_position_ids(key)
    prepared = make_plan(plan.mask, plan.config, num_ranks, plan.dispatch, "auto").for_rank(rank)
    prepare_batch({0: prepared}, AttnShape(*heads[:2], dim, dim, forced.DTYPE), plan.config).to("cpu")
    assert prepared.runtime.moves and prepared.plan_hash == plan.plan_hash

    def attend(q, k, v):
        return distributed_attention(q, k, v, prepared, dist.group.WORLD, config=plan.config)

    for call in (lambda *qkv: api.calc_attn(*qkv, key), attend):
        local = [t.detach()[rows].requires_grad_() for t in x]
        out, meta = call(*local)
        out.backward(weight[rows])
        torch.testing.assert_close(out, expected[rows])
        torch.testing.assert_close(meta.lse.double(), lse.view(total, -1)[rows], check_dtype=False)
        for t, grad in zip(local, grads, strict=True):
            torch.testing.assert_close(t.grad, grad[rows])


def test_groups_travel_where_it_is_faster(ranks) -> None:
    ranks(4, run_key)


def run_refused(rank: int, num_ranks: int) -> list[str]:
    be_quick()
    case = cs.Case(cs.documents([64]), MagiConfig(attend=AttendConfig(impl=forced.impl("torch"))))
    plan = plans_of(case, num_ranks)[0].for_rank(rank)

    def call(heads=(4, 2, 2), config=case.config, **options) -> None:
        q, k, v = (torch.ones(plan.num_rows // 2, n, 8) for n in heads)
        distributed_attention(q, k, v, plan, dist.group.WORLD, config=config, **options)

    summed = replace(case.config, comm=CommConfig(dsink_all_reduce="sum"))
    refused = ({"heads": (3, 1, 1)}, {"return_max_logits": True}, {"config": summed})
    found = [outcome(call, **options)[0] for options in refused]
    call()
    return [*found, outcome(call, **({"heads": (3, 1, 1)} if rank == 1 else {}))[0]]


def test_what_groups_cannot_do_is_refused_by_name_on_all_ranks(ranks) -> None:
    for rank, (heads, logits, sink, alone) in enumerate(ranks(2, run_refused)):
        assert heads.startswith("ValueError: q: 3 heads, but the plan is for 2 groups"), heads
        assert logits.startswith("ValueError: return_max_logits: not with dispatch.flatten_head_groups"), logits
        assert sink.startswith("ValueError: dsink_all_reduce: 'sum' does not go with"), sink
        assert "q: 3 heads" in alone and (rank == 1 or "rank 1 of the group" in alone), alone


def run_without_groups(rank: int, num_ranks: int) -> list[str]:
    be_quick()
    config = MagiConfig(DispatchConfig(flatten_head_groups=True), attend=AttendConfig(impl=forced.impl("torch")))
    plan = make_plan(cs.documents([64]), config, num_ranks).for_rank(rank)
    x = torch.ones(plan.num_rows, 2, 8)

    def call(**options) -> None:
        distributed_attention(x, x, x, plan, dist.group.WORLD if num_ranks > 1 else None, config=config, **options)

    call()
    found = outcome(call, return_max_logits=True)[0]
    call()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_largest_logits_are_refused_with_groups_of_heads_whether_a_mask_has_them_or_not(ranks, num_ranks) -> None:
    for found in ranks(num_ranks, run_without_groups):
        assert found.startswith("ValueError: return_max_logits: not with" if num_ranks > 1 else "no error"), found


def test_a_sum_of_the_sinks_gradient_is_refused_where_the_configuration_is_made() -> None:
    with pytest.raises(ValueError, match=r"^dsink_all_reduce: 'sum' does not go with dispatch.flatten_head_groups"):
        MagiConfig(DispatchConfig(flatten_head_groups=True), comm=CommConfig(dsink_all_reduce="sum"))


def test_tables_of_prepared_batches_are_for_the_heads_of_a_group(monkeypatch) -> None:
    case = cs.Case(cs.documents([64]))
    plan, seen = plans_of(case, 2)[0].for_rank(0), []
    shape = AttnShape(4, 2, 128, 128, torch.bfloat16, num_sms=132)
    tables = shape.table_backend.tables
    make = tables.make

    def noted(masks, use):
        seen.append((use.num_heads, masks.num_rows))
        return make(masks, use)

    monkeypatch.setattr(tables, "make", noted)
    prepare_batch({0: plan}, shape, MagiConfig())
    assert seen == [((2, 1), plan.num_queries)] and plan.num_rows == 2 * 32
    with pytest.raises(ValueError, match=r"^shape: 4:1 heads, and plans for 2 groups of them"):
        prepare_batch({0: plan}, shape._replace(num_heads_kv=1), MagiConfig())
