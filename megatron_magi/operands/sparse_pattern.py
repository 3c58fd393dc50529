"""Which keys a query sees, as lists or a mask of blocks that may live on a GPU and change with every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_magi.checks import flag, int_at_least

_INTEGERS = (torch.int32, torch.int64)
K_BLOCKS = (64, 128)
MAX_Q_BLOCK = 128


@dataclass(frozen=True, eq=False)
class SparsePattern:
    """A checked pattern of visible keys.

    Attributes:
        tensors: one of ``(mask,)``, bool ``[lists, num_q_blocks, num_k_blocks]``; ``(entries,)``, int ``[lists,
            num_q_blocks, width]``; ``(offsets, entries)``, int ``[lists, num_q_blocks + 1]`` and ``[n]``. ``lists`` is
            num_heads_kv, or 1 for all. An entry is the number of a block of keys; one that is no such number, as -1,
            is passed over; one that is given twice counts twice.
        q_block, k_block: tokens of a block; a ``k_block`` of 1 means lists of single keys.
        causal: query i sees no key after ``i + num_keys - num_rows``.
    """

    tensors: tuple[Tensor, ...]
    q_block: int
    k_block: int
    causal: bool

    @classmethod
    def of_keys(cls, entries: Tensor) -> SparsePattern:
        """Lists of single keys, int ``[lists, num_rows, width]``."""
        return cls((entries,), q_block=1, k_block=1, causal=False)

    @property
    def num_lists(self) -> int:
        """Key heads with lists of their own, or 1."""
        return self.tensors[0].shape[0]

    @property
    def is_mask(self) -> bool:
        """Whether it is a mask."""
        return self.tensors[0].dtype == torch.bool


def num_blocks(tokens: int, block: int) -> int:
    """Number of blocks of ``block`` tokens; the last may be short."""
    return -(-tokens // block)


def sorted_into(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of ``numbers``, int of any shape, by their value, and of equal ones as they come; and where each value
    begins.

    Args:
        count: values 0 to ``count`` - 1 are looked for; numbers that are not wanted are ``count``.

    Returns:
        ``(order, starts)``: places in the flat tensor, int64 ``[numbers.numel()]``; int64 ``[count + 1]``: those of
        value i are ``order[starts[i] : starts[i + 1]]``.
    """
    found, order = torch.sort(numbers.flatten(), stable=True)
    values = torch.arange(count + 1, dtype=numbers.dtype, device=numbers.device)
    return order, torch.searchsorted(found, values)


def block_pattern(blocks: Any, q: Tensor, k: Tensor, q_block: int, k_block: int, causal: bool) -> SparsePattern:
    """Checks the arguments of `block_sparse_attention`.

    Raises:
        ValueError: one is wrong; the message begins with its name.
    """
    q_block = int_at_least(q_block, "q_block_size", 1)
    if q_block > MAX_Q_BLOCK:
        raise ValueError(f"q_block_size: expected at most {MAX_Q_BLOCK}, got {q_block}")
    if int_at_least(k_block, "k_block_size", 1) not in K_BLOCKS:
        raise ValueError(f"k_block_size: expected one of {K_BLOCKS}, got {k_block!r}")
    flag(causal, "causal")
    rows, columns = num_blocks(q.shape[0], q_block), num_blocks(k.shape[0], k_block)
    if isinstance(blocks, tuple):
        tensors = _checked_csr(blocks, rows, q, k)
    else:
        tensors = (_checked_lists(blocks, rows, columns, q, k),)
    return _look(SparsePattern(tensors, q_block, int(k_block), causal), k.shape[0])


def index_pattern(indices: Any, q: Tensor, k: Tensor) -> SparsePattern:
    """Checks the argument of `index_sparse_attention`.

    Raises:
        ValueError: it is wrong; the message begins with its name.
    """
    shape = getattr(indices, "shape", ())
    is_fit = len(shape) == 3 and shape[0] == q.shape[0] and shape[1] in (1, k.shape[1])
    if not isinstance(indices, Tensor) or indices.dtype not in _INTEGERS or not is_fit:
        got = f"{indices.dtype} {list(shape)}" if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"indices: expected int32 or int64 [{q.shape[0]}, {k.shape[1]} or 1, topk], got {got}")
    _check_device("indices", indices, q)
    return _look(SparsePattern.of_keys(indices.transpose(0, 1)), k.shape[0])


