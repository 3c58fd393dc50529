"""What is made once a run of pytest, by the first test that asks for it, whichever of its processes runs that."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that its processes share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once[T](factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What ``make`` returned when it was called first in this run; others wait until it has.

    An error, or a skip, is raised where it occurs and is not kept: the next that asks tries again.

    Args:
        factory: pytest's fixture ``tmp_path_factory``.
        name: of what is made.
        make: called with an empty folder that outlives the call; its result can be pickled.
    """
    folder = run_folder(factory) / "once" / name
    result = folder.with_suffix(".pickle")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            made = pickle.dumps(make(folder))
            part = folder.with_suffix(".part")
            part.write_bytes(made)
            os.replace(part, result)
    return pickle.loads(result.read_bytes())
