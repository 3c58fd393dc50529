"""Tests that compute with one backend: which are skipped, and why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_magi.testing.spawn import RankError
from tests import forced

HERE = Path(__file__).parent
REFUSED = "q: impl 'cudnn' takes bf16 and fp16, got torch.float32; use 'torch'"


def raised(error: Exception, expected: type[Exception] | None = None, match: str = "") -> BaseException:
    """What a test raises in which a call raises an error, of which it expects another type or text, if any."""
    with pytest.raises((AssertionError, type(error))) as found:  # noqa: PT012
        if expected is None:
            raise error
        with pytest.raises(expected, match=match):
            raise error
    return found.value


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (raised(ValueError(REFUSED)), True),
        (raised(ValueError(REFUSED), ValueError, "^dout: row 3"), True),
        (raised(ValueError(REFUSED.replace("cudnn", "ffa"))), False),
        (raised(ValueError("k: expected 3 rows"), ValueError, "^dout: row 3"), False),
        (raised(RankError(f"rank 0 of 2: x\n{REFUSED}\nrank 1 of 2: x\n{REFUSED}\n", [0, 1])), True),
        (raised(RankError(f"rank 0 of 2: x\n{REFUSED}\nrank 1 of 2: x\nother\n", [0, 1])), False),
        (AssertionError(REFUSED), False),
        (TypeError(REFUSED), False),
    ],
)
def test_a_test_is_skipped_for_what_the_backend_refuses_alone(monkeypatch, error, is_refused):
    assert forced.refusal(error) is None or forced.NAME
    monkeypatch.setattr(forced, "NAME", "cudnn")
    assert (forced.refusal(error) == REFUSED) == is_refused
    assert is_refused or forced.refusal(error) is None


def test_ranks_over_cpus_are_started_by_the_fixture_alone():
    """By it tests are known in which a backend of GPUs cannot compute."""
    others = []
    for path in (path for folder in ("ops", "attention") for path in sorted((HERE / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run_ranks":
                backends = [ast.literal_eval(word.value) for word in node.keywords if word.arg == "backend"]
                if backends != ["nccl"]:
                    others.append(f"{path.relative_to(HERE).as_posix()}:{node.lineno}")
    assert others == []
