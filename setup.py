"""Puts the CUDA sources into the package: kernels are compiled from them where they are first used.

In a checkout they lie beside the package, so that C++ and Python do not mix; everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

SOURCES = sorted({path.parent.as_posix() for path in Path("csrc").rglob("*.cu*")} | {"csrc", "csrc/attention"})

setup(
    packages=find_packages(include=["megatron_magi*"]) + ["megatron_magi." + s.replace("/", ".") for s in SOURCES],
    package_dir={"megatron_magi.csrc": "csrc"},
    package_data={"megatron_magi": ["py.typed"], "": ["*.cu", "*.cuh"]},
    include_package_data=False,
)
