"""Batches out of samples: rollouts that share prefixes (`prefix_tree`), and documents in microbatches of equal work
(`balanced_sampler`).
"""

from megatron_magi.packing.balanced_sampler import BalancedSampler, causal_area, causal_work
from megatron_magi.packing.prefix_tree import PrefixTree, make_prefix_tree

__all__ = ["BalancedSampler", "PrefixTree", "causal_area", "causal_work", "make_prefix_tree"]
