"""docs/configuration.md has every field, option and command, with its default, and nothing else."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import megatron_magi
from megatron_magi.__main__ import make_parser
from megatron_magi.config import CostModel, MagiConfig
from megatron_magi.mcore.argv import FLAG, add_arguments

PAGE = (Path(megatron_magi.__file__).parents[1] / "docs/configuration.md").read_text()


def table(*titles: str) -> dict[str, str]:
    """First and second column of the tables under headings that begin with ``titles``."""
    parts = [part for part in re.split(r"^#+ ", PAGE, flags=re.MULTILINE) if part.startswith(titles)]
    rows = [row for part in parts for row in re.findall(r"^\| `([^`]*)` \| (.*?) \|", part, re.MULTILINE)]
    assert len(dict(rows)) == len(rows), "a row is there twice"
    return dict(rows)


def defaults(config: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Fields by their paths, with the text of their defaults."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, CostModel):
            yield prefix + field.name, "`CostModel()`"
        if dataclasses.is_dataclass(value):
            yield from defaults(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, f"`{value!r}`".replace("'", '"')


def test_every_field_is_there_with_its_default():
    assert table("`dispatch`", "`overlap`", "`attend`", "`comm`") == dict(defaults(MagiConfig()))


def test_every_option_of_megatrons_command_line_is_there():
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    options = {option for action in parser._actions for option in action.option_strings} - {FLAG}
    written = {name.split()[0] for name in table("Options")}
    assert written == options | {"--attention-backend", "--config"}


def test_every_option_of_the_commands_is_there():
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    options = set(commands.choices)
    for name, parser in commands.choices.items():
        options |= {f"{name} {a.option_strings[0]}" for a in parser._actions if a.dest != "help"}
    assert set(table("Commands")) == options
