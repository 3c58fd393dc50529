"""PyTorch's own context parallelism (`torch.distributed.tensor.experimental.context_parallel`) over its own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh

from benchmarks._lib.baselines.base import Baseline, Cluster, Unsupported, split, zigzag
from benchmarks._lib.cases import Case


class TorchRing(Baseline):
    """One full or causal sequence; keys and values go round all ranks."""

    rotation: ClassVar[str] = "alltoall"

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        del num_heads_kv, impl
        if dist.get_backend() != "nccl":
            raise Unsupported("PyTorch's context parallelism needs GPUs")
        if not case.plain or case.window is not None or case.doc_lengths is not None:
            raise Unsupported("PyTorch's context parallelism of SDPA is for one full or causal sequence")
        if case.length % (2 * cluster.num_ranks):
            raise Unsupported(f"{case.length} tokens are not {2 * cluster.num_ranks} equal pieces")
        # Its load balancing is that of causal masks.
        whole = np.array([[0, case.length]])
        self.causal = case.causal
        parts = zigzag(case, cluster.num_ranks) if case.causal else split(whole, cluster.num_ranks)
        self.runs, self._num_ranks = parts[cluster.rank], cluster.num_ranks
        self._mesh = init_device_mesh("cuda", (cluster.num_ranks,))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within, `scaled_dot_product_attention` is that of all ranks."""
        from torch.distributed.tensor.experimental import _attention as experimental

        experimental.set_rotate_method(self.rotation)
        experimental._cp_options.enable_load_balance = self.causal
        unused = torch.zeros(2 * self._num_ranks, device="cuda")  # it wants a buffer to cut
        with experimental.context_parallel(
            self._mesh, buffers=[unused], buffer_seq_dims=[0], no_restore_buffers={unused}
        ):
            yield

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Patched.apply(q, k, v, self)


class TorchAllGather(TorchRing):
    """The same; all keys and values are gathered behind the first step."""

    rotation: ClassVar[str] = "allgather"


class _Patched(torch.autograd.Function):
    """The forward and the backward of torch's attention, each while torch's functions are replaced."""

    @staticmethod
    def forward(ctx: Any, q, k, v, way: TorchRing):
        leaves = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        with torch.enable_grad(), way.patched():
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=way.causal, enable_gqa=True)
        ctx.way, ctx.leaves, ctx.out = way, leaves, out
        return out.detach()[0].transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout):
        with ctx.way.patched():
            grads = torch.autograd.grad(ctx.out, ctx.leaves, dout.transpose(0, 1)[None])
        return *(grad[0].transpose(0, 1) for grad in grads), None
