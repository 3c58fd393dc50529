"""The log of losses: where it is written, and what it says of plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.mcore.loss_log import LossLog, _summary
from megatron_magi.plan import PlanStats


def test_the_folder_is_made_before_training_or_refused_by_name(tmp_path: Path) -> None:
    LossLog(tmp_path / "runs" / "one" / "losses.jsonl")
    assert (tmp_path / "runs" / "one").is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "losses.jsonl", tmp_path):
        with pytest.raises(ValueError, match=rf"^magi_loss_log: cannot append to {path}: "):
            LossLog(path)


def test_plans_of_an_iteration_are_added_up_but_for_the_worst_balance_and_degree() -> None:
    one = PlanStats((10, 30), 1.5, (4, 4), guest_rows=(0, 0), received_rows=(3, 5), lower_bound_rows=(3, 2), degree=1)
    other = PlanStats((20, 20), 1.0, (4, 4), guest_rows=(0, 0), received_rows=(1, 0), lower_bound_rows=(1, 0), degree=2)
    assert _summary([one, other]) == {
        "num_plans": 2,
        "balance": 1.5,
        "areas": [30, 50],
        "received_rows": 9,
        "lower_bound_rows": 6,
        "degree": 2,
    }
    assert _summary([]) == {}
