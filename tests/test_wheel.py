"""What a wheel holds: the sources of the kernels, and kernels compiled ahead where there is a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_magi
from megatron_magi.__main__ import main
from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.cuda import build as hopper_build
from tests.once import once, run_folder

ROOT = Path(megatron_magi.__file__).parents[1]
ONE_KERNEL = "\n\ndef common_kernels():\n    return [preprocess()]\n"
IMPORT_ALL = """
import importlib, os, pkgutil, sys
sys.modules.update(dict.fromkeys(
    ("megatron", "transformers", "accelerate", "transformer_engine", "einops", "matplotlib", "yaml", "psutil")
))
import megatron_magi
print(os.path.dirname(megatron_magi.__file__))
for module in pkgutil.walk_packages(megatron_magi.__path__, "megatron_magi.", onerror=lambda name: None):
    try:
        if not module.name.startswith(("megatron_magi.testing", "megatron_magi.__main__")):
            importlib.import_module(module.name)
    except ImportError:
        print(module.name)
"""
"""Imports each module where nothing of the extras is installed; prints the package's folder, then what failed."""
USE = """
import sys
import torch
import megatron_magi
from megatron_magi.api import calc_attn, dispatch, magi_attn_varlen_key, undispatch
from megatron_magi.backends.tiles import cpp_tiles
from megatron_magi.cuda import launch_list
from megatron_magi.plan import cpp_solver
key = magi_attn_varlen_key([0, 5, 9], [0, 5, 9], 2, 1, 8, causal=True)
x = torch.randn(9, 2, 8, dtype=torch.float64)
q, k = dispatch(x, key), dispatch(x[:, :1], key)
out = undispatch(calc_attn(q, k, k, key)[0], key)
seen = torch.ones(9, 9).tril().bool() & (torch.arange(9) < 5).eq((torch.arange(9) < 5)[:, None])
heads, keys = x.transpose(0, 1), x[:, :1].transpose(0, 1).expand(2, -1, -1)
torch.testing.assert_close(
    out, torch.nn.functional.scaled_dot_product_attention(heads, keys, keys, attn_mask=seen).transpose(0, 1)
)
print(megatron_magi.__file__, cpp_solver.available(), cpp_tiles.available(), launch_list.available())
"""
"""Attention, compared with torch's; prints what is used of the package."""
BUILD = "from setuptools import build_meta; build_meta.build_{}('dist')"
HANGS_S = 900  # ends what hangs, on the slowest machine


@pytest.fixture(scope="session")
def cxx(tmp_path_factory) -> str:
    """The machine's C++ compiler, which compiles each object of this run of the tests once."""
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    return f"{sys.executable} -IS {ROOT / 'tests/kept_compiler.py'} {run_folder(tmp_path_factory) / 'objects'} c++"


