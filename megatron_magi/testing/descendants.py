"""Ends what a process has started, directly or not, whatever that did to get away. Linux only.

A process group or session can be left, and a request to be killed with the parent (`kill_with_parent`) is not
inherited. A subreaper cannot be escaped: what loses its parent becomes its child, so killing children until there are
none reaches everything that was ever started below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_END_S = 20.0
"""How long all that was killed may take to end: a call of a device or file system may outlast the kill."""


def become_subreaper() -> None:
    """Has this process inherit the orphans among its descendants, instead of the system's first process.

    Raises:
        OSError: the system refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_with_parent() -> None:
    """Has this process killed when the thread that started it ends.

    Raises:
        OSError: the system refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_descendants() -> None:
    """Kills all descendants of this process, a subreaper, and waits for their end; their exit statuses are lost.

    Raises:
        RuntimeError: some are still there after `_LONGEST_END_S`.
        PermissionError: one runs for another user.
    """
    deadline = time.monotonic() + _LONGEST_END_S
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            # A child's own children are ours once it has ended, so they are found in the next round.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {_children()} are still there {_LONGEST_END_S} s after they were killed")
        time.sleep(0.002)


def _children() -> list[int]:
    parent = str(os.getpid())
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            # pid (name, which may have any character) state parent ...
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[1] == parent:
                found.append(int(folder.name))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
