"""Processes that try to outlive the one that started them, and ways in which that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ENDINGS = ("returns", "exits", "exits at once", "fails at once", "raises", "is killed", "hangs")


def leave_processes(folder: Path) -> None:
    """Starts a child, a forked copy, one in a session of its own that ignores signals, and an orphan of that kind.

    Each writes its id into a file of ``folder``; all are there when this returns.
    """
    ignore = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(1000)"
    for name, session in (("child", False), ("session", True)):
        process = subprocess.Popen([sys.executable, "-S", "-c", ignore], start_new_session=session)
        (folder / name).write_text(str(process.pid))
    if os.fork() == 0:
        _stay(folder / "copy")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _stay(folder / "orphan")
        os._exit(0)
    while not ((folder / "copy").exists() and (folder / "orphan").exists()):
        time.sleep(0.01)


def _stay(path: Path) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    time.sleep(1000)
    os._exit(0)


def end(how: str) -> None:
    """Ends this process as one of `ENDINGS` says."""
    if how == "exits":
        sys.exit(3)
    elif how in ("exits at once", "fails at once"):
        os._exit(5 if how == "fails at once" else 0)
    elif how == "raises":
        raise ValueError("bad luck")
    elif how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        time.sleep(1000)


def running(folder: Path) -> list[str]:
    """Those of `leave_processes` that still run; all four must have been started."""
    files = {name: folder / name for name in ("child", "session", "copy", "orphan")}
    return [name for name, file in files.items() if is_running(int(file.read_text()))]


def is_running(pid: int) -> bool:
    """Whether it is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 300
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))
