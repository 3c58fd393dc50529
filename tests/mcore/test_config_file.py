"""`--config FILE` before Megatron sees the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.mcore.argv import rewrite_argv
from megatron_magi.mcore.config_file import expand_config

EXAMPLE = """\
seq-length: 4096        # tokens
lr: 3e-4
bf16: true
swiglu: false
attention-backend: magi
recompute-modules: [mlp, core_attn]
no-rope-fusion: true
split: 1,0,0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(EXAMPLE)
    return path


def _options(argv: list[str]) -> list[str]:
    return [argument.partition("=")[0] for argument in argv if argument.startswith("--")]


def test_entries_become_arguments_as_written_before_those_of_the_command_line(file: Path) -> None:
    out = expand_config(["--save", "here", f"--config={file}"])
    assert out == [
        *("--seq-length=4096", "--lr=3e-4", "--bf16", "--attention-backend=magi"),
        *("--recompute-modules", "mlp", "core_attn", "--no-rope-fusion", "--split=1,0,0", "--save", "here"),
    ]
    assert expand_config(out) == out


def test_dollars_and_tildes_that_no_shell_replaces_are_kept(file: Path) -> None:
    file.write_text("wandb-exp-name: a$ ~b~/\nsave: a/~/b\n")
    assert expand_config(["--config", str(file)]) == ["--wandb-exp-name=a$ ~b~/", "--save=a/~/b"]


def test_command_line_wins(file: Path) -> None:
    out = expand_config(["--config", str(file), "--lr", "1", "--recompute-modules", "moe", "--seq-length=8"])
    assert out[-5:] == ["--lr", "1", "--recompute-modules", "moe", "--seq-length=8"]
    assert [_options(out).count(name) for name in ("--lr", "--recompute-modules", "--seq-length")] == [1, 1, 1]


def test_command_line_wins_by_another_option_for_the_same_thing(file: Path) -> None:
    file.write_text("save-interval: 5\n")
    out = expand_config(["--config", str(file), "--persistent-save-interval", "7"])
    assert out == ["--persistent-save-interval", "7"]


def test_another_attention_backend_wins_over_magi(file: Path) -> None:
    out = rewrite_argv(expand_config(["--config", str(file), "--attention-backend", "flash"]))
    assert "--magi-attention" not in out
    assert out[-2:] == ["--attention-backend", "flash"]


def test_flag_of_the_file_is_taken_back(file: Path) -> None:
    out = expand_config(["--config", str(file), "--bf16=false", "--swiglu=true"])
    assert "--bf16" not in _options(out)
    assert out[-1] == "--swiglu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq-lenght: 1", "seq-lenght: no such argument; did you mean seq-length"),
        ("seq_length: 1", "seq_length: no such argument; did you mean seq-length"),
        ("config: a.yaml", "config: no such argument"),
        ("seq-length: 1\nlr: 1\nseq-length: 2", "seq-length: is there twice, again in line 3"),
        ("seq-length: long", "seq-length: argument --seq-length: invalid int value: 'long'"),
        ("attention-backend: mage", "attention-backend: .*mage"),
        ("normalization: BatchNorm", "normalization: argument --normalization: invalid choice"),
        ("bf16: yes", "bf16: is a flag, expected true or false, got 'yes'"),
        ("seq-length:", "seq-length: expected a value"),
        ("lr: {a: 1}", "lr: expected a value"),
        ("lr: [1, 2]", "lr: unrecognized arguments: 2"),
        ("- seq-length", "expected lines of 'name: value'"),
        ("a: [", "is not YAML"),
        (
            "save: ${oc.env:HOME}/run",
            r"save: \$\{oc.env:HOME\} in '.*/run' is not replaced here; write the value out, or",
        ),
        ("data-path: [0.5, $DATA/a]", r"data-path: \$DATA in '\$DATA/a' is not replaced here"),
        ("save: $(pwd)/run", r"save: \$\(pwd\) in .* is not replaced here"),
        ("save: ~/run", "save: ~ in '~/run' is not replaced here"),
    ],
)
def test_mistake_is_an_error_that_names_file_and_entry(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^config: {file}: {message}"):
        expand_config(["--config", str(file)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config"], "expected a file"),
        (["--config", "--bf16"], "expected a file"),
        (["--config", "missing.yaml"], "missing.yaml: No such file"),
        (["--config", "a.yaml", "--config=b.yaml"], "given more than once: a.yaml, b.yaml"),
    ],
)
def test_option_without_one_readable_file_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        expand_config(argv)


def test_without_the_option_nothing_changes() -> None:
    argv = ["--lr", "1", "--bf16=false", "config"]
    assert expand_config(argv) == argv
