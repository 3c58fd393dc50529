"""Whose gradient arrives where: dispatch, undispatch, and both in a row."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_magi import api

# Tokens and options of a key: even shards, padding, padding as it was computed elsewhere, uneven shards, a shard of
# nothing but padding.
CASES = [
    (12, {}),
    (5, {}),
    (23, {"chunk_size": 4, "pad_size": "computed"}),
    (23, {"dist_attn_config": api.DistAttnConfig(api.DispatchConfig(chunk_size=3, uneven_shard=True))}),
    (4, {"chunk_size": 4}),
]
FLAGS = list(itertools.product([False, True], repeat=2))


def make_key(num_ranks, total, options):
    if options.get("pad_size") == "computed":
        options = {**options, "pad_size": api.compute_pad_size(total, num_ranks, options["chunk_size"])}
    group = dist.group.WORLD if num_ranks > 1 else None
    return api.magi_attn_varlen_key([0, total], [0, total], causal=True, cp_group_or_mesh=group, **options)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def owner_of(key, num_ranks, total):
    """The rank that holds each token."""
    mine = torch.full((total,), float(dist.get_rank() if num_ranks > 1 else 0), dtype=torch.float64)
    return api.undispatch(api.dispatch(mine, key), key).long()


def round_trips(rank, num_ranks, total, options):
    """``undispatch(dispatch(x))`` with another gradient on each rank, in all four meanings."""
    key = make_key(num_ranks, total, options)
    owner = owner_of(key, num_ranks, total)
    upstream = torch.stack([random(r, total, 3) for r in range(num_ranks)])
    of_owner = upstream[owner, torch.arange(total)]
    is_mine = (owner == rank)[:, None]
    for dispatch_partial, undispatch_partial in FLAGS:
        # A partial one is summed into its owner; where it is whole the owner takes its own.
        at_owner = upstream.sum(0) if undispatch_partial else of_owner
        expected = at_owner * is_mine if dispatch_partial else at_owner
        x = random(9, total, 3).requires_grad_()
        local = api.dispatch(2 * x, key, pad_value=7.0, is_partial_grad=dispatch_partial)
        out = api.undispatch(local, key, is_partial_grad=undispatch_partial)
        assert torch.equal(out, 2 * x)
        out.backward(upstream[rank])
        where = f"{total} tokens, {options}, {dispatch_partial=}, {undispatch_partial=}"
        assert torch.allclose(x.grad, 2 * expected, rtol=1e-14, atol=1e-14), f"{where}: {x.grad - 2 * expected}"


def all_round_trips(rank, num_ranks):
    for total, options in CASES:
        round_trips(rank, num_ranks, total, options)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_four_meanings_of_a_gradient_there_and_back(ranks, num_ranks):
    ranks(num_ranks, all_round_trips)


def test_on_one_rank_all_meanings_are_the_same():
    round_trips(0, 1, 5, {})
    round_trips(0, 1, 5, {"chunk_size": 4, "pad_size": 3})


def whole_gradient_of_a_sum(rank, num_ranks):
    key = make_key(num_ranks, 5, {})
    x = torch.zeros(5, requires_grad=True)
    api.undispatch(api.dispatch(x, key), key).sum().backward()
    return x.grad.tolist()


@pytest.mark.ranks(2)
def test_a_replicated_input_gets_its_whole_gradient_on_every_rank(ranks):
    assert ranks(2, whole_gradient_of_a_sum) == [[1.0] * 5] * 2


def local_loss(rank, num_ranks, total):
    """A loss on each rank's own rows, padding weighed too: its gradient must go nowhere."""
    key = make_key(num_ranks, total, {"chunk_size": 2})
    weight = random(3, total)
    grads = []
    for partial in (False, True):
        x = random(4, total).requires_grad_()
        local = api.dispatch(x, key, is_partial_grad=partial)
        (local * api.dispatch(weight, key, pad_value=1e6)).sum().backward()
        grads.append(x.grad)
    whole, part = grads
    torch.testing.assert_close(whole, weight, rtol=0, atol=0)
    if num_ranks > 1:
        dist.all_reduce(part)
    torch.testing.assert_close(part, whole, rtol=0, atol=0)


@pytest.mark.ranks(3)
def test_padding_rows_give_no_gradient_and_parts_sum_to_the_whole(ranks):
    ranks(3, local_loss, 7)
    local_loss(0, 1, 7)


def second_derivatives(rank, num_ranks):
    key = make_key(num_ranks, 7, {})
    x = random(5, 7).requires_grad_()
    out = api.undispatch(api.dispatch(x**3, key), key)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * x**2)
    torch.testing.assert_close(second, 6 * x)
    out = api.undispatch(api.dispatch(x**3, key), key)
    (first,) = torch.autograd.grad((out * x).sum(), x, create_graph=True)  # the gradient of out depends on x too
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 4 * x**3)
    torch.testing.assert_close(second, 12 * x**2)


@pytest.mark.ranks(2)
def test_second_derivatives_are_whole_too(ranks):
    ranks(2, second_derivatives)


def higher_derivatives_of_parts(rank, num_ranks):
    """Each rank has a part of a loss that is not linear in what was rolled and gathered."""
    key = make_key(num_ranks, 7, {})
    x, weights = random(5, 7).requires_grad_(), torch.arange(1, num_ranks + 1)
    out = api.undispatch(api.roll(api.dispatch(x**3, key), 2, 0, key), key, is_partial_grad=True)
    loss = weights[rank] * (out * torch.roll(x.detach(), 2)).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((first * x.detach()).sum(), x, create_graph=True)
    (third,) = torch.autograd.grad((second * x.detach()).sum(), x)
    total = float(weights.sum())
    torch.testing.assert_close(first, 6 * total * x**7)
    torch.testing.assert_close(second, 30 * total * x**7)
    torch.testing.assert_close(third, 120 * total * x**7)


@pytest.mark.ranks(3)
def test_higher_derivatives_go_through_rolls_and_sums_of_parts(ranks):
    ranks(3, higher_derivatives_of_parts)


def nothing_is_sent_without_a_gradient(rank, num_ranks):
    """One rank alone dispatches what needs no gradient: it must not wait for the other."""
    key = make_key(num_ranks, 6, {})
    api.get_position_ids(key)
    if rank == 0:
        assert not api.dispatch(torch.arange(6), key).requires_grad
        assert not api.dispatch(torch.ones(6), key).requires_grad
        with torch.no_grad():
            assert not api.dispatch(torch.ones(6, requires_grad=True), key).requires_grad
        x = torch.ones(6, requires_grad=True)
        api.dispatch(x, key, is_partial_grad=True).sum().backward()
        assert x.grad.sum() == 3
    dist.barrier()


@pytest.mark.ranks(2)
def test_only_the_whole_gradient_is_collective(ranks):
    ranks(2, nothing_is_sent_without_a_gradient)


def deprecated(rank, num_ranks):
    grads = []
    for partial in (False, True):
        x = torch.ones(6, requires_grad=True)
        with pytest.warns(DeprecationWarning, match="use magi_attn_varlen_key"):
            local, _ = api.magi_attn_varlen_dispatch(
                x, [0, 6], [0, 6], cp_group=dist.group.WORLD, is_partial_grad=partial
            )
        local.sum().backward()
        grads.append(x.grad.sum().item())
    return grads


@pytest.mark.ranks(2)
def test_the_deprecated_functions_have_the_same_two_meanings(ranks):
    assert ranks(2, deprecated) == [[6.0, 3.0]] * 2
