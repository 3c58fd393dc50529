"""Pretrain a GPT with Megatron: all of Megatron's arguments, plus `--attention-backend magi` and `--config FILE`.

Launch with torchrun.
"""

import os

# Megatron insists on it with tensor or context parallelism; CUDA reads it when a process first uses a GPU.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from megatron_magi.mcore.entry import main

if __name__ == "__main__":
    main()
