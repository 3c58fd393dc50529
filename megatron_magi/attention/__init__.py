"""Attention over all ranks of a context-parallel group: a plan, carried out; and prepared ahead."""

from megatron_magi.attention.distributed import distributed_attention
from megatron_magi.attention.prepared import AttnShape, PreparedBatch, prepare_batch

__all__ = ["AttnShape", "PreparedBatch", "distributed_attention", "prepare_batch"]
