"""Ports that are told to processes which have not started yet."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_magi.testing.ports import HOSTED, held_port, hosted_store


def test_a_held_port_takes_a_store_and_no_other_process_gets_it() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", port, 1, is_master=False)
        client.set("greeting", "here")
        assert server.get("greeting") == b"here"


def test_no_rank_hosts_or_waits_for_a_store_that_is_hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted_store() as port:
        of_ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", **HOSTED}
        for name, value in of_ranks.items():
            monkeypatch.setenv(name, value)
        stores = []
        for rank in ("0", "1"):  # one after the other: rank 0 would wait for rank 1
            monkeypatch.setenv("RANK", rank)
            store, *numbers = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=300)))
            assert numbers == [int(rank), 2]
            stores.append(store)
        stores[1].set("key", "value")
        assert stores[0].get("key") == b"value"


def test_ports_held_together_differ() -> None:
    with held_port() as one, held_port() as other:
        assert one != other


def test_no_port_is_looked_up_without_being_held() -> None:
    """Another process could get it before it is used."""
    root = Path(__file__).parents[2]
    folders = ("megatron_magi", "benchmarks", "examples", "pretrain_scripts", "tests", "docs")
    files = [file for folder in folders for file in (root / folder).rglob("*.py") if file != Path(__file__)]
    asking = {file.relative_to(root).as_posix() for file in files if "getsockname" in file.read_text()}
    assert asking == {"megatron_magi/testing/ports.py"}
