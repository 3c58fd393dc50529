"""Tables of a new mask that go to a device in one copy: nothing reads them before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi import api
from megatron_magi.config import CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.runtime import upload
from tests import forced

HEADS, DIM = (4, 2, 2), 8
LENGTHS = ([16, 24], [1, 31, 8], [64], [7, 9, 5, 2, 30])


class _Apart(upload._Block):
    """On a device of its own, as a GPU's memory is; until the copy it holds numbers that are no index of anything."""

    def _begin(self) -> None:
        self._memory = torch.full((self.room,), 0x7F, dtype=torch.uint8)
        self._staging = torch.zeros(self.room, dtype=torch.uint8)


class _NoRoom(dict):
    """Every upload goes by itself."""

    def get(self, device: object, default: object = None) -> int:
        return 0

    def __setitem__(self, device: object, room: int) -> None:
        pass


CONFIGS = (
    MagiConfig(),
    MagiConfig(overlap=OverlapConfig(degree=2)),
    MagiConfig(comm=CommConfig(ranks_per_node=2)),
    MagiConfig(dispatch=DispatchConfig(queries="travel")),
)
LAYOUTS = (None, None, None, "contiguous")


def results(rank: int) -> list[torch.Tensor]:
    """Outputs and gradients of new keys, of each configuration."""
    found = []
    for config, layout in zip(CONFIGS, LAYOUTS, strict=True):
        for seed, lengths in enumerate(LENGTHS):
            bounds = np.append(0, np.cumsum(lengths)).tolist()
            key = api.magi_attn_varlen_key(
                bounds, bounds, *HEADS[:2], DIM, causal=True, cp_group_or_mesh=dist.group.WORLD,
                dist_attn_config=config, layout=layout,
            )  # fmt: skip
            num_rows, draw = len(api.get_position_ids(key)), torch.Generator().manual_seed(100 * rank + seed)
            *qkv, dout = (torch.randn(num_rows, n, DIM, generator=draw, dtype=forced.DTYPE) for n in (*HEADS, HEADS[0]))
            qkv = [t.requires_grad_() for t in qkv]
            out, meta = api.calc_attn(*qkv, key)
            found += [out.detach(), meta.lse, *torch.autograd.grad(out, qkv, dout)]
    return found


def compare(rank: int, num_ranks: int) -> int:
    """Results with gathered uploads equal those of uploads that go alone; returns how many blocks were sent."""
    sent, send = [], _Apart.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "_rooms", _NoRoom())
        alone = results(rank)
    api.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "_rooms", {})
        patch.setattr(upload, "_Block", _Apart)
        patch.setattr(_Apart, "send", lambda self: (sent.append(self._end), send(self)))
        together = results(rank)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)
    return sum(map(bool, sent))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nothing_reads_tables_before_they_are_sent(ranks, num_ranks: int) -> None:
    assert sum(ranks(num_ranks, compare)) >= len(CONFIGS)  # some ranks have no tables
