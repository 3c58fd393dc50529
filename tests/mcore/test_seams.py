"""The table of what this package touches in Megatron: true of the version that is known, and told where it is not."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core import utils
from megatron.training import training

from megatron_magi.mcore import seams

FOLDER = Path(seams.__file__).parent


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have put is seen through, as `check` does."""
    monkeypatch.setattr(training, "dummy_train_step", seams.original("training.training:dummy_train_step"))


def test_installed_megatron_is_as_the_table_says() -> None:
    seams.check(on_cpu=True)


def test_every_target_that_differs_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(training, "dummy_train_step")
    monkeypatch.setattr(utils, "get_batch_on_this_cp_rank", lambda loaded, group: None)
    with pytest.raises(ValueError, match=r"^megatron-core: version [\d.]+ is not as megatron_magi knows it") as error:
        seams.check()
    assert "training.training:dummy_train_step: not found" in str(error.value)
    assert "core.utils:get_batch_on_this_cp_rank: has no parameter 'batch'" in str(error.value)
    assert str(error.value).count("\n") == 2


def test_parameters_in_another_order_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "dummy_train_step", lambda b, a: None)
    row = next(seam for seam in seams.SEAMS if seam.target.endswith("dummy_train_step"))
    monkeypatch.setattr(seams, "SEAMS", (replace(row, parameters=("b", "a")),))
    seams.check()
    monkeypatch.setattr(seams, "SEAMS", (replace(row, parameters=("a", "b")),))
    with pytest.raises(ValueError, match="has no parameter 'b' where one is expected"):
        seams.check()


def test_other_source_than_the_one_that_is_repaired_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(seam for seam in seams.SEAMS if seam.fragment)  # perhaps of another release than this one
    monkeypatch.setattr(seams, "SEAMS", (replace(row, fragment="no such" + " text", since="", until=""),))
    with pytest.raises(ValueError, match=r"its source has no 'no such text'"):
        seams.check()


def test_what_is_put_is_seen_through_and_put_twice_is_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "training.training:dummy_train_step"
    stock = seams.original(target)
    for _ in range(2):
        # Without the parameter that the table wants of the original.
        seams.put(target, lambda: None)
        assert seams.original(target) is stock
        assert seams.find(target) is not stock
    seams.check()


def test_nothing_is_put_that_is_not_in_the_table() -> None:
    with pytest.raises(AssertionError, match="not in the table"):
        seams.put("training.training:train", None)
    with pytest.raises(AssertionError, match="not in the table"):
        # Relied on, not changed.
        seams.put("core.transformer.utils:make_sharded_tensors_for_checkpoint", None)


def test_every_row_names_a_module_of_this_package() -> None:
    assert {seam.by for seam in seams.SEAMS} <= {path.stem for path in FOLDER.glob("*.py")}


def test_no_module_patches_megatron_past_the_table() -> None:
    """Neither by `unittest.mock` nor by setting attributes of what it imports from megatron."""
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                imported |= {alias.asname or alias.name for alias in node.names}
            assert not (isinstance(node, ast.ImportFrom) and node.module == "unittest"), path
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            touched = {t.value.id for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name)}
            assert not touched & imported, f"{path}: {touched & imported}"
