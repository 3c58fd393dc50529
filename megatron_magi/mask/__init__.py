"""What attends to what: masks as data, in global token coordinates, on no device.

`slices` is what users see, `builders` makes it, `bands` is what plans and kernels take; `named` and `source` are the
masks of ``--magi-mask``.
"""

from megatron_magi.mask.slices import AttnMask, AttnRange, AttnRanges, AttnSlice, MaskType, RangeError

__all__ = ["AttnMask", "AttnRange", "AttnRanges", "AttnSlice", "MaskType", "RangeError"]
