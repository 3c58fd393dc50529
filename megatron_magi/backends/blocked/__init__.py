"""Attention in torch, block by block, on any device."""
