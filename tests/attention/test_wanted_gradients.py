"""Which gradients a call gives."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.attention import distributed_attention
from megatron_magi.config import MagiConfig
from megatron_magi.plan import make_plan
from tests import forced
from tests.attention import cases as cs

pytestmark = forced.on_device_of_backend


def test_a_plan_first_used_without_gradients_gives_them_later() -> None:
    plan = make_plan(cs.documents([8])).for_rank(0)
    x = torch.randn(8, 2, 8, requires_grad=True)
    config = MagiConfig()
    for enabled in (False, True, False):
        with torch.set_grad_enabled(enabled):
            assert distributed_attention(x, x, x, plan, None, config=config)[0].requires_grad == enabled


@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_a_gradient_that_is_wanted_alone_is_that_of_all(name) -> None:
    plan = make_plan(cs.documents([8])).for_rank(0)
    tensors = {"q": torch.randn(8, 2, 8), "k": torch.randn(8, 2, 8), "v": torch.randn(8, 2, 8)}
    tensors["sink"] = torch.randn(1, 2)

    def gradient(*wanted: str) -> torch.Tensor:
        x = {key: t.clone().requires_grad_(key in wanted) for key, t in tensors.items()}
        distributed_attention(**x, rank_plan=plan, group=None)[0].square().sum().backward()
        return x[name].grad

    assert torch.equal(gradient(name), gradient(*tensors))
