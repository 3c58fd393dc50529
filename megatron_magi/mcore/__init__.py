"""The adapter to Megatron: the only folder that imports megatron.

Read `installation` and `seams` (all that is changed in Megatron), then `forward_step`. `validate` refuses arguments,
`loader` and `planner` plan in workers, `core_attention` runs in the layers, `cuda_graph` captures iterations.
"""

from megatron_magi.mcore.installation import install

__all__ = ["install"]
