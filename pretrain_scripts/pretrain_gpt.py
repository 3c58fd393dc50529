"""Pretrain a GPT with Megatron: all of Megatron's arguments, plus `--attention-backend magi` and `--config FILE`.

Launch with torchrun.
"""

from megatron_magi.mcore.entry import main

if __name__ == "__main__":
    main()
