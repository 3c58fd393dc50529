"""CUDA driver and compiler as far as our kernels need them, and memory that the processes of one machine share.

`build` compiles kernels when they are first used and caches them; `driver` loads them, `launch` and `call_list` launch
them.
"""
