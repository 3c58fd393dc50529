"""Launches of Megatron's trainer for tests: start ranks, bring back exact losses or the failure.

On a machine without GPUs the ranks are forked from one process that has Megatron imported
(`megatron_magi.testing.megatron_zygote`), started on first use and kept; a launch then costs what
Megatron itself does. With GPUs such a process is started for each launch, and every rank as a fresh one from it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_magi.testing.megatron_rank import GRACE_S, Outcome, Request, output_path
from megatron_magi.testing.ports import HOSTED, hosted_store

PRETRAIN_GPT = str(Path(__file__).resolve().parents[2] / "pretrain_scripts" / "pretrain_gpt.py")
"""Script that a user launches."""
PRETRAIN_HYBRID = str(Path(PRETRAIN_GPT).with_name("pretrain_hybrid.py"))
"""Likewise, for hybrid models."""

LOSS_LOG = "losses.jsonl"
_TAIL_LINES = 60


class LaunchError(RuntimeError):
    """A rank failed or did not end in time; the message has the end of its output.

    Attributes:
        failed: the ranks that failed by themselves, first to fail first; empty after a time-out.
        outputs: all that each rank has written.
    """

    def __init__(self, message: str, failed: list[int], outputs: list[str]) -> None:
        super().__init__(message)
        self.failed = failed
        self.outputs = outputs


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        losses: exact "lm loss" of each iteration, from 1.
        grad_norms: gradient norm of each iteration before clipping.
        records: all that was logged of each iteration, such as auxiliary losses.
        outputs: standard output and error of each rank.
        elapsed_s: seconds from the start of the ranks to the end of the last.
        workdir: the ranks' working directory.
    """

    losses: dict[int, float]
    grad_norms: dict[int, float]
    records: list[dict[str, float]]
    outputs: list[str]
    elapsed_s: float
    workdir: Path

    @property
    def stdout(self) -> str:
        """Output of the last rank, which prints the losses."""
        return self.outputs[-1]


def launch(
    args: Sequence[str],
    num_ranks: int = 1,
    *,
    script: str = PRETRAIN_GPT,
    env: Mapping[str, str] | None = None,
    before: str = "",
    timeout_s: float = 900.0,
    grace_s: float = GRACE_S,
    workdir: str | Path | None = None,
) -> RunResult:
    """Train: run ``script`` with Megatron's arguments ``args`` on ``num_ranks`` ranks of this machine.

    No process that a rank has started outlives the call, however the rank ends.

    Args:
        args: Megatron's command line.
        num_ranks: number of processes.
        script: path of a Python file, or name of a module, that is run as ``__main__`` and calls
            `megatron_magi.mcore.entry.main`.
        env: environment variables of the ranks, added to this process's.
        before: ``module:function``, called in every rank with the working directory before the script.
        timeout_s: seconds for the launch; ranks still running then are killed.
        grace_s: seconds after the first failure of a rank; others still running then are killed. A test that expects
            several ranks to fail by themselves gives more, as a busy machine is slow.
        workdir: working directory of the ranks; a new temporary one when None. Relative paths in
            ``args`` are relative to it.

    Raises:
        LaunchError: a rank failed, or the time-out passed.
        RuntimeError: the process that ranks are started from has died.
        ValueError: ``num_ranks`` is not positive.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    folder = Path(workdir if workdir is not None else tempfile.mkdtemp(prefix="megatron_run_")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOSS_LOG).unlink(missing_ok=True)
    args = [*args, "--magi-loss-log", str(folder / LOSS_LOG)]
    begin = time.monotonic()
    with hosted_store() as port:
        variables = {**HOSTED, **(env or {})}
        request = Request(
            script, args, num_ranks, port, str(folder), timeout_s, variables, before, list(sys.path), grace_s
        )
        if torch.cuda.is_available():
            with contextlib.closing(Zygote("spawn")) as zygote:
                outcome = zygote.run(request)
        else:
            outcome = Zygote.shared().run(request)
    elapsed_s = time.monotonic() - begin
    outputs = [_read(output_path(folder, rank)) for rank in range(num_ranks)]
    if any(outcome.statuses):
        raise LaunchError(_explain(request, outcome, outputs), outcome.failed, outputs)
    records = [json.loads(line) for line in _read(folder / LOSS_LOG).splitlines()]
    return RunResult(
        losses={r["iteration"]: r["lm loss"] for r in records if "lm loss" in r},
        grad_norms={r["iteration"]: r["grad_norm"] for r in records if r["grad_norm"] is not None},
        records=records,
        outputs=outputs,
        elapsed_s=elapsed_s,
        workdir=folder,
    )


def tiny_gpt_args(
    data_prefix: str | Path,
    *extra: str,
    seq_length: int = 128,
    train_iters: int = 10,
    global_batch_size: int = 4,
    context_parallel_size: int = 1,
) -> list[str]:
    """Megatron's arguments for a two-layer GPT with grouped queries, RoPE, RMSNorm and SwiGLU in fp32.

    Attention is confined to documents and the loss leaves out what follows their end. With
    ``context_parallel_size`` above 1 the arguments ask for this package's attention.

    Args:
        data_prefix: path of an indexed dataset without its suffix; "mock" for synthetic tokens.
        *extra: further arguments; they win over the others.
    """
    data = ["--mock-data"] if str(data_prefix) == "mock" else ["--data-path", str(data_prefix), "--split", "1,0,0"]
    sizes = {
        "--num-layers": 2,
        "--hidden-size": 64,
        "--ffn-hidden-size": 128,
        "--num-attention-heads": 4,
        "--num-query-groups": 2,
        "--seq-length": seq_length,
        "--max-position-embeddings": seq_length,
        "--micro-batch-size": 1,
        "--global-batch-size": global_batch_size,
        "--train-iters": train_iters,
        "--lr": 1e-3,
        "--lr-decay-iters": 100,
        "--seed": 1234,
        "--eval-iters": 0,
        "--eval-interval": 1000,
        "--num-workers": 0,
        "--logging-level": 40,
        "--distributed-timeout-minutes": 15,
        "--context-parallel-size": context_parallel_size,
    }
    flags = ["--group-query-attention", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    flags += ["--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"]
    if context_parallel_size > 1:
        flags += ["--attention-backend", "magi"]
    named = ["--normalization", "RMSNorm", "--position-embedding-type", "rope"]
    numbers = [str(item) for pair in sizes.items() for item in pair]
    return [*device_args(), *numbers, *named, *flags, *no_dropout_args(), *byte_vocabulary_args(), *data, *extra]


def device_args() -> list[str]:
    """Megatron's arguments for training with torch's own layers on this machine's devices."""
    fusions = "--no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    common = ["--transformer-impl", "local", *fusions.split()]
    if torch.cuda.is_available():
        return [*common, "--distributed-backend", "nccl"]
    # Weights drawn without a device's generator are the same for every way of sharding them. Not on GPUs:
    # megatron-core 0.19.2 leaves a model that was initialised on the CPU there.
    return [*common, "--distributed-backend", "gloo", "--use-cpu-initialization"]


