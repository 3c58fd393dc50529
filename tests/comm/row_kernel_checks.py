"""Compares the Triton row kernels with plain torch. ``python -m tests.comm.row_kernel_checks`` runs all on
the CPU in Triton's interpreter, which TRITON_INTERPRET=1 must choose before Triton is imported."""

from __future__ import annotations

import numpy as np
import torch

from megatron_magi.comm import rows
from megatron_magi.comm.impl import triton_rows
from megatron_magi.comm.row_layout import RowLayout
from tests.comm.random_transfers import arrivals_of, random_tensor


def check_gather(device: str) -> None:
    rng = np.random.default_rng(0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool):
        for shape in ((), (1,), (7,), (2, 64), (3, 5), (2500,)):
            x = random_tensor((9, *shape), dtype, 1).to(device)
            for n in (0, 1, 40):
                index = torch.from_numpy(rng.integers(0, 9, n)).to(device)
                # Into one of two tensors side by side, from a contiguous tensor and from a strided one.
                layout = RowLayout.of([x, x])
                for source in (x, torch.stack([x, x], dim=1)[:, 1]):
                    buffer = torch.zeros(n, layout.row_bytes, dtype=torch.uint8, device=device)
                    views = layout.views(buffer)
                    triton_rows.gather_rows(source, index, views[1])
                    assert torch.equal(views[1], x[index]), (dtype, shape, n)
                    assert not views[0].any()


def check_sum(device: str) -> None:
    rng = np.random.default_rng(1)
    for partial, into in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int32, torch.int32),
    ):
        for shape in ((), (1,), (2, 5), (2500,)):
            for n in (0, 1, 30):
                arrivals = arrivals_of(rng.integers(0, 8, n), device)
                arriving = random_tensor((n, *shape), partial, 2).to(device)
                expected = random_tensor((8, *shape), into, 3).to(device)
                got = expected.clone()
                rows.sum_rows(arriving, arrivals, expected)
                triton_rows.sum_rows(arriving, arrivals, got)
                # The interpreter cuts off where hardware rounds to bf16: one unit in the last place.
                ulp = 2**-7 if into == torch.bfloat16 and device == "cpu" else 0
                torch.testing.assert_close(got, expected, rtol=ulp, atol=0)


def check_merge(device: str) -> None:
    rng = np.random.default_rng(2)
    for dtype, lse_dtype, tolerance in (
        (torch.float64, torch.float64, 1e-13),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-2),
    ):
        for num_heads, head_dim in ((1, 1), (3, 5), (2, 128)):
            arrivals = arrivals_of(rng.integers(0, 6, 25), device)
            out = random_tensor((6, num_heads, head_dim), dtype, 4).to(device)
            lse = 20 * random_tensor((6, num_heads), lse_dtype, 5).to(device)
            part_out = random_tensor((25, num_heads, head_dim), dtype, 6).to(device)
            part_lse = 20 * random_tensor((25, num_heads), lse_dtype, 7).to(device)
            for o, s in ((out, lse), (part_out, part_lse)):
                s[::3] = -torch.inf
                o[::3] = torch.nan
            # What does count stays as it is: an infinite weight takes all, NaN is seen.
            part_lse[4, 0], part_lse[7, -1], part_out[10, -1, 0] = torch.inf, torch.nan, torch.nan
            expected, got = (out.clone(), lse.clone()), (out.clone(), lse.clone())
            part = rows.PartialRows(part_out, part_lse)
            rows.merge_rows(part, arrivals, expected)
            triton_rows.merge_rows(part, arrivals, got)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_long_offsets(device: str) -> None:
    """Rows beyond 2^31 elements; needs 9 GB."""
    num_rows, width = (1 << 21) + 3, 1024
    x = torch.zeros(num_rows, width, dtype=torch.int16, device=device)
    x[-1] = torch.arange(width, device=device)
    out = torch.zeros(2, width - 1, dtype=torch.int16, device=device)
    triton_rows.gather_rows(x[:, 1:], torch.tensor([num_rows - 1, 0], device=device), out)
    assert torch.equal(out[0], x[-1, 1:]) and not out[1].any()
    triton_rows.sum_rows(out[:1], arrivals_of(np.array([num_rows - 1]), device), x[:, 1:])
    assert torch.equal(x[-1, 1:], 2 * out[0])


def mend_interpreter() -> None:
    """Loop bounds that a kernel loads are arrays of one element, which numpy 2.5 no longer turns into an int."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, *scope) -> None:  # older releases have no scope
        patch(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if __name__ == "__main__":
    mend_interpreter()
    for check in (check_gather, check_sum, check_merge):
        check("cpu")
        print(check.__name__, "passed")
