"""Ports of this machine for processes that are still to start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free TCP port that the system gives to nobody else meanwhile; who is told of it may listen there.

    A port that was only looked up could go to any other process before it is used. It stays bound here instead,
    without listening: Linux lets another socket bind such a port and listen, if both say `SO_REUSEADDR`, as torch's
    store does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
