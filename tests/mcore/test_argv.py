"""The command line before Megatron sees it."""

from __future__ import annotations

import pytest

from megatron_magi.mcore.argv import rewrite_argv
from megatron_magi.mcore.versions import check_version


@pytest.mark.parametrize("given", [["--attention-backend", "magi"], ["--attention-backend=magi"]])
def test_magi_becomes_auto_and_a_flag(given: list[str]) -> None:
    out = rewrite_argv(["--lr", "1", *given, "--bf16"])
    assert out == ["--lr", "1", "--attention-backend", "auto", "--bf16", "--magi-attention"]


@pytest.mark.parametrize(
    "argv", [[], ["--attention-backend", "flash"], ["--save", "magi", "--bf16"], ["--data-path", "--attention-backend"]]
)
def test_other_command_lines_keep_their_meaning(argv: list[str]) -> None:
    assert "--magi-attention" not in rewrite_argv(argv)


def test_rewriting_twice_changes_nothing() -> None:
    once = rewrite_argv(["--attention-backend", "magi"])
    assert rewrite_argv(once) == once


def test_the_flag_alone_is_enough() -> None:
    assert rewrite_argv(["--magi-attention"]) == ["--attention-backend", "auto", "--magi-attention"]


def test_two_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="attention_backend: given as magi and as flash"):
        rewrite_argv(["--attention-backend", "flash", "--attention-backend", "magi"])


def test_auto_after_magi_is_another_backend_and_before_it_is_none() -> None:
    with pytest.raises(ValueError, match="attention_backend: given as magi and as auto"):
        rewrite_argv(["--attention-backend", "magi", "--attention-backend", "auto"])
    both = rewrite_argv(["--attention-backend", "auto", "--attention-backend=magi"])
    assert both == ["--attention-backend", "auto", "--attention-backend", "auto", "--magi-attention"]


def test_installed_version_is_known() -> None:
    check_version()
    check_version("0.19.2+local")


def test_unknown_version_is_warned_of_naming_both() -> None:
    with pytest.warns(UserWarning, match=r"version 0\.20\.0 was not tested.*0\.19\.2"):
        check_version("0.20.0")
