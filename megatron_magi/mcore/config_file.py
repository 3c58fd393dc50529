"""`--config FILE`: arguments from a YAML file, expanded into the command line before Megatron parses it.

An entry is the name of one of Megatron's or this package's options, without the leading dashes, and its value:

    seq-length: 32768                 # --seq-length 32768
    bf16: true                        # --bf16
    recompute-modules: [mlp, moe]     # --recompute-modules mlp moe

Values reach Megatron as they are written; what a shell or OmegaConf would replace (``${NAME}``, ``$NAME``, ``~/``) is
an error. The command line wins: an entry is left out where the command
line sets the same thing, also by another option (`rope-fusion` and `no-rope-fusion`). A flag of the file
is taken back by `--NAME=false`.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

OPTION = "--config"
_SWITCHES = {"true": True, "false": False}
_REPLACED = re.compile(r"\$\{[^}]*\}?|\$\w+|\$\([^)]*\)?|^~[\w.-]*(?=/|$)")
"""What a shell or OmegaConf would replace in a value."""


def expand_config(argv: Sequence[str]) -> list[str]:
    """The command line with the entries of its ``--config FILE`` before its other arguments.

    Without ``--config`` the command line is returned as it is. To be called where megatron may be imported.

    Args:
        argv: arguments without the program's name.

    Raises:
        ValueError: ``--config`` is given twice or without a file; the file cannot be read, is not a table of
            names and values, or has an unknown or repeated name or a value that its option does not take. The
            message names the file and the entry.
    """
    path, rest = _take_config(argv)
    if path is None:
        return list(argv)
    parser = _Parser()
    actions = parser.actions_by_name()
    rest, set_here = _scan_command_line(rest, actions)
    out: list[str] = []
    for name, value in _read(path).items():
        action = _find(actions, name, path)
        arguments = _arguments(action, name, value, path)
        parser.check(arguments, f"{path}: {name}")
        if action.dest not in set_here:
            out += arguments
    return [*out, *rest]


def _take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    paths, rest = [], []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != OPTION:
            rest.append(argument)
            continue
        paths.append(value if equals else next(arguments, ""))
        if not paths[-1] or paths[-1].startswith("--"):
            raise ValueError("config: expected a file after --config")
    if len(paths) > 1:
        raise ValueError(f"config: given more than once: {', '.join(paths)}")
    return (paths[0] if paths else None), rest


def _scan_command_line(argv: list[str], actions: Mapping[str, argparse.Action]) -> tuple[list[str], set[str]]:
    """The command line without flags that it takes back, and the destinations of all options that it has."""
    rest, dests = [], set()
    for argument in argv:
        name, equals, value = argument.partition("=")
        action = actions.get(name.removeprefix("--")) if name.startswith("--") else None
        if action is not None:
            dests.add(action.dest)
            if action.nargs == 0 and equals and value in _SWITCHES:
                if _SWITCHES[value]:
                    rest.append(name)
                continue
        rest.append(argument)
    return rest, dests


def _read(path: str) -> dict[str, Any]:
    import yaml

    class Loader(yaml.BaseLoader):
        """Scalars stay the text that they are; a name may not be repeated."""

    def mapping(loader: yaml.BaseLoader, node: yaml.MappingNode) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            if key in found:
                raise ValueError(f"config: {path}: {key}: is there twice, again in line {key_node.start_mark.line + 1}")
            found[key] = loader.construct_object(value_node, deep=True)
        return found

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.load(text, Loader)
    except OSError as error:
        raise ValueError(f"config: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path}: is not YAML: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config: {path}: expected lines of 'name: value'")
    return found


def _find(actions: Mapping[str, argparse.Action], name: str, path: str) -> argparse.Action:
    if name in actions:
        return actions[name]
    candidate = name.lstrip("-").replace("_", "-")
    close = [candidate] if candidate in actions else difflib.get_close_matches(candidate, actions, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"config: {path}: {name}: no such argument{advice}")


def _arguments(action: argparse.Action, name: str, value: Any, path: str) -> list[str]:
    """An entry as on the command line."""
    option = f"--{name}"
    if action.nargs == 0:
        if value not in _SWITCHES:
            raise ValueError(f"config: {path}: {name}: is a flag, expected true or false, got {value!r}")
        return [option] if _SWITCHES[value] else []
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str) and item for item in values):
        raise ValueError(f"config: {path}: {name}: expected a value or a list of values, got {value!r}")
    for item in values:
        if found := _REPLACED.search(item):
            raise ValueError(
                f"config: {path}: {name}: {found[0]} in {item!r} is not replaced here; write the value out, or give "
                f"{option} on the command line"
            )
    # Joined, a value may begin with a dash.
    return [f"{option}={values[0]}"] if len(values) == 1 else [option, *values]


class _Parser(argparse.ArgumentParser):
    """Megatron's options and ours; errors are raised."""

    def __init__(self) -> None:
        from megatron_magi.mcore import seams
        from megatron_magi.mcore.argv import add_arguments

        super().__init__(add_help=False, allow_abbrev=False)
        self._where = ""
        # Megatron's own: what `seams` puts there adds our options too.
        add_arguments(seams.original("training.arguments:add_megatron_arguments")(self))

    def actions_by_name(self) -> dict[str, argparse.Action]:
        """Each option that begins with two dashes, by its name without them."""
        return {name.removeprefix("--"): action for name, action in self._options()}

    def _options(self) -> Iterator[tuple[str, argparse.Action]]:
        for action in self._actions:
            for name in action.option_strings:
                if name.startswith("--"):
                    yield name, action

    def check(self, arguments: list[str], where: str) -> None:
        """Parse one entry alone."""
        from megatron_magi.mcore.argv import rewrite_argv

        self._where = where
        try:
            self.parse_args(rewrite_argv(arguments))
        except KeyError as error:
            # Megatron's way to read a member of an enumeration.
            self.error(f"no such value: {error.args[0]}")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"config: {self._where}: {message}")
