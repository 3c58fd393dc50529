"""Implementations of attention over bands on one device; `base` says what they share, `registry` names them.

Folders: `reference` (dense, the definition), `blocked` (torch, any device), `sm90` (kernels for Hopper GPUs).
"""
