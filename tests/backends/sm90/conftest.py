import pytest

from tests.backends.sm90.fake_driver import fake_driver


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were queued, on a machine without any."""
    with fake_driver(monkeypatch) as names:
        yield names
