"""Masks and options decide which backend computes a call of distributed attention."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.attention import distributed, distributed_attention
from megatron_magi.backends.registry import BACKENDS
from megatron_magi.config import AttendConfig, MagiConfig
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.plan import make_plan
from tests.attention import cases as cs
from tests.backends.slices_backend import Slices


class Picky(Slices):
    """A backend that refuses masks of more than one band and softcap."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def why_not_call(self, options, bands=None, instead="'torch'"):
        if options.softcap:
            return f"softcap: has none; use {instead}"
        if bands is None:
            return None
        self.asked.append(len(bands))
        return f"mask: too many; use {instead}" if len(bands) > 1 else None


@pytest.fixture
def picky(monkeypatch):
    """``auto`` prefers this backend, as on a GPU that it serves."""
    backend = Picky()

    def choose(impl, device, dtype, dims, options=None, masks=()):
        del impl, device, dtype, dims
        refused = options is not None and any(backend.why_not_call(options, m) for m in masks or (None,))
        return BACKENDS["torch"] if refused else backend

    monkeypatch.setattr(distributed, "resolve_impl", lambda impl, q, v, options=None: choose(impl, 0, 0, 0, options))
    monkeypatch.setattr(distributed, "choose_for", choose)
    return backend


@pytest.mark.parametrize(
    ("lengths", "softcap", "name"), [([24], 0.0, "slices"), ([10, 14], 0.0, "torch"), ([24], 2.0, "torch")]
)
def test_a_mask_that_is_refused_goes_to_the_next_backend(picky, monkeypatch, lengths, softcap, name):
    used = []
    for backend in (picky, BACKENDS["torch"]):
        forward = type(backend).forward
        monkeypatch.setattr(
            type(backend), "forward",
            staticmethod(lambda *a, of=forward, who=backend.name, **k: used.append(who) or of(*a, **k)),
        )  # fmt: skip
    mask = cs.documents(lengths)
    plan = make_plan(mask, MagiConfig(), 1)
    q, k, v = (torch.randn(24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out, _ = distributed_attention(q, k, v, plan.for_rank(0), None, softcap=softcap)
    assert used == [name]
    index = torch.from_numpy(plan.dispatch.global_index(0))
    bands = plan.for_rank(0).bands[0]
    expected = slice_attention(q[index], k[index], v[index], bands, softcap=softcap, impl="reference")[0]
    torch.testing.assert_close(out, expected)


def test_a_backend_that_is_named_is_asked_whatever_the_mask_is(picky):
    plan = make_plan(cs.documents([10, 14]), MagiConfig(), 1).for_rank(0)
    config = MagiConfig(attend=AttendConfig(impl="torch"))
    q = torch.randn(24, 4, 8, dtype=torch.float64)
    distributed_attention(q, q[:, :2], q[:, :2], plan, None, config=config)
    assert not picky.asked
