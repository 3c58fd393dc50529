import pytest

from tests import forced


def pytest_collection_modifyitems(items):
    """With a backend for GPUs forced on a machine that has one, tests over CPUs have no backend."""
    if forced.DEVICE == "cpu":
        return
    skip = pytest.mark.skip(reason=f"over CPUs, where {forced.NAME} does not compute")
    for item in items:
        if "tests/attention/" in item.path.as_posix() and not item.get_closest_marker("gpu"):
            item.add_marker(skip)
