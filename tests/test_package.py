import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import megatron_magi

ROOT = Path(megatron_magi.__file__).parents[1]


def modules_after(*statements: str) -> list[set[str]]:
    """Names of the modules that an interpreter, fresh before the first, has after each of ``statements``."""
    script = "\n".join(f"{statement}\nimport sys\nprint(*sys.modules)" for statement in statements)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in said.splitlines()]


def test_importing_the_package_imports_neither_torch_nor_megatron():
    (loaded,) = modules_after("import megatron_magi")
    assert not loaded & {"torch", "numpy", "megatron"}


def test_masks_and_plans_need_no_torch():
    (loaded,) = modules_after("from megatron_magi import AttnMask, MagiConfig, make_plan")
    assert "torch" not in loaded


def test_the_public_functions_need_no_megatron_and_no_compiler_and_load_names_for_users_of_magi_attention_when_asked():
    """torch.compile's modules take as long to import as torch itself."""
    uses = (
        "import torch; key = api.magi_attn_varlen_key([0, 4], [0, 4], causal=True); "
        "x = api.dispatch(torch.ones(4, 1, 8), key); api.calc_attn(x, x, x, key)"
    )
    imported, used, asked = modules_after(
        "from megatron_magi import api", uses, "from megatron_magi.api import AttnRanges"
    )
    assert "torch" in imported and not imported & {"megatron", "torch._dynamo", "sympy", "triton"}
    assert not {name for name in used if name.startswith("megatron_magi.compat")}
    assert "megatron_magi.compat.ranges" in asked


@pytest.mark.parametrize(
    "missing, module, extra",
    [("transformers", "hf", "hf"), ("accelerate", "hf", "hf"), ("matplotlib", "demo.__main__", "demo")],
)
def test_a_package_that_is_missing_is_named_with_its_extra(missing, module, extra):
    script = f"import sys\nsys.modules[{missing!r}] = None\nimport megatron_magi.{module}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and f"pip install '.[{extra}]'" in ended.stderr


def test_every_public_name_can_be_imported():
    for name in megatron_magi.__all__:
        assert getattr(megatron_magi, name).__name__ == name
    assert set(megatron_magi.__all__) <= set(dir(megatron_magi))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        megatron_magi.nothing  # noqa: B018


def test_every_name_of_the_api_is_there_once():
    from megatron_magi import api, compat

    assert all(hasattr(api, name) for name in api.__all__) and set(api.__all__) <= set(dir(api))
    assert set(compat.__all__) < set(api.__all__) and len(set(api.__all__)) == len(api.__all__)
    assert all(getattr(api, name) is getattr(compat, name) for name in compat.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        api.nothing  # noqa: B018


def test_the_version_is_that_of_the_metadata():
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert metadata["project"]["version"] == megatron_magi.__version__


def test_the_lock_file_knows_one_index():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    sources = {next(iter(p["source"].items())) for p in lock["package"] if p["name"] != "megatron-magi"}
    assert len(sources) == 1 and next(iter(sources))[0] == "registry"


def test_the_package_ships_every_folder_of_cuda_sources(monkeypatch) -> None:
    root = Path(__file__).parents[1]
    given = {}
    monkeypatch.chdir(root)
    monkeypatch.setattr("setuptools.setup", lambda **options: given.update(options))
    runpy.run_path(str(root / "setup.py"))
    folders = {path.parent.relative_to(root) for path in (root / "csrc").rglob("*.cu*")}
    assert folders and {"megatron_magi." + ".".join(f.parts) for f in folders} <= set(given["packages"])
    assert "megatron_magi.backends.sm90" in given["packages"] and not any("tests" in p for p in given["packages"])


def test_the_commands_are_listed_where_nothing_is_installed():
    """As in an isolated build, which compiles kernels where torch is there."""
    script = (
        "import sys; sys.modules.update(numpy=None, torch=None); from megatron_magi.__main__ import main; main(['env'])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900, check=False)
    assert said.returncode == 0, said.stderr
    assert "MAGI_ATTENTION_PREBUILD_FFA" in said.stdout


def test_without_a_command_the_commands_are_listed(capsys):
    from megatron_magi.__main__ import main

    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("env", "build", "calibrate", "explain"))