def no_dropout_args() -> list[str]:
    """Dropout would draw differently for every way of sharding."""
    return ["--attention-dropout", "0", "--hidden-dropout", "0"]


def byte_vocabulary_args() -> list[str]:
    """Tokens 0 to 255 are bytes, 256 ends a document; the size is divisible by usual tensor-parallel sizes.

    Else Megatron would pad it, to another size for each way of sharding, and so draw other weights.
    """
    size = ["--vocab-size", "288", "--make-vocab-size-divisible-by", "1"]
    return ["--tokenizer-type", "NullTokenizer", "--null-tokenizer-eod-id", "256", *size]


class Zygote:
    """The process that ranks are started from.

    Args:
        method: ``fork`` or ``spawn``, see `megatron_magi.testing.megatron_zygote`.

    Raises:
        RuntimeError: it has died while it started.
    """

    _shared: Zygote | None = None

    def __init__(self, method: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if method == "fork" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_magi.testing.megatron_zygote", method],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **threads},
            start_new_session=True,  # an interrupt from the keyboard must not end it before it has cleaned up
        )
        self._expect_line()

    @classmethod
    def shared(cls) -> Zygote:
        """The one of this process that forks, started on first use and ended with it."""
        if cls._shared is None or cls._shared._process.poll() is not None:
            cls._shared = cls("fork")
            atexit.register(cls._shared.close)
        return cls._shared

    def run(self, request: Request) -> Outcome:
        """Start the ranks and wait for their end, and that of all they have started.

        Raises:
            RuntimeError: the process has died.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.to_line())
            self._process.stdin.flush()
            return Outcome(**json.loads(self._expect_line()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process, ranks that it may have, and all they have started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=300)
        self._process.stdout.close()
        self._errors.close()

    def _expect_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"the process that ranks are started from has died\n{self._errors.read()}")
        return line


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _explain(request: Request, outcome: Outcome, outputs: list[str]) -> str:
    if outcome.timed_out:
        late = [rank for rank, status in enumerate(outcome.statuses) if status != 0]
        head = f"ranks {late} of {request.num_ranks} still running after {request.timeout_s} s"
        shown = late
    else:
        head = f"ranks {outcome.failed} of {request.num_ranks} failed, statuses {outcome.statuses}"
        shown = outcome.failed[:1]
    tails = ["\n".join(outputs[rank].splitlines()[-_TAIL_LINES:]) for rank in shown]
    return "\n".join([head, *(f"--- rank {rank}:\n{tail}" for rank, tail in zip(shown, tails, strict=True))])
