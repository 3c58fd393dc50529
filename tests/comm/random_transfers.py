"""Random transfers that all ranks can make from a seed, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_magi.comm.group_collective import Args, GroupCastArgs, group_cast
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.comm.rows import Arrivals, arrival_arrays


@dataclass(frozen=True)
class Transfers:
    """Who sends which rows to whom. ``rows[i][j]``: rows of rank i that rank j receives, in order."""

    num_rows: list[int]
    rows: list[list[np.ndarray]]
    recv_order: list[np.ndarray | None]

    def args(self, rank: int, device: torch.device | str = "cpu") -> GroupCastArgs:
        num_ranks = len(self.rows)
        return GroupCastArgs.build(
            np.concatenate(self.rows[rank]),
            [len(self.rows[rank][j]) for j in range(num_ranks)],
            [len(self.rows[i][rank]) for i in range(num_ranks)],
            self.recv_order[rank],
            device,
            self.peers(rank),
        )

    def peers(self, rank: int) -> PeerRows:
        """The other side of each row that ``rank`` receives, and sends."""
        num_ranks = len(self.rows)
        counts = np.array([[len(rows) for rows in to] for to in self.rows])
        sent = [row for rows in self.rows for some in rows for row in some.tolist()]
        return PeerRows(
            np.concatenate([self.rows[i][rank] for i in range(num_ranks)]),
            counts[:rank].sum(axis=0).tolist(),
            counts[:, :rank].sum(axis=1).tolist(),
            max(sent, default=-1) + 1,
            int(counts.sum(axis=0).max()),
            int(counts.sum(axis=1).max()),
        )

    def expected(self, everyone: list[torch.Tensor], rank: int) -> torch.Tensor:
        """What ``rank`` must receive when rank i holds ``everyone[i]``."""
        parts = [everyone[i][torch.from_numpy(self.rows[i][rank])] for i in range(len(self.rows))]
        received = torch.cat(parts)
        order = self.recv_order[rank]
        return received if order is None else received[torch.from_numpy(order)]


def random_transfers(num_ranks: int, seed: int, with_order: bool) -> Transfers:
    """Rows go to several ranks, to one, to none; some pairs exchange nothing; one rank may be idle."""
    rng = np.random.default_rng(seed)
    num_rows = rng.integers(1, 12, num_ranks).tolist()
    rows = [[np.zeros(0, dtype=np.int64)] * num_ranks for _ in range(num_ranks)]
    idle = int(rng.integers(0, num_ranks)) if seed % 2 else None
    for i in range(num_ranks):
        for j in range(num_ranks):
            if i == j or idle in (i, j) or rng.random() < 0.2:
                continue
            rows[i][j] = rng.permutation(num_rows[i])[: rng.integers(0, num_rows[i] + 1)].astype(np.int64)
    recv = [sum(len(rows[i][j]) for i in range(num_ranks)) for j in range(num_ranks)]
    order = [rng.permutation(n).astype(np.int64) if with_order else None for n in recv]
    return Transfers(num_rows, rows, order)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous(), b.contiguous())


def check_casts(
    transfers: Transfers,
    args: Args,
    rank: int,
    kinds: Sequence[tuple[tuple[int, ...], torch.dtype]],
    impls: Sequence[str],
    device: torch.device | str,
) -> int:
    """Casts bring the right bits; returns the number of comparisons. ``kinds``: shape and dtype of a tensor's rows."""
    everyone = [
        [random_tensor((n, *shape), dtype, 10 * r + i) for r, n in enumerate(transfers.num_rows)]
        for i, (shape, dtype) in enumerate(kinds)
    ]
    for impl in impls:
        mine = [x[rank].clone().to(device) for x in everyone]
        handle = group_cast(mine, args, impl=impl)
        for x in mine:
            x.zero_()  # what was sent may be overwritten at once
        for got, source, kind in zip(handle.wait(), everyone, kinds, strict=True):
            assert same_bits(got.cpu(), transfers.expected(source, rank)), (kind, impl)
    return len(kinds) * len(impls)


def arrivals_of(local_rows: np.ndarray, device: str) -> Arrivals:
    """Which of the arriving rows, owned by ``local_rows``, belong to which row."""
    *arrays, levels = arrival_arrays(local_rows)
    return Arrivals(*(torch.from_numpy(a).to(device) for a in arrays), levels)
