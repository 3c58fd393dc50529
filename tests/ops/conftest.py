import pytest
import torch

from tests.ops.fake_driver import fake_driver


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors here are tiny: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were queued, on a machine without any."""
    with fake_driver(monkeypatch) as names:
        yield names
