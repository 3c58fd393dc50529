"""How far a result in low precision may be from the exact one: one definition for all tests and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = 8
"""Units in the last place of the accumulator that the order of additions may make; see `assert_within_budget`."""


def assert_within_budget(
    name: str,
    got: Tensor,
    reference: Tensor,
    exact: Tensor,
    *,
    terms: Tensor | None = None,
    elementwise: bool = True,
) -> None:
    """Asserts that a result is as good as plain torch operations in the same precision.

    With ``|x|`` for a norm of a tensor, the error ``|got - exact|`` may be

        2 * max(|reference - exact|, |rounded - exact|) + ROUNDINGS * unit * |terms|

    - *Twice the reference's error*: as many roundings, in other places.
    - *rounded* is the exact result in the dtype of ``got``. Nothing in this dtype errs less, but a reference of few
      elements may, by luck; a result that is rounded correctly always passes.
    - *Units of the accumulator.* ``unit`` is the distance from 1 to the next number in the dtype that sums are
      computed in: fp32, or fp64 where ``reference`` has it. The order of additions depends on vector units, threads
      and blocks, and n additions in another order differ by about sqrt(n) / 2 units of what is added: 8 are 256
      additions. The order of the reference may be the luckier one by that much. Results in 16 bits are summed in fp32,
      so this adds next to nothing to their budget.

    Two norms are compared: the largest element, which shows a damaged row, and the root of the mean square,
    which shows a small error everywhere (in 16 bits, the largest element alone would let 1 % pass).

    Args:
        name: begins the message.
        got: the result, any dtype and device.
        reference: the same by plain operations in the precision of the inputs.
        exact: the same in fp64, from the same (rounded) inputs. Where it is not finite ``got`` must be the same.
        terms: fp64, the sum of the absolute values of what each element is a sum of; ``exact`` when None. To be given
            where sums cancel, so that the error is not small although the result is.
        elementwise: also compare the largest elements. False where they are too few to tell: the largest of a
            few draws may well be twice the largest of as many others.

    Raises:
        AssertionError: an error is larger, or ``got`` is not finite where ``exact`` is.
        ValueError: ``reference``, ``exact`` or ``terms`` do not have the shape of ``got``.
    """
    for argument, tensor in (("reference", reference), ("exact", exact), ("terms", terms)):
        if tensor is not None and tensor.shape != got.shape:
            raise ValueError(f"{argument}: expected the shape {tuple(got.shape)} of got, found {tuple(tensor.shape)}")
    got, reference, exact = got.detach(), reference.detach(), exact.detach()
    finite = exact.isfinite()
    assert bool(got[finite].isfinite().all()), f"{name}: not finite"
    assert torch.equal(got[~finite].double(), exact[~finite].double()), f"{name}: other infinities"
    if not bool(finite.any()):
        return
    unit = torch.finfo(torch.promote_types(reference.dtype, torch.float32)).eps
    want = exact[finite].double()
    error, plain, rounding = (t.double() - want for t in (got[finite], reference[finite], want.to(got.dtype)))
    size = want if terms is None else terms[finite].double()
    for of in (_root_mean_square, _largest) if elementwise else (_root_mean_square,):
        allowed = 2 * max(of(plain), of(rounding)) + ROUNDINGS * unit * of(size)
        assert of(error) <= allowed, f"{name}: {of.__doc__} of errors {of(error):.3e}, allowed {allowed:.3e}"


def _root_mean_square(x: Tensor) -> float:
    """root mean square"""
    return float(x.square().mean().sqrt())


def _largest(x: Tensor) -> float:
    """largest"""
    return float(x.abs().max())
