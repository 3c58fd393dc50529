"""One corpus and one set of stock runs for all end-to-end tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import parity
from tests.e2e.parity import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory, tmp_path_factory.mktemp("megatron"))


@pytest.fixture(autouse=True)
def _figures(record_property) -> Iterator[None]:
    """Puts the largest relative differences of a test into its report."""
    parity.DIFFERENCES.clear()
    yield
    for name, value in parity.DIFFERENCES.items():
        record_property(name, f"{value:.1e}")
