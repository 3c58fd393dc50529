import pytest
import torch

from tests import forced


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors here are tiny: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=forced.DEVICE != "cpu")
def on_the_device_of_the_backend(tensors_on_the_device):
    """All tests here compute."""
