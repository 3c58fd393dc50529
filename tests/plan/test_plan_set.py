"""Several masks over one dispatch."""

from __future__ import annotations

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask.builders import causal, full, sliding_window
from megatron_magi.plan import PlanSet, make_plan

MASKS = {"causal": causal(64), "full": full(64), "window": sliding_window(64, left=3, right=0)}


def _set(*keys: str, made: list | None = None) -> PlanSet[str]:
    def make(key: str) -> AttnMask:
        if made is not None:
            made.append(key)
        return MASKS[key]

    return PlanSet(make, keys, MagiConfig(), 0, 2)


def test_masks_are_made_at_once_and_share_the_dispatch_of_the_first() -> None:
    made: list[str] = []
    plans = _set("causal", "window", made=made)
    assert made == ["causal", "window"]
    assert plans.plan.mask == MASKS["causal"]
    expected = make_plan(MASKS["window"], MagiConfig(), 2, plans.dispatch)
    assert plans.of("window").plan_hash == expected.plan_hash and plans.of("window") is plans.of("window")
    assert plans.of("full").area > plans.of("causal").area > plans.of("window").area
    assert made == ["causal", "window", "full"]


def test_fingerprint_knows_every_mask() -> None:
    prints = {_set(*keys).fingerprint for keys in (["causal"], ["causal", "full"], ["causal", "window"], ["full"])}
    assert len(prints) == 4
    assert _set("causal", "full").fingerprint in prints
    assert all(0 <= value < 1 << 63 for value in prints)


def test_a_mask_that_cannot_be_made_is_told_at_once() -> None:
    with pytest.raises(KeyError):
        _set("causal", "nothing")
