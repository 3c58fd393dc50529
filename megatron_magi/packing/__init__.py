"""Batches out of samples: rollouts that share prefixes, each shared token computed once."""

from megatron_magi.packing.prefix_tree import PrefixTree, make_prefix_tree

__all__ = ["PrefixTree", "make_prefix_tree"]
