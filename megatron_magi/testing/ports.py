"""Ports of this machine for processes that are still to start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import torch.distributed as dist

HOSTED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Tells ranks that none of them hosts the store of their rendezvous."""


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


@contextlib.contextmanager
def hosted_store() -> Iterator[int]:
    """The port of a store for the rendezvous of ranks, with `HOSTED` in their environment: this process hosts it, as
    that of torchrun does.

    If rank 0 did, the others could look for it too early, and look again only half a second later or more.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
