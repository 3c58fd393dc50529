"""The loss that trains an indexer, without Megatron's layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi.mcore.indexer import Scores, Target, indexer_loss, masked_softmax

ROWS, HEADS, DIM = 6, 2, 4


class _OneRank:
    def size(self) -> int:
        return 1


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, weights, k = (
        torch.randn(shape, generator=generator) for shape in ((ROWS, HEADS, DIM), (ROWS, HEADS), (ROWS, DIM))
    )
    return q.requires_grad_(), weights.requires_grad_(), k.requires_grad_()


def target() -> Target:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(ROWS, HEADS, DIM, generator=generator) for _ in range(2))
    return Target(query, key, 0.5, _OneRank())  # type: ignore[arg-type]


def loss_of(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    rows = torch.arange(ROWS)
    return indexer_loss(Scores(q, weights, k, torch.stack([0 * rows, rows + 1])[:, None]), target())


def written_out(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """The formulas of the module, by autograd."""
    seen = torch.ones(ROWS, ROWS).tril().bool()
    wanted = target().of(slice(0, ROWS), seen)
    scores = torch.einsum("rhk,rh->rk", torch.einsum("rhd,kd->rhk", q, k).relu(), weights)
    predicted = masked_softmax(scores, seen).where(seen, 1.0)
    return (wanted * (wanted.where(seen, 1.0).log() - predicted.log())).sum()


def test_loss_and_gradients_are_those_of_the_formulas() -> None:
    inputs = operands()
    loss, expected = loss_of(*inputs), written_out(*inputs)
    torch.testing.assert_close(loss, expected)
    for found, right in zip(
        torch.autograd.grad(3 * loss, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", [0, 1, 2], ids=["q", "weights", "k"])
@pytest.mark.parametrize("by", [0, 1, 2], ids=["by q", "by weights", "by k"])
def test_a_second_derivative_is_an_error(name: int, by: int) -> None:
    """A penalty on gradients would else be left out without a word."""
    inputs = operands()
    (first,) = torch.autograd.grad(loss_of(*inputs), inputs[name], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(first.square().sum() + inputs[by].sum(), inputs[by])


def test_a_derivative_by_a_factor_of_the_loss_is_an_error() -> None:
    inputs, factor = operands(), torch.ones((), requires_grad=True)
    (first,) = torch.autograd.grad(loss_of(*inputs) * factor, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(first.sum() + factor, factor)


def test_a_backward_keeps_none_of_the_operands() -> None:
    """Gradients are kept in their place."""
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        inputs = operands()
        loss_of(*inputs)
    assert not {x.untyped_storage().data_ptr() for x in held if x.numel()} & {x.data_ptr() for x in inputs}
