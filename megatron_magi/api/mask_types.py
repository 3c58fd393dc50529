"""Ranges and mask types of slices, in the forms that users give them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum

from megatron_magi.checks import int_array, integer
from megatron_magi.mask import AttnRange, AttnRanges, MaskType


class AttnMaskType(Enum):
    """The four mask types by name; see `megatron_magi.mask.MaskType` for what they mean."""

    FULL = "full"
    CAUSAL = "causal"
    BICAUSAL = "bi_causal"
    INVCAUSAL = "inv_causal"

    def to_int_type(self) -> int:
        """The number that kernels and ``attn_type_map`` use."""
        return int(_NUMBER_OF[self])

    @classmethod
    def from_int_type(cls, int_type: int) -> AttnMaskType:
        """The type of a number that kernels and ``attn_type_map`` use.

        Raises:
            ValueError: not 0, 1, 2 or 3.
        """
        known = integer(int_type, "int_type")
        if not 0 <= known <= 3:
            raise ValueError(f"int_type: expected 0, 1, 2 or 3, got {known}")
        return _NAME_OF[MaskType(known)]


_NUMBER_OF = {
    AttnMaskType.FULL: MaskType.FULL,
    AttnMaskType.CAUSAL: MaskType.CAUSAL,
    AttnMaskType.INVCAUSAL: MaskType.INV_CAUSAL,
    AttnMaskType.BICAUSAL: MaskType.BI_CAUSAL,
}

_NAME_OF = {number: name for name, number in _NUMBER_OF.items()}

_NUMBER_BY_NAME = {key: int(number) for name, number in _NUMBER_OF.items() for key in (name, name.value)}

AnyMaskType = str | int | AttnMaskType | MaskType
GeneralAttnMaskType = AnyMaskType | Sequence[AnyMaskType]


def mask_types(attn_mask_type: GeneralAttnMaskType, num_slices: int) -> list[int]:
    """Numbers of the mask types, one a slice; a single type stands for all slices.

    Raises:
        ValueError: an unknown type, or another number of types than slices.
    """
    if hasattr(attn_mask_type, "tolist"):
        attn_mask_type = int_array(attn_mask_type, "attn_mask_type", ndim=attn_mask_type.ndim).tolist()
    if isinstance(attn_mask_type, str | int | AttnMaskType):
        return [_mask_type(attn_mask_type)] * num_slices
    if not isinstance(attn_mask_type, Sequence):
        raise ValueError(f"attn_mask_type: expected a type or a list of types, got {attn_mask_type!r}")
    if len(attn_mask_type) != num_slices:
        raise ValueError(f"attn_mask_type: {len(attn_mask_type)} types for {num_slices} ranges")
    return [_mask_type(t) for t in attn_mask_type]


def _mask_type(name: AnyMaskType) -> int:
    try:
        if isinstance(name, str | AttnMaskType):
            return _NUMBER_BY_NAME[name]
        return int(MaskType(integer(name, "attn_mask_type")))
    except (KeyError, ValueError):
        known = ", ".join(t.value for t in AttnMaskType)
        raise ValueError(f"attn_mask_type: expected one of {known}, got {name!r}") from None


def as_ranges(ranges: Iterable, name: str) -> AttnRanges:
    """``ranges`` as `AttnRanges`: an instance, pairs, or an ``[n, 2]`` tensor.

    Raises:
        ValueError: anything else, called ``name`` in the message.
    """
    if isinstance(ranges, AttnRanges) and all(isinstance(r, AttnRange) for r in ranges):
        return ranges
    if isinstance(ranges, str | bytes | Mapping | Set):
        raise ValueError(f"{name}: expected pairs (start, end), got {ranges!r}")
    return AttnRanges.from_ranges(ranges, name=name)
