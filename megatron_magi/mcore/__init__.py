"""The adapter to Megatron: the only folder that imports megatron."""
