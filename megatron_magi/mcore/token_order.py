"""The order of tokens for layers that run through them: Megatron's linear layers (Mamba, gated delta nets).

Under context parallelism these layers exchange tokens for heads: each rank gets all tokens of some heads, one rank's
rows after another, brings them into the order of the sequence, and back again afterwards. Megatron does it for zigzag;
one gather does it for any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class TokenOrder(PackedSeqParams):
    """`PackedSeqParams` as Megatron's linear layers read them, with the order of the rows.

    ``cu_seqlens_q``: int32 ``[num_documents + 1]``, bounds of the documents in the sequence of all tokens, the padding
    at its end being one of them; the state begins anew at each. ``seq_idx``: int32 ``[1, num_tokens]``, each token's
    document, once `number_documents` has been called; None if there is one.

    Attributes:
        positions: int32 ``[num_tokens]``, position in the sequence of each of the rows of all ranks, one rank's after
            another, as `layout.positions_of_rows` makes them; None if they are in order.
        num_tokens: of all ranks, padding included.
    """

    positions: Tensor | None = field(default=None, repr=False)
    num_tokens: int = 0
    _places: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_arrays(cls, named: Mapping[str, Tensor], num_tokens: int) -> TokenOrder | None:
        """Of ``order_bounds`` and ``order_positions`` on the device where the layers run; None without the first."""
        bounds = named.get("order_bounds")
        if bounds is None:
            return None
        return cls("thd", bounds, bounds, positions=named.get("order_positions"), num_tokens=num_tokens)

    @property
    def places(self) -> Tensor | None:
        """The inverse of `positions`, made on first use."""
        if self._places is None and self.positions is not None:
            rows = torch.arange(self.num_tokens, dtype=torch.int32, device=self.positions.device)
            self._places = torch.empty_like(self.positions).scatter_(0, self.positions.long(), rows)
        return self._places

    def number_documents(self) -> None:
        """Makes ``seq_idx``, which Mamba reads."""
        bounds = self.cu_seqlens_q
        if self.seq_idx is None and len(bounds) > 2:
            tokens = torch.arange(self.num_tokens, dtype=torch.int32, device=bounds.device)
            self.seq_idx = torch.bucketize(tokens, bounds[1:], out_int32=True, right=True).unsqueeze(0)

    def sort(self, rows: Tensor) -> Tensor:
        """``[num_tokens, ...]``, the rows of all ranks, in the order of the sequence."""
        return rows if self.positions is None else _Permute.apply(rows, self.places, self.positions)

    def unsort(self, tokens: Tensor) -> Tensor:
        """The inverse of `sort`."""
        return tokens if self.positions is None else _Permute.apply(tokens, self.positions, self.places)


class _Permute(torch.autograd.Function):
    """Rows ``source`` of ``x``, where each is taken once: its gradient is a gather too, not a sum at addresses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return dout.index_select(0, *ctx.saved_tensors), None, None
