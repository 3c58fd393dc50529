"""Plans and predictions of a matrix of masks, bit by bit as they were: a change that is only faster changes none.

After a change that is meant to change plans: `python -m tests.plan.test_plan_matrix` writes the file anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_magi.config import CommConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import make_plan
from megatron_magi.plan.chunks import ChunkedMask, chunk_bounds
from megatron_magi.plan.dispatch import candidates, predictions

from .test_plan import uneven_lengths

FILE = Path(__file__).with_name("plan_matrix.json")
COST = CostModel(num_heads_q=32, num_heads_kv=8)
MASKS = {
    "full": lambda: builders.full(6000),
    "causal": lambda: builders.causal(20_001),
    "window": lambda: builders.sliding_window(16_384, 1023, 0),
    "block causal": lambda: builders.block_causal(16_384, block_size=512),
    "8 documents": lambda: builders.varlen(doc_lengths=uneven_lengths(65_536, 8, 0)),
    "64 documents": lambda: builders.varlen(doc_lengths=uneven_lengths(16_384, 64, 1)),
    "300 documents": lambda: builders.varlen(doc_lengths=uneven_lengths(65_536, 300, 2), causal=False),
    "tree": lambda: builders.prefix_tree([4000, 3000, 3000, 500], [[0, 1], [0, 2], [0, 2, 3]])[0],
    "short": lambda: builders.causal(100),
}
CONFIGS = {
    "default": MagiConfig(),
    "32:8 heads": MagiConfig(overlap=OverlapConfig(cost=COST)),
    "stages": MagiConfig(overlap=OverlapConfig(one_launch=False, cost=COST)),
    "hidden tail": MagiConfig(overlap=OverlapConfig(hide_tail_reduce=True, cost=COST)),
    "no overlap": MagiConfig(overlap=OverlapConfig(degree=0)),
    "two stages": MagiConfig(overlap=OverlapConfig(degree=2, one_launch=False)),
    "uneven": MagiConfig(dispatch=DispatchConfig(uneven_shard=True), overlap=OverlapConfig(cost=COST)),
    "nodes of two": MagiConfig(overlap=OverlapConfig(cost=COST), comm=CommConfig(ranks_per_node=2)),
}

AT_HOME = ("runtime", "moves", "guest_rows", "head_groups")
"""Fields that say nothing of plans whose queries are computed where they are held."""


def parts_of(value: Any) -> Iterator[bytes]:
    """All that a value consists of."""
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, tuple):
        for part in value:
            yield from parts_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in AT_HOME:
                yield from parts_of(getattr(value, field.name))
    else:
        yield (value.hex() if isinstance(value, float) else repr(value)).encode()


def digest_of(mask: AttnMask, config: MagiConfig, cp_size: int) -> str:
    text, plan = hashlib.sha256(), make_plan(mask, config, cp_size)
    chunked = ChunkedMask(mask, chunk_bounds(mask.total_seqlen_q, cp_size, config.dispatch), cp_size)
    found = candidates(chunked, config.dispatch)
    predicted = predictions(found, chunked, config.dispatch, config.overlap, config.comm.ranks_per_node)
    assert plan.for_rank(0).moves is None and plan.head_groups == 1 and not any(plan.stats().guest_rows)
    what = plan.plan_hash, plan.dispatch, plan.stats(), plan.for_rank(0), plan.for_rank(cp_size - 1)
    for part in parts_of((*what, *predicted, *(tuple(p) for p in predicted.values()))):
        text.update(part)
    return text.hexdigest()[:16]


def cases() -> Iterator[tuple[str, str, int]]:
    for mask in MASKS:
        for config in CONFIGS:
            for cp_size in (1, 2, 3, 8):
                if config != "nodes of two" or cp_size % 2 == 0:
                    yield mask, config, cp_size


@pytest.mark.parametrize("mask", MASKS)
def test_plans_and_predictions_are_those_of_before(mask):
    known = json.loads(FILE.read_text())
    made = MASKS[mask]()
    wrong = {
        (config, cp_size)
        for name, config, cp_size in cases()
        if name == mask and digest_of(made, CONFIGS[config], cp_size) != known[f"{mask}, {config}, {cp_size}"]
    }
    assert not wrong


if __name__ == "__main__":
    found = {f"{name}, {c}, {cp}": digest_of(MASKS[name](), CONFIGS[c], cp) for name, c, cp in cases()}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
