import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jvp, vhp
from torch.utils.checkpoint import checkpoint

from megatron_magi import block_sparse_attention, index_sparse_attention, slice_attention
from megatron_magi.api import calc_attn, dispatch, flex_flash_attn_func, magi_attn_varlen_key, roll, undispatch
from megatron_magi.extensions import sdpa_func_with_sink
from megatron_magi.mask import builders
from tests import forced

MASK = builders.causal(6)


def by_mask(q, k, v):
    return slice_attention(q, k, v, MASK)[0]


def by_key(q, k, v):
    return calc_attn(q, k, v, magi_attn_varlen_key([0, 6], [0, 6], causal=True))[0]


def by_torch(q, k, v):
    return sdpa_func_with_sink(*(x.transpose(0, 1)[None] for x in (q, k, v)), sink=torch.zeros(1, 2))


def by_blocks(q, k, v):
    return block_sparse_attention(q, k, v, torch.zeros(1, 1, 1, dtype=torch.int32), q_block_size=64, k_block_size=64)[0]


def by_indices(q, k, v):
    return index_sparse_attention(q, k, v, torch.tensor([0, 1]).expand(6, 1, 2))[0]


def by_ranges(q, k, v):
    return flex_flash_attn_func(q, k, v, [[0, 6]], [[0, 6]], sink=torch.zeros(1, 2))[0]


ALL = [by_mask, by_key, by_torch, by_blocks, by_indices, by_ranges]


def random_qkv():
    return [torch.randn(6, 2, 8, requires_grad=True) for _ in "qkv"]


@pytest.mark.parametrize("attend", ALL)
@pytest.mark.parametrize("weight", [1.0, torch.ones((), requires_grad=True)], ids=["constant", "differentiable"])
def test_a_second_derivative_is_an_error_whatever_the_first_is_multiplied_by(attend, weight):
    q, k, v = random_qkv()
    (dq,) = torch.autograd.grad((attend(q, k, v) * weight).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (dq.square().sum() + q.sum()).backward()


def twice(loss, x):
    (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(dx.sum(), x, materialize_grads=True)


def by_batches(loss, x):
    (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(dx.sum()[None], x, torch.ones(3, 1), is_grads_batched=True, allow_unused=True)


WAYS = {
    "hessian": hessian,
    "hessian of a batch": lambda loss, x: hessian(loss, x, vectorize=True),
    "hvp": lambda loss, x: hvp(loss, x, torch.ones_like(x)),
    "vhp": lambda loss, x: vhp(loss, x, torch.ones_like(x)),
    "jvp": lambda loss, x: jvp(loss, x, torch.ones_like(x)),  # a derivative by the gradient of the output
    "grad of grad": twice,
    "batch of grads": by_batches,
}


@pytest.mark.parametrize("attend", ALL)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 2])
def test_a_second_derivative_is_an_error_in_each_way_to_ask_for_it(attend, way, place):
    qkv = random_qkv()

    def loss(x):
        return attend(*qkv[:place], x, *qkv[place + 1 :]).square().sum()

    with pytest.raises(RuntimeError, match="differentiate twice"):
        WAYS[way](loss, qkv[place])


@pytest.mark.parametrize("attend", ALL)
def test_a_derivative_by_what_follows_attention_is_an_error_too(attend):
    q, k, v = random_qkv()
    weight = torch.randn(8, requires_grad=True)
    (dq,) = torch.autograd.grad((attend(q, k, v) * weight).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(dq.sum(), weight, materialize_grads=True)


def test_so_is_a_derivative_by_the_sink():
    (q, k, v), sink = random_qkv(), torch.zeros(1, 2, requires_grad=True)
    (dq,) = torch.autograd.grad(slice_attention(q, k, v, builders.causal(6), sink=sink)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(dq.sum(), sink, materialize_grads=True)


def test_of_a_checkpoint_too():
    q, k, v = random_qkv()
    out = checkpoint(lambda q: by_mask(q * 2, k, v), q, use_reentrant=False)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(dq.sum(), q, materialize_grads=True)


@pytest.mark.parametrize("attend", ALL)
def test_a_graph_of_gradients_changes_neither_these_nor_what_does_not_pass_through_attention(attend):
    q, k, v = random_qkv()
    loss = attend(q, k, v).square().sum() + k.pow(3).sum()
    plain = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    graph = torch.autograd.grad(loss, (q, k, v), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True))
    assert not any(grad.requires_grad for grad in plain)
    weight = torch.ones((), requires_grad=True)
    assert torch.autograd.grad((graph[0].sum() * 0 + weight * 3), weight)[0] == 3


@pytest.mark.parametrize("attend", ALL)
def test_gradients_of_a_batch_are_an_error_or_those_of_each(attend):
    q, k, v = random_qkv()
    out, weights = attend(q, k, v), torch.randn(3, *attend(q, k, v).shape)
    try:
        (batch,) = torch.autograd.grad(out, q, weights, retain_graph=True, is_grads_batched=True)
    except RuntimeError:
        batch = None
    with pytest.raises(RuntimeError):
        torch.vmap(lambda w: torch.autograd.grad(out, q, w, retain_graph=True)[0])(weights)
    if batch is not None:
        each = [torch.autograd.grad(out, q, w, retain_graph=True)[0] for w in weights]
        torch.testing.assert_close(batch, torch.stack(each), rtol=0, atol=0)


@pytest.mark.parametrize("attend", ALL)
def test_an_output_may_be_changed_in_place_and_its_backward_says_that_it_was(attend):
    q, k, v = random_qkv()
    out = attend(q, k, v)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    bias = torch.ones(8, requires_grad=True)
    (grad,) = torch.autograd.grad(attend(q.detach(), k.detach(), v.detach()).add_(bias).sum(), bias)
    assert grad.tolist() == [12] * 8


def of_ranks(rank, num_ranks):
    """Whether `calc_attn` on several ranks, between a dispatch and an undispatch, and after a roll, refuses."""
    key = magi_attn_varlen_key([0, 64], [0, 64], causal=True, chunk_size=8, cp_group_or_mesh=dist.group.WORLD)
    draw = forced.generator(0)
    x = torch.randn(64, 2, 8, generator=draw, dtype=torch.float64)

    def loss(x):
        rows = roll(dispatch(x, key), 1, 0, key)
        return undispatch(calc_attn(rows, rows, rows, key)[0], key).square().sum()

    found = []
    for way in ("hvp", "grad of grad"):
        try:
            WAYS[way](loss, x.clone().requires_grad_())
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_second_derivative_is_an_error_on_several_ranks(ranks):
    for found in ranks(2, of_ranks):
        assert len(found) == 2 and all("differentiate twice" in text for text in found)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("attend", [by_mask, by_blocks])
def test_compiled_functions_have_no_second_derivative_either(attend):
    _, k, v = (t.detach() for t in random_qkv())
    compiled = torch.compile(lambda q: attend(q, k, v), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        twice(lambda q: compiled(q).square().sum(), torch.randn(6, 2, 8, requires_grad=True))


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
