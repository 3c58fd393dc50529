"""Pretrain a hybrid model with Megatron: all its arguments, plus `--attention-backend magi` and `--config FILE`.

`--hybrid-layer-pattern` names the layers. Launch with torchrun.
"""

from megatron_magi.mcore.entry import main

if __name__ == "__main__":
    main(model="hybrid")
