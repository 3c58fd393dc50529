"""The slots for rows: their size, row layout and chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megatron_magi.comm.peer_tables import CHUNK_ROWS
from megatron_magi.comm.peers import PeerMemory
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import MOST_TENSORS, WIDEST

MOST_BYTES = 1 << 30
"""Most bytes of a slot, of which a rank has two; calls that need more use another implementation."""
MAX_CHUNKS = 1 << 16
"""Most chunks of a slot, kMaxChunks of peers.cuh: more than the largest slot can have."""
_LEAST_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10  # approximate size of a chunk, which has one flag
_LEAST_CHUNK_BYTES, _CHUNKS = 8 << 10, 128  # for few rows: smaller chunks, so that all threads take part
_MAX_FITTING = 1024


class Room:
    """The slots of a group, which grow when a call needs more. Every rank makes the same requests.

    Slots that captured CUDA graphs refer to stay where they are; then larger ones are allocated beside them.

    Args:
        captures: whether a graph is being captured, when memory cannot grow.

    Attributes:
        most_bytes: most bytes of a slot.
        stays: graphs refer to the present slots.
    """

    def __init__(self, memory: PeerMemory, captures: Callable[[], bool] = lambda: False) -> None:
        self._memory, self._captures = memory, captures
        self._stayed = False  # graphs refer to earlier slots
        self._fitting: dict[tuple[int, int | None], RowLayout] = {}  # by identity, for a fast lookup
        self._failure: str | None = None
        self.most_bytes, self.stays = MOST_BYTES, False

    @property
    def has_graphs(self) -> bool:
        """Whether graphs refer to slots."""
        return self.stays or self._stayed

    def forget_graphs(self) -> None:
        """No graph is left: slots that only they referred to are freed when the slots grow again."""
        self.stays = self._stayed = False
        self._memory.forget_kept()

    def refusal(self, layout: RowLayout, most_rows: int | None) -> str | None:
        """See `megatron_magi.comm.impl.native.Native.refusal`.

        Raises:
            RuntimeError: ranks did not take part in an allocation, now or earlier.
        """
        if (id(layout), most_rows) in self._fitting:
            return None
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if most_rows is None:
            return "needs args that were built with peers"
        if len(layout.sizes) > MOST_TENSORS:
            return f"moves at most {MOST_TENSORS} tensors at once, got {len(layout.sizes)}"
        row_bytes = slot_row_bytes(layout)
        num_bytes = row_bytes * most_rows
        if num_bytes > self.most_bytes:
            return f"moves at most {self.most_bytes} bytes a rank, got {most_rows} rows of {row_bytes}"
        if num_bytes > self._memory.slot_bytes or not self._memory.slot_bytes:
            wanted = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            if self._captures():
                has = f"has room for {self._memory.slot_bytes} bytes"
                return f"{has}, which cannot grow while a CUDA graph is captured, not for {num_bytes}"
            if wanted > self.most_bytes:
                return f"has no room for {wanted} bytes"
            before = self._memory.slot_bytes
            self._fitting.clear()
            try:
                reason = self._memory.grow(wanted, self.stays)
            except RuntimeError as error:  # ranks no longer know the slots of the others
                self._failure = str(error)
                raise
            if reason is not None:
                self.most_bytes = before
                return f"has no room for {wanted} bytes: {reason}"
            self._stayed, self.stays = self.has_graphs, False
        if len(self._fitting) >= _MAX_FITTING:
            self._fitting.clear()
        self._fitting[id(layout), most_rows] = layout
        return None


def most_rows(layout: RowLayout) -> int:
    """Rows that fit in the largest slot."""
    return MOST_BYTES // slot_row_bytes(layout)


@lru_cache(maxsize=64)
def slot_row_bytes(layout: RowLayout) -> int:
    """Bytes of a row in a slot: its tensors concatenated, with padding after the last."""
    return max(-(-sum(layout.sizes) // WIDEST), 1) * WIDEST


def chunk_shift(row_bytes: int) -> int:
    """Log2 of the rows of a chunk of published rows."""
    return max(_CHUNK_BYTES // row_bytes, CHUNK_ROWS).bit_length() - 1


def sent_shift(row_bytes: int, most_rows: int) -> int:
    """Log2 of the rows of a chunk in the slot of another rank, which receives up to ``most_rows``."""
    num_bytes = min(max(row_bytes * most_rows // _CHUNKS, _LEAST_CHUNK_BYTES), _CHUNK_BYTES)
    return max(num_bytes // row_bytes, 1).bit_length() - 1
