"""Attention in Triton, for GPUs without kernels of their own here: from compute capability 8.0 on.

Read `attention` first, which launches what is in `kernels` over the tables of a mask (`tables`). Attention over lists
is `sparse`, which launches `sparse_kernels` over lists made on the device (`sparse_lists`).
"""
