"""PyTorch's context parallelism of FlexAttention, with its load balancers, as torchtitan uses it.

Keys and values are gathered, and a block mask says what this rank's queries see of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks._lib.baselines.base import Baseline, Cluster, Unsupported
from benchmarks._lib.cases import Case
from benchmarks._lib.providers import compiled_flex, visibility

BLOCK = 128
"""Tokens of a block of FlexAttention's masks; each rank holds whole blocks."""


class TorchFlex(Baseline):
    """Any mask that a function of positions expresses; the tokens lie as `balancer` has them, or in one piece a rank.

    On CPUs only the forward, as FlexAttention has no backward there.
    """

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        del num_heads_kv, impl
        # Private to PyTorch: 2.11 has no public way.
        from torch.distributed.tensor.experimental._context_parallel import _attention as experimental
        from torch.nn.attention.flex_attention import flex_attention

        if case.length % (BLOCK * cluster.num_ranks):
            raise Unsupported(f"{case.length} tokens are not whole blocks of {BLOCK} on each rank")
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self._mesh = init_device_mesh(device, (cluster.num_ranks,))
        self._attention = compiled_flex() if device == "cuda" else flex_attention  # slow where it is not compiled
        visible = _all if case.name == "full" else visibility(case, device)
        balancer = self.balancer(case, cluster.num_ranks, device, visible)
        # Where it is given none it takes the one for causal masks, unless that is switched off.
        experimental._cp_options.enable_load_balance = False
        self._block_mask = experimental._create_cp_block_mask(
            visible, 1, 1, case.length, case.length, self._mesh, load_balancer=balancer
        )
        order = torch.arange(case.length) if balancer is None else balancer._generate_indices()[0].cpu()
        self.runs = _runs(order.numpy().reshape(cluster.num_ranks, -1)[cluster.rank])

    def balancer(self, case: Case, num_ranks: int, device: str, visible: Callable[..., Tensor]) -> Any:
        """PyTorch's load balancer, None for one piece a rank.

        Raises:
            Unsupported: it is not for this mask.
        """
        del case, num_ranks, device, visible

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        k, v = flex_cp_allgather(k, v, 2, self._mesh.get_group().group_name)
        return self._attention(q, k, v, block_mask=self._block_mask, enable_gqa=True)[0].transpose(0, 1)


class TorchFlexHeadTail(TorchFlex):
    """Each document in 2 * ranks pieces, of which a rank has two that mirror each other."""

    def balancer(self, case: Case, num_ranks: int, device: str, visible: Callable[..., Tensor]) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers

        del visible
        if not case.causal:
            raise Unsupported("head and tail are for causal masks")
        lengths = case.doc_lengths or (case.length,)
        if any(n % (2 * num_ranks) for n in lengths):
            raise Unsupported(f"documents are no multiples of {2 * num_ranks}")
        if case.doc_lengths is None:
            return balancers._HeadTailLoadBalancer(case.length, num_ranks, device)
        return balancers._PerDocumentHeadTailLoadBalancer([list(lengths)], num_ranks, device)


class TorchFlexBlocks(TorchFlex):
    """Blocks of rows by their work, dealt to the ranks in turns (processing-time based round robin, PTRR)."""

    def balancer(self, case: Case, num_ranks: int, device: str, visible: Callable[..., Tensor]) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers
        from torch.nn.attention.flex_attention import create_block_mask

        make = torch.compile(create_block_mask, dynamic=False) if device == "cuda" else create_block_mask
        whole = make(visible, 1, 1, case.length, case.length, device=device, BLOCK_SIZE=(BLOCK, BLOCK))
        return balancers._PTRRLoadBalancer(whole, num_ranks)


def _all(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Full attention as a function of positions."""
    return (q >= 0) & (k >= 0)


def _runs(tokens: np.ndarray) -> np.ndarray:
    """Tokens in their order as ranges, int64 ``[n, 2]``."""
    cuts = np.flatnonzero(np.diff(tokens) != 1) + 1
    first, last = np.append(0, cuts), np.append(cuts, len(tokens)) - 1
    return np.stack([tokens[first], tokens[last] + 1], axis=1).astype(np.int64)
