"""Libraries in C++ that were built, of the sources that belong to this package or of others."""

import pytest

from megatron_magi.backends.tiles import cpp_tiles as tiles
from megatron_magi.cuda import launch_list
from megatron_magi.plan import cpp_solver as solver
from megatron_magi.runtime import cpp_library


@pytest.mark.parametrize("module", [solver, tiles, launch_list], ids=["solver", "tiles", "calls"])
def test_a_library_of_other_sources_is_not_used_and_that_is_said(module, monkeypatch, caplog) -> None:
    if not module.available():
        pytest.skip("not built: python setup.py build_ext --inplace")
    monkeypatch.setattr(module, "_VERSION", module._VERSION + 1)
    assert module._library.__wrapped__() is None
    assert "built from other sources" in caplog.text


def test_a_library_that_cannot_be_loaded_is_not_used_and_that_is_said(tmp_path, caplog) -> None:
    """As one that was built against newer libraries than there are here; one that is not there needs no words."""
    assert cpp_library.load(tmp_path, "calls", 1) is None and not caplog.text
    (tmp_path / "_calls.so").write_bytes(b"\x7fELF")
    assert cpp_library.load(tmp_path, "calls", 1) is None
    assert "_calls" in caplog.text and "cannot be loaded" in caplog.text
