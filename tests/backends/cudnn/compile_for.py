"""Compiles the package's kernels for a GPU that is not there: ``compile_for.py ARCH``, in a process of its own.

Run with ``FLEX_ATTENTION_ARCH`` and ``CUTE_DSL_ARCH`` in the environment, which the package reads when it is imported.
"""

from __future__ import annotations

import sys

import cudnn.flex_attention.plan.validation as validation
import torch
from cudnn import flex_attention
from torch._subclasses.fake_tensor import FakeTensorMode

DIMS = [(64, 64), (128, 128), (192, 128)]


def compile_all(arch: int) -> int:
    """Plans and both passes of shapes that the backend takes; returns the number of passes."""
    validation.get_device_arch = lambda _index=None: arch  # there is no device to ask
    count = 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        for dim, dim_v in DIMS:
            q = torch.empty(1, 256, 4, dim, dtype=torch.bfloat16, device="cuda")
            k = torch.empty(1, 256, 2, dim, dtype=torch.bfloat16, device="cuda")
            v = torch.empty(1, 256, 2, dim_v, dtype=torch.bfloat16, device="cuda")
            ends = torch.empty(1, 3, 256, dtype=torch.int32, device="cuda")
            plan = flex_attention.create_mask_plan(ends, q, k, v, build_backward=True)
            out, lse = torch.empty(1, 256, 4, dim_v, dtype=torch.bfloat16, device="cuda"), torch.empty(1, 4, 256)
            lse = lse.to("cuda")
            kernels = [flex_attention.FlexAttentionFwd(q, k, v, out, plan, lse)]
            for deterministic in (False, True):
                grads = (torch.empty_like(t) for t in (q, k, v))
                kernels.append(
                    flex_attention.FlexAttentionBwd(
                        q, k, v, out, out, lse, *grads, plan, None, deterministic=deterministic
                    )
                )
            for kernel in kernels:
                kernel.check_support()
                kernel.compile()
                count += 1
    return count


if __name__ == "__main__":
    print(f"compiled {compile_all(int(sys.argv[1]))} passes for {sys.argv[1]}")
