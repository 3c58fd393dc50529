"""Attention over all ranks of a context-parallel group: execution of plans, and preparation of batches.

`distributed` is the entrance and runs stages, `fused_comm` one launch; `prepared_batch` is what loader workers make,
`cuda_graph` what CUDA graphs replay, `sink` reduces the gradient of sinks.
"""

from megatron_magi.attention.cuda_graph import StaticPlans, load_together
from megatron_magi.attention.distributed import distributed_attention
from megatron_magi.attention.kernel_list import needed_kernels
from megatron_magi.attention.prepared_batch import AttnShape, PreparedBatch, PreparedPlans, prepare_batch, prepare_plans

__all__ = [
    "AttnShape",
    "PreparedBatch",
    "PreparedPlans",
    "StaticPlans",
    "distributed_attention",
    "load_together",
    "needed_kernels",
    "prepare_batch",
    "prepare_plans",
]
