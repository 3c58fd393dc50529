"""Context-parallel attention for Megatron: balanced, zero-redundancy, any mask."""
