"""Attention in plain formulas, which defines the results: dense, any device, up to fp64. Read `attention` first."""
