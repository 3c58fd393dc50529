"""Attention in torch, block by block, on any device. Read `attention` first."""
