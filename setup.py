"""Compiles the libraries in C++, puts the CUDA sources into the package, and into a wheel the common kernels compiled,
where that is possible.

In a checkout the sources lie next to the package, so that C++ and Python do not mix; everything else is in
pyproject.toml.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCES = sorted({path.parent.as_posix() for path in Path("csrc").rglob("*.cu*")} | {"csrc", "csrc/attention"})


_SOLVER = [f"solver/{part}" for part in ("solver", "counts", "partition", "predict", "travel")]

# The planner in C++, of batches and of tiles, and what queues kernels: plain libraries, loaded by ctypes, which use
# neither Python's nor torch's ABI: one wheel serves all versions of both. Where they cannot be compiled, a notice says
# so and Python does the same. Results of the planner must equal Python's, so no a * b + c may be contracted.
LIBRARIES = [
    Extension(
        name,
        sources=[f"csrc/{source}.cpp" for source in sources],
        depends=[path.as_posix() for path in sorted(Path("csrc/solver").glob("*.hpp"))],
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off"],
        language="c++",
        optional=True,
    )
    for name, sources in (
        ("megatron_magi.plan._solver", _SOLVER),
        ("megatron_magi.backends.tiles._tiles", ("solver/tiles",)),
        ("megatron_magi.cuda._calls", ("calls/calls",)),
    )
]


class BuildLibraries(build_ext):
    """Names libraries without a version of Python; says what it means when they cannot be compiled."""

    def get_ext_filename(self, fullname: str) -> str:
        return Path(*fullname.split(".")).with_suffix(".so").as_posix()

    def run(self) -> None:
        super().run()
        missing = [ext.name for ext in self.extensions if not Path(self.get_ext_fullpath(ext.name)).exists()]
        if missing:
            print(f"{', '.join(missing)} could not be compiled: plans are made in Python, and calls queued by it")


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BuildWithKernels(build_py):
    """Compiles kernels into what is built, but not into a checkout: there they change too often.

    It runs in a process of its own, whose failure fails nothing: kernels that are missing are compiled on first use.
    What an earlier build left is removed before: setuptools would put files into the wheel that the sources lost since.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib).resolve() / "megatron_magi"
        if package != Path(__file__).resolve().parent / "megatron_magi":
            outputs = (*self.get_outputs(), *self.get_finalized_command("build_ext").get_outputs())
            made = {Path(name).resolve() for name in outputs}
            for path in [path for path in package.rglob("*") if path.is_file() and path not in made]:
                path.unlink()
        folder = package / "prebuilt"
        command = [sys.executable, "-m", "megatron_magi", "build", "--optional", "--into", str(folder)]
        if subprocess.run(command, cwd=Path(__file__).resolve().parent, check=False).returncode:
            print("no kernels are compiled ahead, each is when it is first used")


setup(
    packages=find_packages(include=["megatron_magi*"]) + ["megatron_magi." + s.replace("/", ".") for s in SOURCES],
    package_dir={"megatron_magi.csrc": "csrc"},
    package_data={"megatron_magi": ["py.typed"], "": ["*.cu", "*.cuh"]},
    include_package_data=False,
    ext_modules=LIBRARIES,
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
