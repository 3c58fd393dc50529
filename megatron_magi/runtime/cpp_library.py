"""Libraries in C++ that an installation may have built into the package (`setup.py`), called through ctypes."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)


def load(folder: Path, name: str, version: int) -> ctypes.CDLL | None:
    """The library ``_NAME`` of a folder of the package, if it is built from the sources that belong to this package.

    Args:
        folder: where it lies.
        name: of the library; its function ``magi_NAME_version`` says which sources it is built from.
        version: that of the sources here.

    Returns:
        None where it is not built; also, with a notice, where it cannot be loaded or is built from other sources.
    """
    path = folder / f"_{name}.so"
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        found = getattr(library, f"magi_{name}_version")
    except (OSError, AttributeError) as error:  # built on a machine with newer libraries, say
        logger.warning("%s cannot be loaded (%s), so Python is used instead; rebuild it", path.name, error)
        return None
    found.restype = ctypes.c_int64
    if found() == version:
        return library
    logger.warning("%s: built from other sources, so Python is used instead; rebuild it", path.name)
    return None


def chosen(planner: str, library: ctypes.CDLL | None) -> bool:
    """Whether to plan in C++: by `DispatchConfig.planner`, and where the library is there.

    Raises:
        ValueError: ``native`` was asked for and the library is not there.
    """
    if planner == "native" and library is None:
        raise ValueError(
            "planner: the planner in C++ is not built, or cannot be used here; installing the package where there is a "
            "C++20 compiler builds it (`pip install -v` shows the compiler's errors)"
        )
    return planner != "python" and library is not None


def address(array: np.ndarray) -> int:
    """That of its memory; ``array.ctypes`` takes several calls."""
    return array.__array_interface__["data"][0]
