"""Results files: what reads them, and that the commands that make them are commands of today."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys

import pytest

from benchmarks._lib.results import FOLDERS, RESULTS

ROOT = RESULTS.parents[1]
HISTORY = "kernel_log.md"
IN_PAGE = r"(?:`|^    )((?:python|torchrun)[^`\n]* -m benchmarks\.[^`\n]+)"
MODULE = r"-m (benchmarks\.[a-z_.]+[a-z_])"
FILE = r"(?<![\w/])(?:\.\./)?(benchmarks/[\w/]+\.(?:py|sh|cu|csv|png|txt))"
FILES = sorted(file for folder in FOLDERS for file in folder.iterdir() if file.suffix != ".png")
WITHOUT_COMMAND = {
    "attention_backward_cycles.csv", "attention_backward_turns.csv", "host_clocks_2gpu.csv", "planner_large_cpu.csv",
    "soak_pools_1gpu.csv", "sparse_beside_magi.csv", "training_host_2gpu.csv",
}  # fmt: skip
"""Files that documents read and no script makes: those that exist. A new one has a command."""


def notes(file):
    """Leading lines ``# name: value``, as lists by name."""
    found = {}
    for line in file.read_text().splitlines():
        if not line.startswith("# "):
            break
        name, _, value = line[2:].partition(": ")
        found.setdefault(name, []).append(value)
    return found


def texts_of_today():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != HISTORY]
    return [ROOT / "README.md", *pages, *(ROOT / "megatron_magi").rglob("*.py")]


def test_current_results_are_those_that_documents_of_today_name():
    text = "\n".join(path.read_text() for path in texts_of_today())
    named = {file.name for folder in FOLDERS for file in folder.iterdir() if re.search(rf"(?<!\w){file.name}", text)}
    assert {file.name for file in FOLDERS[0].iterdir()} == named


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_results_file_says_where_it_comes_from(file):
    found = notes(file)
    assert {"commit", "device", "date"} <= set(found)
    assert found.keys() & {"command", "measured by"}
    if file.parent.name == "current":
        assert ("command" in found) == (file.name not in WITHOUT_COMMAND)


class Parsed(Exception):
    """Options were understood."""


def stop(parser, args=None, namespace=None):
    raise Parsed(PARSE(parser, args, namespace))


PARSE = argparse.ArgumentParser.parse_args


def parsed(main, arguments, monkeypatch):
    """What a script makes of its arguments; it does not run."""
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as found:
        main()
    return found.value.args[0]


def split(command):
    """Module or path of the script of a command, and its arguments; None where it is another program."""
    words = shlex.split(command)
    while "=" in words[0]:  # variables of the environment
        del words[0]
    if words[0] == "nvidia-smi":
        return None
    if words[0] == "compute-sanitizer":
        words = words[next(i for i, word in enumerate(words) if word.startswith("python")) :]
    launched = " ".join(words)
    form = r"(?:python3?(?: -W \w+)?|torchrun --nproc-per-node \w+) (?:-m )?(\S+)"
    script = re.match(form, launched)
    assert script, f"not the form of a command: {command}"
    return script[1], words[words.index(script[1]) + 1 :]


def check(script, arguments, monkeypatch):
    """The script is there and knows its options."""
    if script.endswith(".py"):
        path = ROOT / script
        spec = importlib.util.spec_from_file_location(path.stem, path)
        monkeypatch.syspath_prepend(str(path.parent))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(script)
    options = parsed(module.main, arguments, monkeypatch)
    if script == "benchmarks.compare_versions":
        check(f"benchmarks.{options.benchmark[0]}", [*options.benchmark[1:], "--csv", "FILE"], monkeypatch)
    for word in arguments:
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word


COMMANDS = list(dict.fromkeys(command for file in FILES for command in notes(file).get("command", [])))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[:90])
def test_a_command_of_a_results_file_can_be_run(command, monkeypatch):
    found = split(command)
    if found is not None:
        check(*found, monkeypatch)


PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_PAGES = list(dict.fromkeys(found for page in PAGES for found in re.findall(IN_PAGE, page.read_text(), re.MULTILINE)))


@pytest.mark.parametrize("command", IN_PAGES, ids=lambda command: command[:90])
def test_a_command_in_a_document_can_be_run(command, monkeypatch):
    check(*split(command.partition(" #")[0]), monkeypatch)


def test_a_command_that_cannot_be_run_is_found(monkeypatch, capsys):
    with pytest.raises(ModuleNotFoundError):
        check("benchmarks.planning.bench_nothing", [], monkeypatch)
    with pytest.raises(SystemExit):
        parsed(importlib.import_module("benchmarks.planning.bench_dispatch").main, ["--tokens", "1"], monkeypatch)
    assert "--tokens" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="form of a command"):
        split("a script that ran something")


def test_sources_and_documents_name_benchmarks_that_are_there():
    folders = ("benchmarks", "docs", "megatron_magi", "tests")
    paths = [path for name in folders for path in (ROOT / name).rglob("*")]
    sources = [path for path in paths if path.suffix in (".md", ".py", ".sh", ".cu", ".cuh")]
    texts = {path: path.read_text() for path in [*sources, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}
    modules = [(path.name, name) for path, text in texts.items() for name in re.findall(MODULE, text)]
    files = [(path.name, name) for path, text in texts.items() for name in re.findall(FILE, text)]
    assert len(modules) > 50
    assert len(files) > 100
    assert [found for found in modules if importlib.util.find_spec(found[1]) is None] == []
    assert [found for found in files if not (ROOT / found[1]).exists()] == []
