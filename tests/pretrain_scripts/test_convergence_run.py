"""What the script of convergence runs makes of its command line."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "pretrain_scripts" / "convergence"


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("pretrain_scripts.convergence.run")


def test_what_follows_two_dashes_goes_to_megatron(script: ModuleType) -> None:
    own = ["llama_1b_8k", "--out", "folder", "--data-path", "prefix", "--cp-sizes", "1", "2"]
    further = ["--tokenizer-type", "HuggingFaceTokenizer", "--out", "1"]
    options = script.read_options([*own, "--", *further])
    assert (options.setting, options.out, options.data_path) == ("llama_1b_8k", Path("folder"), "prefix")
    assert options.cp_sizes == [1, 2]
    assert options.megatron == further
    assert script.read_options(own).megatron == []


def test_argument_of_megatron_before_the_dashes_is_refused(script: ModuleType, capsys) -> None:
    with pytest.raises(SystemExit):
        script.read_options(["gpt_114m_2k", "--out", "folder", "--lr", "1e-4"])
    assert "--lr" in capsys.readouterr().err


def test_masks_that_transformer_engine_does_not_read_are_not_made(script: ModuleType, monkeypatch) -> None:
    unread = "--no-create-attention-mask-in-dataloader"
    for has, expected in ((True, (True, False)), (False, (False, True))):
        monkeypatch.setattr(script, "has_transformer_engine", lambda has=has: has)
        found = script.layers()
        assert (unread in found, "--transformer-impl" in found) == expected
