"""Results that are changed in place: each way that attention takes allows it, and no gradient is silently wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import distributed_attention
from megatron_magi.config import MagiConfig, OverlapConfig
from megatron_magi.plan import Plan, given_dispatch, make_plan
from tests.attention import cases as cs
from tests.attention.test_head_groups import plans_of
from tests.attention.test_travel import on_one


def plans(num_ranks: int) -> dict[str, Plan]:
    mask = cs.documents([30, 34])
    found = {}
    for degree in (0, 1, 2):
        config = MagiConfig(overlap=OverlapConfig(degree=degree))
        found[f"degree {degree}"] = make_plan(mask, config, num_ranks)
    home, zigzag = (given_dispatch(name, 64, num_ranks) for name in ("contiguous", "zigzag"))
    for name, hosts in (("some travel", zigzag), ("all travel", on_one(64, num_ranks, 0))):
        found[name] = make_plan(mask, MagiConfig(), num_ranks, home, hosts)
    found["groups of heads"] = plans_of(cs.Case(mask), num_ranks)[0]
    return found


def run_changed(rank: int, num_ranks: int) -> dict[str, str]:
    """What each way makes of an output that is doubled before its backward."""
    found = {}
    for name, whole in plans(num_ranks).items():
        plan, num_rows = whole.for_rank(rank), len(whole.dispatch.global_index(rank))
        leaves = [torch.ones(num_rows, heads, 8, requires_grad=True) for heads in (4, 2, 2)]

        def attend(leaves=leaves, plan=plan):
            return distributed_attention(*leaves, plan, dist.group.WORLD)

        (out, meta), (other, _) = attend(), attend()
        exact = torch.autograd.grad(out.sum(), leaves)
        out.fill_(torch.nan)
        meta.lse.fill_(torch.nan)
        other.mul_(2)
        try:
            doubled = torch.autograd.grad(other.sum(), leaves)
            assert all(torch.equal(a, 2 * b) for a, b in zip(doubled, exact, strict=True))
            found[name] = "exact"
        except RuntimeError as error:
            found[name] = str(error)
        bias = torch.ones(8, requires_grad=True)
        frozen = [leaf.detach() for leaf in leaves]
        out, meta = distributed_attention(*frozen, plan, dist.group.WORLD)
        out.add_(bias).sum().backward()
        assert bias.grad.tolist() == [num_rows * 4] * 8
        meta.lse.mul_(bias.sum())
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_output_that_is_changed_in_place_is_an_error_of_its_backward_or_has_its_gradient(ranks, num_ranks) -> None:
    for found in ranks(num_ranks, run_changed):
        assert found.pop("groups of heads") == "exact"
        assert all("modified by an inplace operation" in text for text in found.values()), found
