"""Sizes and names that keep the code easy to find one's way in."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_magi

ROOT = Path(megatron_magi.__file__).parents[1]
FOLDERS = ("megatron_magi", "tests", "benchmarks", "pretrain_scripts", "examples")
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAKES_TENSORS = {"tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "eye", "linspace"}


def sources():
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def code_lines(function: ast.FunctionDef) -> int:
    """Lines from the signature to the end, without the docstring."""
    length = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        length -= first.end_lineno - first.lineno + 1
    return length


def test_no_file_outgrows_its_size():
    long = {
        p.relative_to(ROOT).as_posix(): n for p in sources() if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert long == {}


def test_no_function_outgrows_its_size():
    long = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and code_lines(node) > MAX_FUNCTION_LINES:
                long[f"{path.relative_to(ROOT).as_posix()}:{node.name}"] = code_lines(node)
    assert long == {}


def test_no_file_has_a_name_that_says_nothing():
    says_nothing = {"utils", "util", "helpers", "helper", "misc", "common", "mgr"}
    names = [path.relative_to(ROOT).with_suffix("") for path in sources()]
    assert [name.as_posix() for name in names if says_nothing & set(name.parts)] == []


def test_no_module_imports_itself_in_a_circle():
    """Nor through the `__init__` of its folder, which the linter's contract of siblings does not see."""
    graph = pytest.importorskip("grimp").build_graph("megatron_magi", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # a CycleError names the modules


def test_new_tensors_say_their_device():
    """`torch.set_default_device` is the user's and not ours."""
    silent = []
    for path in sorted((ROOT / "megatron_magi").rglob("*.py")):
        if {"testing", "demo"} & set(path.parts):
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in MAKES_TENSORS}]
        silent += [
            f"{path.relative_to(ROOT).as_posix()}:{call.lineno}"
            for call in made
            if "device" not in {keyword.arg for keyword in call.keywords}
        ]
    assert silent == []
