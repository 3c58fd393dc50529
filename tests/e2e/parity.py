"""Launches that are compared: stock Megatron on one rank, and the same training over many."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import PRETRAIN_GPT, RunResult, launch, tiny_gpt_args
from tests.once import once

NUM_ITERATIONS = 10
WEIGHTS = ("--init-method-std", "0.1")
"""With Megatron's smaller weights logits are near 0: attention is a mean, and its scale and positions hardly count."""
DIFFERENCES: dict[str, float] = {}
"""Of one test, the largest relative differences that `assert_same_curve` met."""
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        model: arguments of both runs.
        parallel: further arguments of the run that is tested.
        num_ranks: its ranks.
        cp_size: of these, context-parallel.
        without: default arguments that both runs go without.
        before: hook of both runs.
        before_stock: hook of the stock run alone.
        script: that both run.
        same_weights: start both from one checkpoint, where initial weights depend on the parallelism.
    """

    model: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ()
    num_ranks: int = 2
    cp_size: int = 2
    without: tuple[str, ...] = ()
    before: str = ""
    before_stock: str = ""
    script: str = PRETRAIN_GPT
    same_weights: bool = False

    @property
    def reference_name(self) -> str:
        """Of what the stock run depends on."""
        key = self.model, self.without, self.before, self.before_stock, self.script, self.same_weights
        return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


@dataclass
class Runs:
    """Runs trainings on one corpus; stock ones, and weights, once a run of the tests (`tests.once`)."""

    factory: pytest.TempPathFactory
    folder: Path
    corpus: Path = field(init=False)
    _num_launches: int = 0

    def __post_init__(self) -> None:
        self.corpus = once(self.factory, "corpus", write_corpus)

    def stock(self, case: Case) -> RunResult:
        """Megatron's own attention on one rank."""

        def train(folder: Path) -> RunResult:
            args = self._args(case, 1, [*case.model, *self._weights(case)])
            return launch(args, before=case.before or case.before_stock, script=case.script, workdir=folder)

        return once(self.factory, f"stock_{case.reference_name}", train)

    def magi(self, case: Case, *extra: str) -> RunResult:
        """The same training as ``case`` says."""
        args = self._args(case, case.cp_size, [*case.model, *case.parallel, *self._weights(case), *extra])
        self._num_launches += 1
        folder = self.folder / f"run{self._num_launches}"
        return launch(args, case.num_ranks, before=case.before, script=case.script, workdir=folder)

    def _args(self, case: Case, cp_size: int, extra: list[str]) -> list[str]:
        args = tiny_gpt_args(self.corpus, *WEIGHTS, *extra, train_iters=NUM_ITERATIONS, context_parallel_size=cp_size)
        return [a for a in args if a not in case.without]

    def _weights(self, case: Case) -> list[str]:
        if not case.same_weights:
            return []

        def save(folder: Path) -> Path:
            weights = folder / "weights"
            saving = ["--save", str(weights), "--save-interval", "1", "--no-save-optim", "--train-iters", "1"]
            args = self._args(case, 1, [*case.model, *saving])
            launch(args, before=case.before or case.before_stock, script=case.script, workdir=folder)
            return weights

        return ["--load", str(once(self.factory, f"weights_{case.reference_name}", save)), "--finetune"]


def write_corpus(folder: Path, num_tokens: int = 40_000) -> Path:
    """A data set of uneven documents, with at least ``num_tokens`` tokens; returns its prefix."""
    prefix = folder / f"corpus{num_tokens}"
    launch(
        [str(prefix), str(num_tokens)],
        script=str(Path(__file__).with_name("write_corpus.py")),
        workdir=folder / "write",
    )
    shutil.rmtree(folder / "write")
    return prefix


def assert_same_curve(got: RunResult, expected: RunResult) -> None:
    """Losses and gradient norms agree, iteration by iteration."""
    assert len(expected.losses) >= NUM_ITERATIONS
    assert got.losses.keys() == expected.losses.keys()
    for name in ("losses", "grad_norms"):
        want, found = getattr(expected, name), getattr(got, name)
        largest = max(abs(found[i] - x) / abs(x) for i, x in want.items())
        DIFFERENCES[name] = max(DIFFERENCES.get(name, 0.0), largest)
    for iteration, loss in expected.losses.items():
        assert abs(got.losses[iteration] - loss) <= LOSS_TOLERANCE * abs(loss), (iteration, got.losses, expected.losses)
    for iteration, norm in expected.grad_norms.items():
        assert abs(got.grad_norms[iteration] - norm) <= NORM_TOLERANCE * norm, (iteration, got.grad_norms)
