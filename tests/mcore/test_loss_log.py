"""The log of losses: where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.mcore.loss_log import LossLog


def test_the_folder_is_made_before_training_or_refused_by_name(tmp_path: Path) -> None:
    LossLog(tmp_path / "runs" / "one" / "losses.jsonl")
    assert (tmp_path / "runs" / "one").is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "losses.jsonl", tmp_path):
        with pytest.raises(ValueError, match=rf"^magi_loss_log: cannot append to {path}: "):
            LossLog(path)
