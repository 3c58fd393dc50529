"""What attends to what: masks as data, in global token coordinates, on no device."""

from megatron_magi.mask.slices import AttnMask, AttnRange, AttnRanges, AttnSlice, MaskType, RangeError

__all__ = ["AttnMask", "AttnRange", "AttnRanges", "AttnSlice", "MaskType", "RangeError"]
