"""Compiles the package's kernels for a GPU that is not there: ``compile_for.py ARCH FORM``, in a process of its own.

Run with ``FLEX_ATTENTION_ARCH`` and ``CUTE_DSL_ARCH`` in the environment, which the package reads when it is imported.
"""

from __future__ import annotations

import sys

import cudnn.flex_attention.plan.validation as validation
import torch
from cudnn import flex_attention
from torch._subclasses.fake_tensor import FakeTensorMode

DIMS = [(64, 64), (128, 128), (192, 128)]


def compile_all(arch: int, form: str) -> int:
    """Plans and passes of shapes that the backend takes, of a ``whole`` or of ``sequences``; how many passes."""
    validation.get_device_arch = lambda _index=None: arch  # there is no device to ask
    with FakeTensorMode(allow_non_fake_inputs=True):
        return sum(compile_passes(dim, dim_v, form == "sequences") for dim, dim_v in DIMS)


def compile_passes(dim: int, dim_v: int, split: bool) -> int:
    """The forward and both backwards of a shape."""

    def tensor(heads: int, dim: int) -> torch.Tensor:
        made = torch.empty(256, heads, dim, dtype=torch.bfloat16, device="cuda")
        return made if split else made[None]

    q, k, v, out = tensor(4, dim), tensor(2, dim), tensor(2, dim_v), tensor(4, dim_v)
    starts = torch.empty(4, dtype=torch.int32, device="cuda")
    sequences = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 128, "max_seqlen_k": 128}
    ends = torch.empty(1, 3, 256, dtype=torch.int32, device="cuda")
    plan = flex_attention.create_mask_plan(ends, q, k, v, build_backward=True, **(sequences if split else {}))
    lse = torch.empty(4, 256, device="cuda")
    lse = lse if split else lse[None]
    kernels = [flex_attention.FlexAttentionFwd(q, k, v, out, plan, lse)]
    for deterministic in (False, True):
        grads = (torch.empty_like(t) for t in (q, k, v))
        kernels.append(
            flex_attention.FlexAttentionBwd(q, k, v, out, out, lse, *grads, plan, None, deterministic=deterministic)
        )
    for kernel in kernels:
        kernel.check_support()
        kernel.compile()
    return len(kernels)


if __name__ == "__main__":
    print(f"compiled {compile_all(int(sys.argv[1]), sys.argv[2])} passes for {sys.argv[1]}")
