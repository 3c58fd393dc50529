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
        script.read_options(["gpt_103m_4k", "--out", "folder", "--lr", "1e-4"])
    assert "--lr" in capsys.readouterr().err


def test_one_seed_is_no_band(script: ModuleType, capsys) -> None:
    with pytest.raises(SystemExit):
        script.read_options(["gpt_103m_4k", "--out", "folder", "--seeds", "7", "7"])
    assert "--seeds" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "2"])
def test_a_control_over_the_ranks_of_the_others_is_refused(script: ModuleType, capsys, ranks: str) -> None:
    with pytest.raises(SystemExit):
        script.main(["tiny_128", "--out", "unused", "--ranks", "2", "--control-ranks", ranks])
    assert "argument --control-ranks: positive numbers other than the 2" in capsys.readouterr().err


def test_stock_is_trained_over_other_ranks_too_where_that_is_asked(script: ModuleType, monkeypatch, tmp_path) -> None:
    started = []
    monkeypatch.setattr(script, "train", lambda name, arguments, ranks, out: started.append((name, ranks, arguments)))
    monkeypatch.setattr(script.curves, "report", lambda folder, title: 0)
    options = ["--ranks", "2", "--cp-sizes", "2", "--seeds", "1", "2", "--control-ranks", "1"]
    assert script.main(["tiny_128", "--out", str(tmp_path), "--data-path", "data", *options]) == 0
    runs = {name: (ranks, arguments) for name, ranks, arguments in started}
    assert runs["stock_ranks_1_seed_2"] == (1, runs["stock_seed_2"][1])
    assert [name for name, ranks, _ in started if ranks == 1] == ["stock_ranks_1_seed_1", "stock_ranks_1_seed_2"]


def test_each_attention_is_trained_with_each_seed(script: ModuleType, monkeypatch, tmp_path: Path) -> None:
    asked = {}
    monkeypatch.setattr(script, "train", lambda name, arguments, ranks, out: asked.update({name: (arguments, ranks)}))
    monkeypatch.setattr(script, "data_args", lambda path, out: [])
    monkeypatch.setattr(script.curves, "report", lambda folder, title: 0)
    command = ["tiny_128", "--out", str(tmp_path), "--ranks", "2", "--cp-sizes", "2", "--seeds", "5", "6"]
    assert script.main(command) == 0
    assert list(asked) == ["stock_seed_5", "magi_cp2_seed_5", "stock_seed_6", "magi_cp2_seed_6"]
    for name, (arguments, ranks) in asked.items():
        assert arguments[arguments.index("--seed") + 1] == name[-1]
        is_magi = name.startswith("magi")
        assert ("magi" in arguments, ranks) == (is_magi, 2)
        # Of sequences half as long there are twice as many.
        assert arguments[-2:] == ["--micro-batch-size", "2"] if is_magi else "--micro-batch-size" not in arguments


def test_a_microbatch_that_is_given_is_that_of_all_runs(script: ModuleType) -> None:
    assert script.sequences_of("tiny_128", []) == 1
    assert script.sequences_of("tiny_128", ["--micro-batch-size", "3", "--lr", "1", "--micro-batch-size=4"]) == 4


def test_masks_that_transformer_engine_does_not_read_are_not_made(script: ModuleType, monkeypatch) -> None:
    unread = "--no-create-attention-mask-in-dataloader"
    for has, expected in ((True, (True, False)), (False, (False, True))):
        monkeypatch.setattr(script, "has_transformer_engine", lambda has=has: has)
        found = script.layers()
        assert (unread in found, "--transformer-impl" in found) == expected
