"""The kernels that distributed attention of a model can use, for attention and for communication."""

from __future__ import annotations

import torch

from megatron_magi.attention.prepared_batch import AttnShape
from megatron_magi.backends.base import Kernels, ModelKind
from megatron_magi.comm import peer_kernels
from megatron_magi.comm.impl import cuda_rows
from megatron_magi.comm.transport import may_use_peer_memory
from megatron_magi.config import MagiConfig
from megatron_magi.cuda.target import DEFAULT_TARGET, has_peer_kernels
from megatron_magi.operands.merge import accumulate_dtype


def needed_kernels(
    shape: AttnShape,
    config: MagiConfig,
    cp_size: int,
    *,
    rolls: bool = False,
    captured: bool = False,
    target: str = DEFAULT_TARGET,
) -> Kernels:
    """Kernels that attention of a shape can use under any mask; none of a backend without tables.

    Args:
        shape: heads and dtype.
        config: how it is executed.
        cp_size: number of ranks.
        rolls: also for `roll` of int64 and fp32 values, one for each row, as in multi-token prediction.
        captured: also kernels of static plans.
        target: the architecture that they are compiled for.
    """
    backend = shape.table_backend
    if backend is None:
        return []
    deterministic = config.attend.deterministic or torch.are_deterministic_algorithms_enabled()
    dims = shape.head_dim, shape.head_dim_v
    model = ModelKind(shape.dtype, dims, shape.num_heads_q // shape.num_heads_kv, deterministic)
    found = backend.kernels(model)
    if captured:
        found += backend.kernels(model, captured=True)
    if cp_size == 1:
        return found
    programs = backend.programs
    one_launch = config.overlap.one_launch and programs is not None and may_use_peer_memory(cp_size, config.comm.impl)
    if one_launch:
        found += backend.kernels(model, fused=True)
        if captured:
            found += backend.kernels(model, fused=True, captured=True)
    # Rows of heads are multiples of 16 bytes.
    units = (16, 8, 4) if rolls else (16,)
    found += [cuda_rows.gather_source(unit) for unit in units]
    wide = accumulate_dtype(shape.dtype)
    partial = wide if config.comm.backward_high_precision_reduce else shape.dtype
    found.append(cuda_rows.sum_source(partial, wide, 16 // wide.itemsize))
    if config.comm.ranks_per_node is not None:
        found.append(cuda_rows.sum_source(partial, partial, 16 // partial.itemsize))
    if config.comm.impl in ("auto", "native") and has_peer_kernels(target):
        found += peer_kernels.needed_kernels(partial, wide)
    if one_launch and programs is not None and programs.fuses_backward(dims):
        found += [kernel for kernel in peer_kernels.needed_kernels(partial, partial) if kernel not in found]
    return found
