"""Value types and runtime keys in the form that users of MagiAttention know; `megatron_magi.api` shows them."""
