"""Masks given as tensors: inputs of compiled graphs, and ranges on a device.

A mask as tensors is a list of one of three forms: ``[packed]`` (see `AttnMask.packed`), ``[bands]``, or ``[q_ranges,
k_ranges]`` with or without ``attn_type_map``. Only their content counts, so a compiled graph serves all masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_magi.mask import AttnMask
from megatron_magi.runtime.lru import LruCache

_PACKED_COLUMNS = 5
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_NAMES = ("q_ranges", "k_ranges", "attn_type_map")
_MAX_MASKS = 256
_MAX_BYTES = 64 << 20
_numbers = itertools.count()


def bands_of(mask: Sequence[Tensor], num_rows: int, num_keys: int) -> np.ndarray:
    """The bands of a mask given as tensors, int64 ``[n, 6]``.

    Args:
        mask: in one of the forms above.
        num_rows, num_keys: numbers of queries and keys.

    Raises:
        ValueError: as `AttnMask`, and for ``[packed]`` if the mask is over other numbers of tokens.
    """
    if len(mask) > 1:
        return mask_of_ranges(mask, num_rows, num_keys).bands
    (table,) = mask
    array = table.detach().cpu().numpy()
    if array.ndim == 2 and array.shape[1] == _PACKED_COLUMNS:
        return _unpack(array, num_rows, num_keys).bands
    return array


def mask_of_ranges(ranges: Sequence[Tensor], num_rows: int, num_keys: int) -> AttnMask:
    """The mask of ``[q_ranges, k_ranges]`` or ``[q_ranges, k_ranges, attn_type_map]``.

    Tensors on a device are copied to the host once, and again only if torch has counted a change: see
    `DeviceRanges`.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value.
    """
    return ranges_of_tensors(ranges, num_rows, num_keys).mask


class HostRanges:
    """Ranges on the host, and the mask that is made of them when it is first asked for.

    Args:
        ranges: ``[q_ranges, k_ranges]`` and maybe types.
        num_rows, num_keys: numbers of queries and keys.

    Attributes:
        table: int64 ``[n, 5]``: of each slice its ranges and type; not checked against the numbers of tokens.
        num_rows, num_keys: as given.
        number: unique, a cache key for what is derived from these ranges.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape or dtype.
    """

    def __init__(self, ranges: Sequence[np.ndarray], num_rows: int, num_keys: int) -> None:
        self.table, self.num_rows, self.num_keys = _slice_table(ranges), num_rows, num_keys
        self.number = next(_numbers)

    @cached_property
    def mask(self) -> AttnMask:
        """The mask.

        Raises:
            ValueError: an argument, named in the message, has a wrong value.
        """
        try:
            return AttnMask(self.table, self.num_rows, self.num_keys)
        except ValueError as error:
            raise ValueError(_renamed(str(error).removeprefix("slices: "))) from None


def ranges_of_tensors(ranges: Sequence[Tensor], num_rows: int, num_keys: int) -> HostRanges:
    """The ranges of tensors on the host or on a device; see `mask_of_ranges`."""
    if not any(t.is_cpu for t in ranges):
        return _device_ranges.ranges(ranges, num_rows, num_keys)
    return ranges_of_arrays([_array(t) for t in ranges], num_rows, num_keys)


def ranges_of_arrays(ranges: Sequence[np.ndarray], num_rows: int, num_keys: int) -> HostRanges:
    """The ranges ``[q_ranges, k_ranges]`` and maybe types of the host; one object for a content.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape or dtype.
    """
    key = (num_rows, num_keys, *((array.tobytes(), array.dtype, array.shape) for array in ranges))
    found = _ranges.get(key)
    if found is None:
        found = HostRanges(ranges, num_rows, num_keys)
        _ranges.put(key, found, 8 * found.table.nbytes)
    return found


def _renamed(message: str) -> str:
    """An error message of `AttnMask` about slices, with the name of the argument that they came from."""
    columns = dict(zip(("q_range", "k_range", "mask_type"), _NAMES, strict=True))
    return f"{columns.get(message.split()[0], 'q_ranges, k_ranges')}: {message}"


def _slice_table(ranges: Sequence[np.ndarray]) -> np.ndarray:
    for name, array in zip(_NAMES, ranges, strict=False):
        if array.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected integers, got {array.dtype}")
        if array.ndim == 0 or (array.dtype == np.uint64 and array.size and array.max() >= 1 << 63):
            raise ValueError(f"{name}: expected a list of integers of 64 bits, got {array}")
        wanted = (len(array),) if name == "attn_type_map" else (len(array), 2)
        if array.size and array.shape != wanted:
            raise ValueError(f"{name}: expected shape {['n', *wanted[1:]]}, got {list(array.shape)}")
    lengths = [len(array) for array in ranges]
    if len(set(lengths)) > 1:
        if len(lengths) == 2:
            lengths.append(lengths[0])
        raise ValueError(f"q_ranges, k_ranges, attn_type_map: lengths disagree: {', '.join(map(str, lengths))}")
    table = np.zeros((lengths[0], 5), dtype=np.int64)
    for columns, array in zip((slice(0, 2), slice(2, 4), 4), ranges, strict=False):
        if lengths[0]:
            table[:, columns] = array
    return table


class DeviceRanges:
    """Masks of ranges on a device, by the tensors' identity: layers share one copy to the host.

    A tensor is recognized if it is a view of the same elements of the same memory and its version counter is
    unchanged. Changes that do not increment the counter (through ``Tensor.data``, by foreign kernels, by the replay of
    a captured graph) are not noticed. Tensors made in inference mode have no counter and are copied each time.

    Args:
        max_items: masks that are kept, the least recently used one is dropped first.
    """

    def __init__(self, max_items: int = 64) -> None:
        self._ranges: LruCache[tuple, tuple[HostRanges, list[StorageWeakRef]]] = LruCache(_MAX_BYTES, max_items)

    def ranges(self, ranges: Sequence[Tensor], num_rows: int, num_keys: int) -> HostRanges:
        """The ranges ``[q_ranges, k_ranges]`` or ``[q_ranges, k_ranges, attn_type_map]`` on the host.

        Raises:
            ValueError: an argument, named in the message, has a wrong shape or dtype.
        """
        if any(t.is_inference() for t in ranges):
            return ranges_of_arrays(_to_host(ranges), num_rows, num_keys)
        key = (num_rows, num_keys, *(_identity(t) for t in ranges))
        found = self._ranges.get(key)
        if found is None:
            on_host = ranges_of_arrays(_to_host(ranges), num_rows, num_keys)
            # While a weak reference exists, no other storage gets its address, so a key never refers to another tensor.
            found = on_host, [StorageWeakRef(t.untyped_storage()) for t in ranges]
            self._ranges.put(key, found, 8 * on_host.table.nbytes)
        return found[0]


_masks: LruCache[tuple, AttnMask] = LruCache(_MAX_BYTES, _MAX_MASKS)
_ranges: LruCache[tuple, HostRanges] = LruCache(_MAX_BYTES, _MAX_MASKS)
_device_ranges = DeviceRanges()


def _identity(t: Tensor) -> tuple:
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version


def _array(t: Tensor) -> np.ndarray:
    if t.is_meta:
        raise ValueError("q_ranges, k_ranges, attn_type_map: a tensor is on the meta device")
    # Floats are refused by `_slice_table`; not all of them are known to numpy.
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy(force=True)


def _to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copies to host memory, in a single transfer if possible, as each one waits for the device."""
    if any(t.dtype not in _INTEGERS for t in tensors):
        return [_array(t) for t in tensors]
    flat = torch.cat([t.reshape(-1).to(torch.int64) for t in tensors]).cpu()
    parts = flat.split([t.numel() for t in tensors])
    return [part.numpy().reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _unpack(packed: np.ndarray, num_rows: int, num_keys: int) -> AttnMask:
    key = (packed[0, :4].tobytes(), num_rows, num_keys)
    mask = _masks.get(key)
    if mask is None:
        mask = AttnMask(packed[1 : 1 + int(packed[0, 4])], num_rows, num_keys)
        if mask.digest != key[0]:
            raise ValueError(f"mask_or_bands: the mask is not over {num_rows} x {num_keys} tokens, as q and k are")
        _masks.put(key, mask, mask.packed.nbytes)
    return mask
