"""Tensors that are views with a note (conjugate, negative, other strides), and complex ones, where rows are moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.comm.dispatch import UndispatchArgs, dispatch, dispatch_replicated, undispatch
from megatron_magi.comm.group_collective import GroupCastArgs, group_cast, group_reduce, group_reduce_lse
from megatron_magi.comm.roll import RollArgs, make_roll_args, roll
from tests.comm.test_dispatch import shards

CASES = [(13, (6, 7)), (11, (6, 6))]  # the first without padding, so that nothing is copied into a padded buffer


def drawn(shape, dtype=torch.complex128, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


LAZY = {
    "conjugate": lambda z: z.conj(),
    "negative": lambda z: z.conj().imag,
    "negative complex": lambda z: torch._neg_view(z),
    "transposed conjugate": lambda z: z.flip(1).transpose(1, 2).conj(),
    "every second": lambda z: z[:, ::2].real,
    "expanded": lambda z: z[:, :1].expand(-1, 5, -1),
    "single precision": lambda z: z.to(torch.complex64).mH.mH,
}


def moved_alike(rank, num_ranks, name):
    make = LAZY[name]
    for total_seqlen, lengths in CASES:
        index = shards(total_seqlen, lengths)
        mine = torch.from_numpy(index[rank])
        args = UndispatchArgs.build(index, total_seqlen, rank, "cpu")
        rolling = RollArgs.build(make_roll_args(index, 2, total_seqlen, rank), "cpu")
        x, rows = drawn((total_seqlen, 4, 3)), drawn((lengths[rank], 4, 3), seed=rank + 1)
        lazy, plain = make(x), make(x).clone()
        assert torch.equal(dispatch(lazy, mine), dispatch(plain, mine))
        for partial in (False, True):
            found = []
            for written in (False, True):
                z = rows.clone().requires_grad_()
                given = make(z)
                given = given.clone() if written else given
                whole, rolled = undispatch(given, args, is_partial_grad=partial), roll(given, rolling)
                upstream = drawn(whole.shape, whole.dtype, seed=7)
                # Gradients are lazy too.
                loss = (make_loss(whole, upstream) + make_loss(rolled, upstream[: len(rolled)])).real
                found.append((whole.detach(), rolled.detach(), *torch.autograd.grad(loss, z)))
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (name, partial)
        z = x.clone().requires_grad_()
        local = dispatch_replicated(make(z), args)
        (grad,) = torch.autograd.grad(make_loss(local, drawn(local.shape, local.dtype, seed=8)).real, z)
        assert grad.shape == z.shape and bool(grad.isfinite().all())
    return True


def make_loss(x, weights):
    return (x.conj() * weights).sum() if x.is_complex() else (x * torch._neg_view(weights)).sum()


@pytest.mark.parametrize("name", LAZY)
def test_rows_of_lazy_tensors_are_moved_as_their_copies(ranks, name):
    assert all(ranks(2, moved_alike, name))


def whole_from_shards(rank, num_ranks):
    """`undispatch` of what was dispatched is the whole, and its gradients are those of the whole."""
    index = shards(13, (6, 7))
    args = UndispatchArgs.build(index, 13, rank, "cpu")
    x = drawn((13, 2, 3)).requires_grad_()
    whole = undispatch(dispatch_replicated(x.conj(), args).conj(), args)
    assert torch.equal(whole, x)
    weights = drawn(whole.shape, seed=1)
    (grad,) = torch.autograd.grad((whole * weights).sum().real, x)
    torch.testing.assert_close(grad, weights.conj().resolve_conj(), rtol=0, atol=0)
    return True


def test_complex_tensors_come_back_whole_with_the_gradients_of_the_whole(ranks):
    assert all(ranks(2, whole_from_shards))


def cast_and_reduced(rank, num_ranks, impl):
    splits = (2, 3) if rank == 0 else (3, 2)
    received = (2, 3) if rank == 0 else (3, 2)
    index = np.arange(sum(splits)) % 4
    args = GroupCastArgs.build(index, splits, received, np.arange(sum(received)), "cpu")
    z = drawn((4, 2, 3), seed=rank)
    for make in (torch.conj, lambda z: z.conj().imag, lambda z: z.mT.conj(), lambda z: z[:, ::2].real):
        lazy, plain = make(z), make(z).clone()
        (got,), (want,) = (group_cast([x], args, impl=impl).wait() for x in (lazy, plain))
        assert torch.equal(got, want)
        partial = make(drawn((sum(received), 2, 3), seed=5))
        sums = [
            group_reduce([x], args, into=[torch.zeros(plain.shape, dtype=x.dtype)], impl=impl).wait()[0]
            for x in (partial, partial.clone())
        ]
        assert torch.equal(*sums) and bool(sums[0].any())
    out, lse = (drawn((sum(received), 2, 3), seed=6).conj().imag, drawn((sum(received), 2), seed=7).conj().imag)
    merged = [
        group_reduce_lse(*pair, args, into=(z.real.clone(), z.imag[..., 0].clone()), impl=impl).wait()
        for pair in ((out, lse), (out.clone(), lse.clone()))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*merged, strict=True))
    with pytest.raises(ValueError, match=r"^into: .*lazily"):
        group_reduce([partial.conj()], args, into=[drawn(plain.shape).conj()], impl=impl)
    return True


@pytest.mark.parametrize("impl", ["reference", "all_to_all"])
def test_group_collectives_read_lazy_tensors_as_their_copies(ranks, impl):
    assert all(ranks(2, cast_and_reduced, impl))
