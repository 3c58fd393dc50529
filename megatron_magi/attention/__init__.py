"""Attention over all ranks of a context-parallel group: execution of plans, and preparation of batches."""

from megatron_magi.attention.distributed import distributed_attention
from megatron_magi.attention.kernels import needed_kernels
from megatron_magi.attention.prepared import AttnShape, PreparedBatch, PreparedPlans, prepare_batch, prepare_plans
from megatron_magi.attention.static_plan import StaticPlans, load_together

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