def _checked_lists(blocks: Any, rows: int, columns: int, q: Tensor, k: Tensor) -> Tensor:
    """``[lists, rows, columns]``, of a mask or lists that may lack the first dimension."""
    if not isinstance(blocks, Tensor):
        raise ValueError(f"blocks: expected a tensor, or a tuple of two, got {type(blocks).__name__}")
    if blocks.dtype not in (torch.bool, *_INTEGERS):
        raise ValueError(f"blocks: expected bool, int32 or int64, got {blocks.dtype}")
    _check_device("blocks", blocks, q)
    is_mask = blocks.dtype == torch.bool
    lists = blocks[None] if blocks.ndim == 2 else blocks
    fits = lists.ndim == 3 and lists.shape[0] in (1, k.shape[1]) and lists.shape[1] == rows
    if not fits or (is_mask and lists.shape[2] != columns):
        what = f"{rows}, {columns if is_mask else 'topk'}]"
        raise ValueError(f"blocks: expected shape [{what} or [{k.shape[1]} or 1, {what}, got {list(blocks.shape)}")
    return lists


def _checked_csr(blocks: tuple, rows: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if len(blocks) != 2 or not all(isinstance(x, Tensor) for x in blocks):
        raise ValueError("blocks: expected a tensor, or a tuple of two: offsets and numbers of blocks")
    offsets, entries = blocks
    if offsets.dtype not in _INTEGERS or entries.dtype not in _INTEGERS:
        raise ValueError(f"blocks: expected int32 or int64, got {offsets.dtype} and {entries.dtype}")
    _check_device("blocks", offsets, q)
    _check_device("blocks", entries, q)
    offsets = offsets[None] if offsets.ndim == 1 else offsets
    if offsets.ndim != 2 or offsets.shape[0] not in (1, k.shape[1]) or offsets.shape[1] != rows + 1:
        raise ValueError(
            f"blocks: expected offsets [{rows + 1}] or [{k.shape[1]}, {rows + 1}], got {list(blocks[0].shape)}"
        )
    if entries.ndim != 1:
        raise ValueError(f"blocks: expected numbers of blocks in one dimension, got {list(entries.shape)}")
    return offsets, entries


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}")


def _look(pattern: SparsePattern, num_keys: int) -> SparsePattern:
    """Checks what the tensors hold, but not of those on a GPU: that would wait for it."""
    if pattern.tensors[-1].device.type == "cpu" and not torch.compiler.is_compiling():
        check_numbers(pattern, num_keys)
    return pattern


def check_numbers(pattern: SparsePattern, num_keys: int) -> None:
    """Checks the entries and offsets of lists.

    Raises:
        ValueError: an entry is after the last block of keys, or offsets decrease or are out of range.
    """
    entries, columns = pattern.tensors[-1], num_blocks(num_keys, pattern.k_block)
    if len(pattern.tensors) == 2:
        offsets, n = pattern.tensors[0], entries.shape[0]
        if bool((offsets[:, 0] < 0).any() or (offsets.diff() < 0).any() or (offsets[:, -1] > n).any()):
            raise ValueError(f"blocks: expected offsets that never fall and lie in 0 to {n}")
        entries = entries[_listed(offsets, n)]
    if not pattern.is_mask and entries.numel() and int(entries.max()) >= columns:
        name = "indices" if pattern.k_block == 1 else "blocks"
        raise ValueError(f"{name}: expected numbers below {columns}, got {int(entries.max())}")


def _listed(offsets: Tensor, n: int) -> Tensor:
    """Which of ``n`` entries are in a list, of any head; those between the heads' lists are not."""
    changes = torch.zeros(n + 1, dtype=torch.int32, device=offsets.device)
    one = changes.new_ones(len(offsets))
    changes.index_add_(0, offsets[:, 0].long(), one).index_add_(0, offsets[:, -1].long(), -one)
    return changes[:-1].cumsum(0, dtype=torch.int32) > 0
