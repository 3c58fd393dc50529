"""Training without attention."""

from __future__ import annotations

import pytest
import torch

from benchmarks._lib.no_attention import no_attention


def test_steps_without_attention_call_none_and_give_every_input_a_gradient() -> None:
    core_attention = pytest.importorskip("megatron_magi.mcore.core_attention", exc_type=ImportError)
    stock = core_attention.distributed_attention
    q, k, v = (torch.ones(5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sink = torch.zeros(1, 4, requires_grad=True)
    with no_attention():
        out, _ = core_attention.distributed_attention(q, k, v, "plan", "group", config=None, sink=sink)
    assert core_attention.distributed_attention is stock
    out.backward(torch.full_like(q, 3.0))
    assert [x.grad.unique().tolist() for x in (q, k, v, sink)] == [[3.0], [0.0], [0.0], [0.0]]
