"""Which Megatron this package was read against and tested with, and which one this process would import."""

from __future__ import annotations

import importlib.util
import re
import warnings
from importlib import metadata
from pathlib import Path

KNOWN_VERSIONS = ("0.18.2", "0.19.0", "0.19.2")
"""Ascending. Of these the last is what the project is developed with."""


def found_version() -> str:
    """The version of the megatron-core that an import would take, without importing it.

    A source tree that comes first on ``PYTHONPATH`` is not what the installed package's metadata say, so the file
    ``core/package_info.py`` beside the code is read; the metadata where there is none.

    Raises:
        ValueError: there is no megatron-core.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError(f"megatron-core: not installed; install megatron-core=={KNOWN_VERSIONS[-1]}")
    path = Path(spec.origin).with_name("package_info.py")
    text = path.read_text() if path.exists() else ""
    found = [re.search(rf"^{name} *= *['\"]?(\w*)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(found):
        return metadata.version("megatron-core")
    ahead = re.search(r"^PRE_RELEASE *= *['\"](\w*)", text, re.MULTILINE)
    return ".".join(part[1] for part in found if part) + (ahead[1] if ahead else "")


def check_version(found: str | None = None) -> None:
    """Warns of versions of megatron-core that were not tested, whose seams `seams.check` then has to find unchanged.

    Args:
        found: the version; that of `found_version` when None. What follows a ``+`` is ignored.

    Raises:
        ValueError: there is no megatron-core.
    """
    if message := untested(found_version() if found is None else found):
        warnings.warn(message, stacklevel=2)


def untested(found: str) -> str | None:
    """What to say of a version of megatron-core that was not tested; None of one that was."""
    if found.partition("+")[0] in KNOWN_VERSIONS:
        return None
    return (
        f"megatron-core: version {found} was not tested with megatron_magi, which knows {', '.join(KNOWN_VERSIONS)}; "
        "it trains if what megatron_magi touches is found unchanged"
    )


def release(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version, to compare releases: ``0.19.2rc1`` gives (0, 19, 2)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()
