"""Attention on one device: slices in, output and log-sum-exp out. Knows no ranks and no plans."""
