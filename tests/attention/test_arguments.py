"""What `distributed_attention` and `prepare_batch` refuse."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import AttnShape, distributed_attention, prepare_batch
from megatron_magi.attention.call_signature import check_inputs
from megatron_magi.config import CommConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan
from tests import forced
from tests.attention import cases as cs

pytestmark = forced.on_device_of_backend


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": (7, 4, 8)}, "q"),
        ({"k": (8, 8)}, "k"),
        ({"v": (9, 2, 8)}, "v"),
    ],
)
def test_inputs_that_do_not_fit_the_plan_are_named(change, name) -> None:
    shapes = {"q": (8, 4, 8), "k": (8, 2, 8), "v": (8, 2, 8)} | change
    plan = make_plan(cs.documents([8]), cp_size=1).for_rank(0)
    with pytest.raises(ValueError, match=rf"^{name}:"):
        distributed_attention(*(torch.zeros(shapes[n]) for n in "qkv"), plan, None)


def test_a_plan_of_all_ranks_is_refused() -> None:
    x = torch.zeros(8, 2, 8)
    with pytest.raises(ValueError, match=r"^rank_plan: expected a RankPlan, .* got Plan"):
        distributed_attention(x, x, x, make_plan(cs.documents([8]), cp_size=1), None)


@pytest.mark.parametrize("config", ["fast", 3, MagiConfig])
def test_a_configuration_of_another_type_is_refused(config) -> None:
    x, plan = torch.zeros(8, 2, 8), make_plan(cs.documents([8]), cp_size=1).for_rank(0)
    with pytest.raises(ValueError, match=r"^config: expected a MagiConfig or None, got (str|int|type)"):
        distributed_attention(x, x, x, plan, None, config=config)


@pytest.mark.parametrize("return_max_logits", [False, True])
def test_a_loss_cannot_use_by_products_whose_gradient_would_be_lost(return_max_logits) -> None:
    plan = make_plan(cs.documents([8]), cp_size=1).for_rank(0)
    x = torch.randn(8, 2, 8, requires_grad=True)
    out, meta = distributed_attention(x, x, x, plan, None, return_max_logits=return_max_logits)
    assert out.requires_grad and not meta.lse.requires_grad
    assert meta.max_logits is None or not meta.max_logits.requires_grad


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3)])
def test_a_plan_of_another_rank_or_number_of_ranks_is_refused(rank: int, size: int) -> None:
    plan, x = make_plan(cs.documents([8]), cp_size=2).for_rank(0), torch.zeros(4, 2, 8)
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    with pytest.raises(
        ValueError, match=rf"^group: this process is rank {rank} of {size}, the plan is for rank 0 of 2"
    ):
        check_inputs(x, x, x, plan, group)


def test_a_plan_for_several_ranks_needs_a_group() -> None:
    plan = make_plan(cs.documents([8]), cp_size=2).for_rank(0)
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"^group:"):
        distributed_attention(x, x, x, plan, None)


def ask_for_native_collectives(rank: int, num_ranks: int) -> None:
    config = MagiConfig(comm=CommConfig(impl="native"))
    plan, x = make_plan(builders.causal(8), config, num_ranks).for_rank(rank), torch.zeros(4, 2, 8)
    for _ in range(2):  # the second is not a call that is known
        with pytest.raises(ValueError, match=r"^comm.impl \(MAGI_ATTENTION_NATIVE_GRPCOLL\): 'native' is for GPUs"):
            distributed_attention(x, x, x, plan, dist.group.WORLD, config=config)


def test_collectives_that_are_not_possible_are_named_as_users_ask_for_them(ranks) -> None:
    ranks(2, ask_for_native_collectives)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"plans": None}, "plans: expected a plan for each name, got NoneType"),
        ({"plans": {"mask": 3}}, r"plans\['mask'\]: expected RankPlan, got int"),
        ({"plans": {"mask": make_plan(cs.documents([8]))}}, r"plans\['mask'\]: expected RankPlan, got Plan"),
        ({"shape": (4, 2)}, "shape: expected AttnShape, got tuple"),
        ({"config": None}, "config: expected MagiConfig, got NoneType"),
        ({"arrays": [1]}, "arrays: expected an array for each name, got list"),
        ({"arrays": {"position_ids": torch.zeros(3)}}, r"arrays\['position_ids'\]: expected a numpy array of numbers"),
        ({"arrays": {"names": np.array(["a"])}}, r"arrays\['names'\]: .* got <U1"),
    ],
)
def test_what_cannot_be_prepared_is_named(changed, message):
    plan = make_plan(cs.documents([8]), cp_size=1).for_rank(0)
    given = {"plans": {"mask": plan}, "shape": AttnShape(4, 2, 8, 8, torch.bfloat16), "config": MagiConfig(), **changed}
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare_batch(**given)


def test_the_device_of_a_shape_may_be_named_by_text(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        "megatron_magi.attention.prepared_batch.table_backend", lambda _impl, device, *_: asked.append(device)
    )
    assert AttnShape(4, 2, 8, 8, torch.bfloat16).kernels_for("cuda").num_sms is None
    assert asked == [torch.device("cuda")]
