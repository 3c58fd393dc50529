"""`python -m megatron_magi.demo`: stock Megatron and `--attention-backend magi`, on the same data, side by side.

`__main__` runs it, `report` compares the losses.
"""
