import pytest
import torch
from torch.autograd import forward_ad

from megatron_magi import block_sparse_attention, slice_attention
from megatron_magi.api import calc_attn, magi_attn_varlen_key, roll, undispatch
from megatron_magi.extensions import sdpa_func_with_sink
from megatron_magi.mask import builders


def by_mask(q, k, v):
    return slice_attention(q, k, v, builders.causal(6))[0]


def by_key(q, k, v):
    return calc_attn(q, k, v, magi_attn_varlen_key([0, 6], [0, 6], causal=True))[0]


def by_torch(q, k, v):
    return sdpa_func_with_sink(*(x.transpose(0, 1)[None] for x in (q, k, v)), sink=torch.zeros(1, 2))


@pytest.mark.parametrize("attend", [by_mask, by_key, by_torch])
@pytest.mark.parametrize("weight", [1.0, torch.ones((), requires_grad=True)], ids=["constant", "differentiable"])
def test_a_second_derivative_is_an_error_whatever_the_first_is_multiplied_by(attend, weight):
    q, k, v = (torch.randn(6, 2, 8, requires_grad=True) for _ in "qkv")
    (dq,) = torch.autograd.grad((attend(q, k, v) * weight).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (dq.square().sum() + q.sum()).backward()


def by_blocks(q, k, v):
    return block_sparse_attention(q, k, v, torch.zeros(1, 1, 1, dtype=torch.int32), q_block_size=64, k_block_size=64)[0]


@pytest.fixture
def no_jit(monkeypatch):
    """Else torch compiles derivatives of its own, which fails where tests of Megatron have wrapped its functions."""
    monkeypatch.setenv("PYTORCH_JIT", "0")


@pytest.mark.usefixtures("no_jit")
@pytest.mark.parametrize("attend", [by_mask, by_key, by_blocks])
@pytest.mark.parametrize("place", [0, 2])
def test_a_tensor_with_a_tangent_is_refused(attend, place):
    qkv = [torch.randn(6, 2, 8) for _ in "qkv"]
    with forward_ad.dual_level():
        attend(*qkv)
        qkv[place] = forward_ad.make_dual(qkv[place], torch.ones(6, 2, 8))
        with pytest.raises(RuntimeError, match="forward-mode"):
            attend(*qkv)


def by_undispatch(q, _k, _v):
    return undispatch(q, magi_attn_varlen_key([0, 6], [0, 6], causal=True))


def by_roll(q, _k, _v):
    return roll(q, 1, 0, magi_attn_varlen_key([0, 6], [0, 6], causal=True))


@pytest.mark.usefixtures("no_jit")
@pytest.mark.parametrize("call", [by_mask, by_key, by_blocks, by_torch, by_undispatch, by_roll])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_a_transform_of_torch_func_is_refused(call, transform):
    q, k, v = (torch.randn(6, 2, 8) for _ in "qkv")
    transformed = {
        "vmap": lambda: torch.vmap(call)(q[None], k[None], v[None]),
        "grad": lambda: torch.func.grad(lambda q: call(q, k, v).sum())(q),
        "jvp": lambda: torch.func.jvp(lambda q: call(q, k, v), (q,), (q,)),
    }[transform]
    with pytest.raises(RuntimeError, match=r"cannot be transformed by torch\.vmap or torch\.func"):
        transformed()
