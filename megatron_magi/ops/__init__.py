"""Attention on one device: slices in, output and log-sum-exp out. Independent of ranks and plans.

`slice_attention` is the entrance, `slice_passes` the passes without autograd, `sparse_attention` that over lists.
"""
