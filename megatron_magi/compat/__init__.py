"""Value types and runtime keys in the form that users of MagiAttention know; `megatron_magi.api` shows them.

`runtime` makes and caches what a key stands for; `ranges`, `rectangles` and `types` are MagiAttention's value types.
"""
