"""Attention on one device: slices in, output and log-sum-exp out. Independent of ranks and plans."""
