"""The adapter to Megatron: the only folder that imports megatron."""

from megatron_magi.mcore.installation import install

__all__ = ["install"]
