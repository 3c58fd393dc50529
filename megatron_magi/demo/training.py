"""The two runs of the demo: Megatron's trainer, started as a user would, and watched while it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_magi.demo.corpus import Corpus

SCRIPT = Path(__file__).resolve().parents[2] / "pretrain_scripts" / "pretrain_gpt.py"
"""What a user of Megatron launches."""

_SHAPE = {
    "--num-layers": 3,
    "--hidden-size": 128,
    "--ffn-hidden-size": 352,
    "--num-attention-heads": 2,
    "--num-query-groups": 1,
}
_POLL_S = 0.05
_WARM_UP_STEPS = 3
_TAIL_LINES = 40


@dataclass(frozen=True)
class Setting:
    """What both runs share.

    Attributes:
        num_steps: iterations.
        seq_length: tokens a sequence.
        micro_batch_size: sequences that go through the model together.
        global_batch_size: sequences a step.
        on_gpu: NCCL and bf16 instead of gloo and fp32.
        cores: threads that all ranks of a run share.
    """

    num_steps: int = 60
    seq_length: int = 1024
    micro_batch_size: int = 2
    global_batch_size: int = 4
    on_gpu: bool = False
    cores: int = 2

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.seq_length * self.global_batch_size


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        losses: of each step, from the first.
        tokens_per_s: after the first few steps.
        records: what Megatron and the plans say of each step.
    """

    losses: list[float]
    tokens_per_s: float
    records: list[dict]


class RunFailed(RuntimeError):
    """Megatron's trainer ended with an error; the message has the end of its output."""


def num_layers() -> int:
    """Layers of the model."""
    return _SHAPE["--num-layers"]


def head_dim() -> int:
    """Columns of a head: 64, which the kernels for GPUs have."""
    return _SHAPE["--hidden-size"] // _SHAPE["--num-attention-heads"]


def kv_row_bytes(setting: Setting) -> int:
    """Bytes of the keys and values of one token in one layer."""
    return 2 * _SHAPE["--num-query-groups"] * head_dim() * (2 if setting.on_gpu else 4)


def megatron_args(setting: Setting, corpus: Corpus, *, magi: bool, cp_size: int) -> list[str]:
    """Megatron's command line: a small Llama-style GPT, attention confined to documents."""
    values = _SHAPE | {
        "--seq-length": setting.seq_length,
        "--max-position-embeddings": setting.seq_length,
        "--micro-batch-size": setting.micro_batch_size,
        "--global-batch-size": setting.global_batch_size,
        "--train-iters": setting.num_steps,
        "--context-parallel-size": cp_size,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": corpus.vocab_size,
        "--split": "1,0,0",
        "--data-path": corpus.prefix,
        "--data-cache-path": corpus.prefix.parent / "index",
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
        "--lr": 1.5e-3,
        "--min-lr": 1.5e-4,
        "--lr-decay-style": "cosine",
        "--lr-warmup-fraction": 0.125,
        "--init-method-std": 0.05,  # Megatron's 0.02 gives this small model spikes of the loss
        "--seed": 1234,
        "--eval-iters": 0,
        "--eval-interval": 1000000,
        "--num-workers": 0,
        "--distributed-timeout-minutes": 5,
    }
    args = [str(item) for pair in values.items() for item in pair]
    args += ["--swiglu", "--group-query-attention", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    args += ["--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"]
    # Without Transformer Engine and Apex: torch's layers, and none of the fusions that need them.
    args += ["--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm"]
    args += ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--use-cpu-initialization"]
    args += ["--distributed-backend", "nccl", "--bf16"] if setting.on_gpu else ["--distributed-backend", "gloo"]
    return [*args, "--attention-backend", "magi"] if magi else args


def train(
    name: str, args: list[str], setting: Setting, num_ranks: int, folder: Path, on_step: Callable[[dict, float], None]
) -> Run:
    """Launch the trainer with torchrun and follow its loss log.

    Args:
        name: of the run, for its files in ``folder``.
        args: Megatron's command line.
        num_ranks: processes.
        on_step: called with the record of each step and the tokens per second so far.

    Raises:
        RunFailed: the trainer ended with an error, or without all of its steps.
    """
    log, losses = folder / f"{name}.log", folder / f"{name}.jsonl"
    losses.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(SCRIPT), *args, "--magi-loss-log", str(losses)]
    environment = _environment(setting.cores // num_ranks)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            run = _follow(process, losses, setting, on_step)
        finally:
            _stop(process)
    if process.returncode != 0 or len(run.losses) != setting.num_steps:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise RunFailed(f"{name}: status {process.returncode} after {len(run.losses)} steps; end of {log}:\n{tail}")
    return run


def _environment(num_threads: int) -> dict[str, str]:
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron insists on it with context parallelism
        "OMP_NUM_THREADS": str(max(1, num_threads)),
        "OMP_WAIT_POLICY": "passive",  # spinning threads would starve each other on a busy machine
        # The C library would give large tensors back to the system at once, and stock attention's scores
        # are large: a third of its time would go into page faults.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
    }


def _follow(process: subprocess.Popen, losses: Path, setting: Setting, on_step: Callable[[dict, float], None]) -> Run:
    records: list[dict] = []
    times: list[float] = []
    rate = 0.0
    ended = False
    while not ended:
        ended = process.poll() is not None  # before reading, so that nothing written at the end is missed
        lines = losses.read_text().split("\n")[:-1] if losses.exists() else []
        for line in lines[len(records) :]:
            records.append(json.loads(line))
            times.append(time.monotonic())
            first = min(_WARM_UP_STEPS, (len(times) - 1) // 2)
            if times[-1] > times[first]:
                rate = (len(times) - 1 - first) * setting.tokens_per_step / (times[-1] - times[first])
            on_step(records[-1], rate)
        time.sleep(_POLL_S)
    return Run([r["lm loss"] for r in records], rate, records)


def _stop(process: subprocess.Popen) -> None:
    """torchrun ends its ranks when it is asked to end."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
