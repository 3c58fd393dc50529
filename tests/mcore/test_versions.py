"""Rows of releases: which hold, what is called otherwise, and which source tree is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_magi.mcore import seams, versions

ROW = seams.Seam("core.utils:divide", "relied on", ("numerator",), "batch", "a function that every release has")


def _found(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "found_version", lambda: version)


def test_rows_hold_from_and_until_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(ROW, target="core.utils:no_such_function", until="0.19")
    monkeypatch.setattr(seams, "SEAMS", (replace(ROW, since="0.19"), gone))
    _found("0.19.0", monkeypatch)
    seams.check()
    _found("0.20.0rc1", monkeypatch)
    seams.check()
    _found("0.18.2", monkeypatch)
    with pytest.raises(ValueError, match=r"version 0\.18\.2 is not as .*\n  core\.utils:no_such_function: not found"):
        seams.check()


def test_what_megatron_has_mended_itself_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ROW, how="repaired", fragment="text of the defect", mended="return numerator // denominator")
    monkeypatch.setattr(seams, "SEAMS", (row,))
    assert not seams.needed(row.target)
    seams.check()
    monkeypatch.setattr(seams, "SEAMS", (replace(row, mended="other text"),))
    assert seams.needed(row.target)
    with pytest.raises(ValueError, match="its source has no 'text of the defect'"):
        seams.check()


def test_parameters_are_named_as_the_release_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "core.utils:divide"
    older = seams.Parameter(target, "above", older="numerator")
    absent = seams.Parameter(target, "rounds", default=False)
    monkeypatch.setattr(seams, "PARAMETERS", (older, absent))
    assert seams.named(target, above=4, denominator=2, rounds=False) == {"numerator": 4, "denominator": 2}
    with pytest.raises(ValueError, match=r"^rounds: megatron-core .* has nothing like it, got True"):
        seams.named(target, rounds=True)


def test_version_is_that_of_the_code_that_an_import_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_info.py").write_text("MAJOR = 0\nMINOR = 21\nPATCH = 3\nPRE_RELEASE = 'rc1'\n")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: spec)
    assert versions.found_version() == "0.21.3rc1"
    assert versions.release("0.21.3rc1") == (0, 21, 3)


def test_no_megatron_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="megatron-core: not installed"):
        versions.check_version()