def build_wheel(folder: Path, what: str = "wheel", *, cxx: str = "/missing/c++", **variables: str) -> tuple[Path, str]:
    """A wheel of this checkout (or what an editable install builds), but with one common kernel; what was said.

    Without ``cxx`` as if on a machine without a C++ compiler.
    """
    for name in ("megatron_magi", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    with open(folder / "megatron_magi" / "backends" / "sm90" / "kernels.py", "a") as file:
        file.write(ONE_KERNEL)
    (folder / "dist").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAGI_")} | variables
    env.pop("PYTHONPATH", None)
    env |= {"CC": "/missing/cc", "CXX": cxx}
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(what)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel, done.stdout + done.stderr


def test_a_wheel_brings_kernels_that_are_found_by_their_content(tmp_path, monkeypatch):
    pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")
    path, said = build_wheel(tmp_path)
    wheel = zipfile.ZipFile(path)
    cubins = [name for name in wheel.namelist() if name.endswith(".cubin")]
    assert len(cubins) == 1 and "1 kernels for sm_90a" in said
    assert "megatron_magi/csrc/attention/sm90/preprocess.cu" in wheel.namelist()
    wheel.extractall(tmp_path / "installed")
    monkeypatch.setattr(hopper_build, "prebuilt_dir", lambda: tmp_path / "installed" / "megatron_magi" / "prebuilt")
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_, **__: pytest.fail("compiled"))
    for name in ("MAGI_ATTENTION_FORCE_JIT_BUILD", "MAGI_ATTENTION_BUILD_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    image = hopper_build.build(*hopper_kernels.preprocess().build_args, tmp_path / "cache")
    assert wheel.read(cubins[0]).startswith(image) and not (tmp_path / "cache").exists()


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[zipfile.ZipFile, str]:
    """A wheel without kernels and planner, and what was said when it was built."""
    path, said = once(tmp_path_factory, "wheel", lambda folder: build_wheel(folder, MAGI_ATTENTION_PREBUILD_FFA="0"))
    return zipfile.ZipFile(path), said


@pytest.fixture(scope="module")
def installed(plain, tmp_path_factory) -> Path:
    """That wheel, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("installed")
    plain[0].extractall(folder)
    return folder


def test_a_wheel_has_no_faults_that_are_known_of_wheels(plain):
    """Modules of tests, files of version control, duplicates, a record that does not fit, and the like."""
    pytest.importorskip("check_wheel_contents", reason="check-wheel-contents is not installed: make setup")
    checked = subprocess.run(
        [sys.executable, "-m", "check_wheel_contents", "--no-config", str(plain[0].filename)],
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_commands_start_in_an_environment_that_has_nothing_else(installed, tmp_path):
    venv.create(tmp_path / "clean", symlinks=True)
    script = "import megatron_magi, sys; from megatron_magi.__main__ import main; print(*megatron_magi.__all__); main()"
    said = subprocess.run(
        [tmp_path / "clean/bin/python", "-c", script, "env"], cwd=tmp_path, env={"PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "make_plan" in said.stdout and "MAGI_ATTENTION_WORKSPACE_BASE" in said.stdout


def test_all_but_the_adapters_imports_without_the_extras(installed, tmp_path):
    env = {"PYTHONPATH": str(installed), "PATH": os.environ["PATH"]}
    said = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    folder, *failed = said.stdout.split()
    assert folder == str(installed / "megatron_magi")
    adapters = tuple(f"megatron_magi.{name}" for name in ("mcore", "hf", "demo", "explain.figures"))
    assert [name for name in failed if not name.startswith(adapters)] == []
    assert "megatron_magi.explain.figures" in failed, "matplotlib was to be missing"


def test_a_wheel_brings_the_command_and_the_package_alone(plain):
    wheel, _ = plain
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = tops - {"megatron_magi"}
    assert wheel.read(f"{info}/entry_points.txt").decode().split() == [
        "[console_scripts]", "magi", "=", "megatron_magi.__main__:main",
    ]  # fmt: skip
    assert not [name for name in wheel.namelist() if name.endswith((".pyc", ".cubin")) or "/tests/" in name]


@pytest.fixture(scope="module")
def released(cxx, tmp_path_factory) -> Path:
    """The folder of a release of this checkout, as `.ci/build_release` makes it."""
    pytest.importorskip("auditwheel", reason="the dependency group `release` is not installed: make setup")

    def release(folder: Path) -> Path:
        done = subprocess.run(
            [ROOT / ".ci/build_release", folder, sys.executable],
            env=os.environ | {"README_LINKS": "https://example.org/magi", "README_REF": "v1", "CXX": cxx},
            capture_output=True, text=True, timeout=HANGS_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("PASSED") == 2, "of twine"
        return folder

    return once(tmp_path_factory, "release", release)


@pytest.fixture(scope="module")
def clean(released, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A python of its own, into which the wheel is installed, and an environment in which there is no compiler."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (wheel,) = released.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel],
        capture_output=True, text=True, timeout=HANGS_S, check=True,
    )  # fmt: skip
    # What the package depends on is that of these tests. A path in PYTHONPATH adds no editable installs.
    others = {str(Path(found).parents[1]) for found in (torch.__file__, np.__file__)}
    env = {"PATH": str(folder / "bin"), "PYTHONPATH": os.pathsep.join([str(site), *sorted(others)])}
    assert not any(shutil.which(name, path=env["PATH"]) for name in ("cc", "gcc", "c++", "g++", "clang"))
    return folder / "bin" / "python", env | {"HOME": str(folder), "OMP_NUM_THREADS": "1"}


def test_a_release_is_a_source_distribution_and_a_wheel_for_any_python(released):
    (wheel,), (sources,) = released.glob("*.whl"), released.glob("*.tar.gz")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name.startswith(f"megatron_magi-{version}-py3-none-manylinux_2_")
    assert sources.name == f"megatron_magi-{version}.tar.gz"
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    libraries = {"plan/_solver.so", "backends/tiles/_tiles.so", "cuda/_calls.so"}
    assert {name for name in names if name.endswith(".so")} == {f"megatron_magi/{name}" for name in libraries}
    assert not [name for name in names if name.endswith((".cubin", ".cpp"))]
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cu*")}
    assert {f"megatron_magi/{name}" for name in kernels} <= names
    links = re.findall(r"\]\(([^)#]*)", metadata)
    assert "https://example.org/magi/blob/v1/docs/get_started.md" in links
    assert "https://example.org/magi/raw/v1/docs/images/idea.png" in links
    assert not [link for link in links if link and not link.startswith("https://")]


def test_a_released_wheel_computes_attention_with_its_libraries_where_there_is_no_compiler(clean, tmp_path):
    python, env = clean
    said = subprocess.run(
        [python, "-c", USE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert said.returncode == 0, said.stderr
    site = env["PYTHONPATH"].split(os.pathsep)[0]
    assert said.stdout.split() == [f"{site}/megatron_magi/__init__.py", "True", "True", "True"]
    assert "is used instead" not in said.stderr


def test_a_released_wheel_trains_the_tiny_configuration_where_there_is_no_compiler(clean, tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    python, env = clean
    for name in ("pretrain_scripts/pretrain_gpt.py", "configs/tiny_gpt_256_2cpu.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    said = subprocess.run(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py",
         "--config", "tiny_gpt_256_2cpu.yaml", "--train-iters", "3"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", said.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0] < 7


def test_a_source_distribution_holds_what_a_wheel_is_built_from_and_no_tests(tmp_path):
    for name in ("megatron_magi", "csrc", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt", "*.so"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-c", BUILD.format("sdist")]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=HANGS_S)
    (made,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [
        path for folder in ("megatron_magi", "csrc") for path in (tmp_path / folder).rglob("*") if path.is_file()
    ]
    assert {path.relative_to(tmp_path).as_posix() for path in sources} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks")) or name.endswith((".pyc", ".so"))]


def test_a_wheel_holds_nothing_that_is_gone_from_the_sources(tmp_path):
    """As after `pip install .` of an earlier version in the same checkout, which leaves its files in build."""
    package = tmp_path / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "megatron_magi"
    (package / "csrc").mkdir(parents=True)
    (package / "prebuilt").mkdir()
    for name in ("gone.py", "_gone.so", "csrc/gone.cuh", "prebuilt/gone.cubin"):
        (package / name).touch()
    wheel, _ = build_wheel(tmp_path, MAGI_ATTENTION_PREBUILD_FFA="0")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "gone" in name]
    assert (package / "__init__.py").exists(), "it was to be built in the same folder"


def test_a_wheel_holds_the_libraries_that_were_compiled_before(cxx, tmp_path):
    wheel, _ = build_wheel(tmp_path, cxx=cxx, MAGI_ATTENTION_PREBUILD_FFA="0")
    names = set(zipfile.ZipFile(wheel).namelist())
    shutil.rmtree(tmp_path / "dist")
    command = [sys.executable, "setup.py", "build_ext", "bdist_wheel"]
    env = os.environ | {"MAGI_ATTENTION_PREBUILD_FFA": "0", "CXX": cxx}
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True, timeout=HANGS_S)
    (again,) = (tmp_path / "dist").glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == names


def test_compiling_ahead_can_be_switched_off(plain):
    wheel, said = plain
    assert not [name for name in wheel.namelist() if name.endswith(".cubin")]
    assert "switched off" in said and "megatron_magi/csrc/attention/sm90/preprocess.cu" in wheel.namelist()


def test_an_editable_install_compiles_no_kernels(tmp_path):
    wheel, said = build_wheel(tmp_path, "editable")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".cubin")]
    assert not list(tmp_path.rglob("*.cubin")) and "kernels" not in said


@pytest.mark.parametrize("what", ["wheel", "editable"])
def test_the_planner_is_compiled_where_there_is_a_compiler(cxx, tmp_path, what):
    wheel, _ = build_wheel(tmp_path, what, cxx=cxx, MAGI_ATTENTION_PREBUILD_FFA="0")
    installed = tmp_path
    if what == "wheel":
        installed = tmp_path / "installed"
        zipfile.ZipFile(wheel).extractall(installed)
    script = "from megatron_magi.plan import cpp_solver; print(cpp_solver.available(), cpp_solver.__file__)"
    said = subprocess.check_output([sys.executable, "-c", script], cwd=installed, env={"PYTHONPATH": str(installed)})
    assert said.split() == [b"True", str(installed / "megatron_magi" / "plan" / "cpp_solver.py").encode()]
    assert list((installed / "megatron_magi" / "backends" / "tiles").glob("_tiles*"))
    assert list((installed / "megatron_magi" / "cuda").glob("_calls*"))


def test_without_a_compiler_a_notice_is_given_and_the_rest_is_installed(plain):
    wheel, said = plain
    assert "plans are made in Python" in said
    assert not [name for name in wheel.namelist() if name.endswith(".so")]
    assert "megatron_magi/plan/cpp_solver.py" in wheel.namelist()


def test_a_step_of_an_installation_fails_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MAGI_ATTENTION_PREBUILD_FFA", raising=False)

    def no_compiler(*_args, **_options):
        raise OSError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(hopper_build, "compile_into", no_compiler)
    assert main(["build", "--into", str(tmp_path), "--optional"]) == 0
    assert "each is when it is first used: libnvrtc.so" in capsys.readouterr().out
    assert main(["build", "--into", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "libnvrtc.so: cannot open shared object file\n"


def test_a_step_of_an_installation_by_a_user_without_a_home_directory_fails_nothing(monkeypatch, capsys):
    monkeypatch.delenv("MAGI_ATTENTION_PREBUILD_FFA", raising=False)
    monkeypatch.delenv("MAGI_ATTENTION_WORKSPACE_BASE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert main(["build", "--optional"]) == 0
    assert "MAGI_ATTENTION_WORKSPACE_BASE: Could not determine home directory" in capsys.readouterr().out
    monkeypatch.setenv("MAGI_ATTENTION_PREBUILD_FFA", "maybe")
    assert main(["build", "--optional"]) == 1


@pytest.mark.parametrize("jobs", ["0", "-3", "1.5", "many"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs, capsys):
    with pytest.raises(SystemExit):
        main(["build", "--jobs", jobs])
    assert f"argument --jobs: expected a whole number of at least 1, got '{jobs}'" in capsys.readouterr().err


def test_the_command_fills_a_folder(tmp_path, monkeypatch, capsys):
    variant = hopper_kernels.preprocess()
    monkeypatch.setattr(hopper_kernels, "common_kernels", lambda: [variant, variant._replace(macros=("A=1",))])
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_, **__: (b"\x7fELF", ""))
    assert main(["build", "--into", str(tmp_path), "--jobs", "2"]) == 0
    assert len(list(tmp_path.glob("*.cubin"))) == 2
    assert f"2 kernels for sm_90a are in {tmp_path}" in capsys.readouterr().out
