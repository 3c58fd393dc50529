"""Attention over all ranks of a context-parallel group: a plan, carried out."""

from megatron_magi.attention.distributed import distributed_attention

__all__ = ["distributed_attention"]
