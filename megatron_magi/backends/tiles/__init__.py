"""Tile plans: what kernels of any backend that computes a mask tile by tile read of it.

Read `tiles` first; `cpp_tiles` is the same in C++, `tile_starts` and `passes` are parts of it.
"""
