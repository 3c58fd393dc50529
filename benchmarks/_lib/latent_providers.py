"""Implementations of attention over lists of latent keys that `bench_sparse` measures beside the Hopper kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from benchmarks._lib.providers import Unavailable, backward_of, import_one
from benchmarks._lib.sparse_cases import LATENT_SCALE, Case
from megatron_magi.ops.latent_attention import latent_sparse_attention

Pass = Callable[[], Tensor]
MOST_ERROR = 0.02
"""Of a peer's output, or of a gradient where it has none, relative to ours."""
_TILELANG = "megatron.core.transformer.experimental_attention_variant.ops.sparse_mla"


def flash_mla(case: Case, q: Tensor, kv: Tensor) -> tuple[Pass, None]:
    """FlashMLA's kernel for prefills, which has no backward.

    Raises:
        Unavailable: it is not installed, or its version has no such kernel.
    """
    module = import_one(("flash_mla",))
    if not hasattr(module, "flash_mla_sparse_fwd"):
        raise Unavailable("this version has no flash_mla_sparse_fwd; its sources have, at deepseek-ai/FlashMLA")
    indices, dim_v = case.indices, case.dims[1]
    return lambda: module.flash_mla_sparse_fwd(q, kv, indices, LATENT_SCALE, d_v=dim_v)[0], None


def cudnn_dsa(case: Case, q: Tensor, kv: Tensor) -> tuple[None, Pass]:
    """The cuDNN frontend's backward, after this project's forward: on Hopper it has none of its own.

    Raises:
        Unavailable: it is not installed.
        RuntimeError: its gradient of q is not ours.
    """
    module = import_one(("cudnn",))
    try:
        attend_backward = module.DSA.sparse_attention_backward_wrapper
    except (AttributeError, ImportError) as error:
        raise Unavailable(f"cudnn: {error}; it needs nvidia-cudnn-frontend[cutedsl]") from error
    leaf = q.detach().requires_grad_()
    out, meta = case.attend(leaf, kv)
    dout, no_sink = torch.randn_like(out), torch.full((q.shape[1],), -torch.inf, device=q.device)
    assert case.indices is not None
    listed = case.indices[:, 0].contiguous()
    lengths = torch.full((len(listed),), listed.shape[1], dtype=torch.int32, device=q.device)
    rows = q, kv[:, 0], out.detach(), dout, meta.lse, no_sink, listed

    def backward() -> Tensor:
        return attend_backward(*rows, softmax_scale=LATENT_SCALE, topk_length=lengths)["dq"]

    (ours,) = torch.autograd.grad(out, leaf, dout)
    difference = float((backward().float() - ours.float()).norm() / ours.float().norm())
    if not difference < MOST_ERROR:
        raise RuntimeError(f"its dq is {difference:.3f} off")
    return None, backward


def tilelang(case: Case, q: Tensor, kv: Tensor) -> tuple[Pass, Pass]:
    """TileLang's example as megatron-core has it; its backward computes the forward once more.

    Raises:
        Unavailable: tilelang or megatron-core is not installed.
    """
    import_one(("tilelang",))
    module: ModuleType = import_one((_TILELANG,))
    if module.SparseMLA is None:
        raise Unavailable("megatron-core does not find tilelang")
    leaves = tuple(t.detach().requires_grad_() for t in (q, kv))

    def attend() -> Tensor:
        return module.SparseMLA.apply(*leaves, case.indices, LATENT_SCALE)[0]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    return forward, backward_of(attend(), leaves)


def triton(case: Case, q: Tensor, kv: Tensor) -> tuple[Pass, Pass]:
    """This project's kernels in Triton."""
    leaves = tuple(t.detach().requires_grad_() for t in (q, kv))
    assert case.indices is not None
    options = {"softmax_scale": LATENT_SCALE, "dim_v": case.dims[1], "impl": "triton"}
    out, _ = latent_sparse_attention(*leaves, case.indices, **options)
    return lambda: latent_sparse_attention(q, kv, case.indices, **options)[0], backward_of(out, leaves)


LATENT_PEERS = {"triton": triton, "flash_mla": flash_mla, "cudnn_dsa": cudnn_dsa, "tilelang": tilelang}
"""By name: forward and backward, where there is one."""
