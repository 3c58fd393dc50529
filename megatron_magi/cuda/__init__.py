"""CUDA driver and compiler as far as our kernels need them: compiled when first used, launched from Python.

And memory that the processes of one machine share.
"""
