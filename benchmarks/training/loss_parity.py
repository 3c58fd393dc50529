"""Training on GPUs: parity with stock attention, and a long packed batch.

    python -m benchmarks.training.loss_parity --out DIR [--sizes 1 2 ...] [--schedules] [--judge DIR ...]

Parity: a small GPT on packed documents, Megatron's own unfused attention at CP=1 against
`--attention-backend magi` on 1, 2, 4, ... GPUs, in fp32 and bf16. Losses are compared with those of
stock attention in fp32. In fp32 the budget is 1e-5. In bf16 training amplifies every rounding, so
the budget is what bf16 costs stock attention itself: twice the largest difference between the
stock runs in bf16 and in fp32. The difference to the stock run in bf16 is printed as well, also
for the dense reference (`magi_dense`), which shows what another order of the same sums costs.

Long: 64k tokens a sequence, packed documents, the largest number of GPUs; prints tokens/s, balance, bytes and the
largest memory of a rank.

With `--schedules` instead of these: stock attention on one GPU, and on several magi as it is by default and in the ways
of `SCHEDULES`, which differ in collectives and stages. In fp32 attention is always in stages, by the implementation in
torch; in bf16 the default is one launch. Two levels need four GPUs: a node of one rank is no node.

With `--backends`: stock attention on one GPU, and magi by each of `BACKENDS`, in the dtypes that it takes.

The trainings of one number of GPUs share a launch. `--sizes` takes some of them and `--judge` makes one table of what
several calls have measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks._lib.provenance import print_row, write_csv
from benchmarks._lib.trainer import TrainingSession
from megatron_magi.demo.corpus import build_corpus
from megatron_magi.testing.descendants import become_subreaper, kill_descendants
from megatron_magi.testing.megatron_launch import tiny_gpt_args

FP32_BUDGET = 1e-5
SCHEDULES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "magi_4_stages": ({}, ("--magi-overlap-degree", "4")),
    "magi_4_stages_nccl": ({"MAGI_ATTENTION_NATIVE_GRPCOLL": "0"}, ("--magi-overlap-degree", "4")),
    "magi_hidden_tail": ({"MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE": "1"}, ("--magi-overlap-degree", "4")),
    "magi_no_overlap": ({}, ("--magi-overlap-degree", "0")),
    "magi_1_stage": ({}, ("--magi-overlap-degree", "1")),
    "magi_nccl": ({"MAGI_ATTENTION_NATIVE_GRPCOLL": "0"}, ()),
    "magi_two_levels": ({}, ("--hierarchical-context-parallel-sizes", "2")),
}
"""Variables and arguments of a run; the number of nodes follows the last."""
_KERNELS = "MAGI_ATTENTION_KERNEL_BACKEND"
BACKENDS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "magi_ffa": ({_KERNELS: "ffa"}, ()),
    "magi_cudnn": ({_KERNELS: "cudnn"}, ()),
    "magi_triton": ({_KERNELS: "triton"}, ()),
}
"""Likewise; `_IN_FP32` take fp32."""
_IN_FP32 = ("stock", "magi_triton")
_WAYS = SCHEDULES | BACKENDS
_SET = {name for variables, _ in _WAYS.values() for name in variables} | {"MAGI_ATTENTION_SDPA_BACKEND"}
HEADER = ["run", "dtype", "ranks", "iterations", "first_loss", "last_loss", "difference_to_fp32", "budget",
          "difference_to_stock", "tokens_per_s", "balance", "received_rows", "lower_bound_rows",
          "max_allocated_gib", "seconds"]  # fmt: skip


@dataclass
class Run:
    """One training.

    Attributes:
        name: ``stock``, ``magi``, ``magi_dense``, ``long``, or one of `SCHEDULES` or `BACKENDS`.
        dtype: ``fp32`` or ``bf16``.
        ranks: GPUs, which hold each sequence together.
        losses: of each iteration, from 1.
        record: what was logged of the last iteration.
        tokens_per_s: of all GPUs together, after the first two steps.
        peak_gib: largest memory of a rank.
        seconds: of the training, its setup included.
        error: why it failed.
    """

    name: str
    dtype: str
    ranks: int
    losses: dict[int, float] = field(default_factory=dict)
    record: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float = 0.0
    peak_gib: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens of a sequence, sequences of a step, steps."""
        return (65536, 2, 6) if self.name == "long" else (2048, 4, 20)

    def args(self, data: Path) -> list[str]:
        """Megatron's command line: a model big enough for tensor cores, small enough for a minute."""
        seq_length, batch, steps = self.shape
        args = ["--num-layers", "4", "--hidden-size", "512", "--ffn-hidden-size", "1408", "--num-attention-heads", "4"]
        args += ["--num-query-groups", "2", "--log-interval", "1", "--context-parallel-size", str(self.ranks)]
        args += ["--bf16"] if self.dtype == "bf16" else []
        args += [] if self.name == "stock" else ["--attention-backend", "magi"]
        args += _WAYS.get(self.name, ({}, ()))[1]
        args += [str(self.ranks // 2)] if self.name == "magi_two_levels" else []
        return tiny_gpt_args(data, *args, seq_length=seq_length, train_iters=steps, global_batch_size=batch)


def runs_of(size: int, is_largest: bool, schedules: bool = False, backends: bool = False) -> list[Run]:
    """What is trained on so many GPUs; with stock attention, on one only."""
    if backends:
        names = ["stock", *BACKENDS] if size == 1 else list(BACKENDS)
        return [Run(n, dtype, size) for dtype in ("fp32", "bf16") for n in names if dtype == "bf16" or n in _IN_FP32]
    if schedules:
        ways = [name for name in SCHEDULES if name != "magi_two_levels" or size >= 4]
        names = ["stock"] if size == 1 else ["magi", *ways]
    else:
        names = ["stock", "magi_dense", "magi"] if size == 1 else ["magi"]
    parity = [Run(name, dtype, size) for dtype in ("fp32", "bf16") for name in names]
    return [*parity, Run("long", "bf16", size)] if is_largest and not schedules else parity


def work(runs: Sequence[Run], data: Path, out: Path) -> None:
    """In a rank: trains one run after another, and renews the results after each."""
    session = TrainingSession()
    for number, run in enumerate(runs):
        log = out / f"losses_{run.name}_{run.dtype}_{run.ranks}.jsonl"
        begin = time.perf_counter()
        for name in _SET:
            os.environ.pop(name, None)
        os.environ |= _WAYS.get(run.name, ({}, ()))[0]
        os.environ["MAGI_ATTENTION_SDPA_BACKEND"] = str(int(run.name == "magi_dense"))
        try:
            training = session.run([*run.args(data), "--magi-loss-log", str(log)])
        except Exception:  # noqa: BLE001  (the others are to run; all ranks fail alike)
            run.error = traceback.format_exc()
        else:
            peaks: list = [None] * run.ranks
            torch.distributed.all_gather_object(peaks, (training.peak_gib, training.losses))
            run.peak_gib = max(peak for peak, _ in peaks)
            run.losses = next(losses for _, losses in reversed(peaks) if losses)
            seq_length, batch, _ = run.shape
            steps = training.step_ms[2:]  # kernels are loaded before
            run.tokens_per_s = 1e3 * seq_length * batch * len(steps) / sum(steps)
        run.seconds = time.perf_counter() - begin
        if os.environ["RANK"] == "0":
            logged = log.read_text().splitlines() if log.exists() else []
            run.record = json.loads(logged[-1]) if logged else {}
            _path(out, run.ranks).write_text(json.dumps([asdict(done) for done in runs[: number + 1]]))
            print(f"RUN {run.name} {run.dtype} {run.ranks}: {run.error or run.losses}", flush=True)


def _path(out: Path, size: int) -> Path:
    return out / f"training_runs_{size}.json"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """What launches have written there."""
    paths = sorted(path for folder in folders for path in folder.glob("training_runs_*.json"))
    found = [Run(**run) for path in paths for run in json.loads(path.read_text())]
    for run in found:
        run.losses = {int(iteration): loss for iteration, loss in run.losses.items()}
    return found


def difference(a: Run, b: Run) -> float:
    """Largest relative difference of the losses of two runs; infinite where iterations are missing."""
    return (
        max(abs(a.losses[i] / b.losses[i] - 1) for i in b.losses)
        if a.losses.keys() == b.losses.keys()
        else float("inf")
    )


def judge(runs: Sequence[Run]) -> tuple[list[list], list[str]]:
    """Rows of the table, and what failed or left its budget."""
    rows, failures = [], [f"{r.name} {r.dtype} on {r.ranks} GPUs: {r.error}" for r in runs if r.error]
    stock = {r.dtype: r for r in runs if r.name == "stock" and not r.error}
    names = ("stock", "magi_dense", "magi", *_WAYS, "long")
    for run in sorted(runs, key=lambda r: (r.name == "long", r.dtype != "fp32", names.index(r.name), r.ranks)):
        if run.error:
            continue
        compared = ["", "", ""]
        if run.name != "long" and stock.keys() >= {"fp32", run.dtype}:
            exact = difference(run, stock["fp32"])
            budget = FP32_BUDGET if run.dtype == "fp32" else 2 * difference(stock["bf16"], stock["fp32"])
            compared = [f"{exact:.2e}", f"{budget:.2e}", f"{difference(run, stock[run.dtype]):.2e}"]
            if run.name.startswith("magi") and not exact <= budget:
                failures.append(
                    f"{run.name} {run.dtype} on {run.ranks} GPUs differs by {exact:.2e}, allowed is {budget:.2e}"
                )
        plan = [""] * 3
        if "balance" in run.record:
            plan = [f"{run.record['balance']:.4f}", run.record["received_rows"], run.record["lower_bound_rows"]]
        losses = [f"{run.losses[i]:.6f}" for i in (min(run.losses), max(run.losses))]
        speed, peak, seconds = f"{run.tokens_per_s:.0f}", f"{run.peak_gib:.2f}", f"{run.seconds:.1f}"
        rows.append([run.name, run.dtype, run.ranks, len(run.losses), *losses, *compared, speed, *plan, peak, seconds])
    return rows, failures


def launch(size: int, devices: Sequence[int], options: argparse.Namespace) -> subprocess.Popen:
    """Starts torchrun over this file's worker."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(names[d] for d in devices),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", __spec__.name, "--out", str(options.out), "--worker", str(size)]
    command += ["--data", str(options.data), "--sizes", *map(str, options.sizes)]
    command += ["--schedules"] if options.schedules else []
    command += ["--backends"] if options.backends else []
    with (options.out / f"log_{size}.txt").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def run_all(num_gpus: int, options: argparse.Namespace) -> None:
    """Launches side by side as far as there are GPUs, so speeds are rough."""
    free, running = list(range(num_gpus)), []
    todo = sorted(options.sizes)
    deadline = time.monotonic() + options.timeout
    while (todo or running) and time.monotonic() < deadline:
        if todo and len(free) >= todo[0]:
            size = todo.pop(0)
            mine, free = free[:size], free[size:]
            running.append((launch(size, mine, options), mine))
        time.sleep(0.2)
        for process, mine in running:
            if process.poll() is not None:
                free += mine
        running = [(process, mine) for process, mine in running if process.poll() is None]


def main() -> None:
    """Runs what is asked for; exits non-zero if a run fails or leaves its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of GPUs; powers of two up to all if not given")
    parser.add_argument("--schedules", action="store_true", help="compare implementations and schedules instead")
    parser.add_argument("--backends", action="store_true", help="compare kernels instead")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="DIR", help="only judge the results in these folders")
    parser.add_argument("--timeout", type=float, default=270.0, help="seconds for all of it")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.worker:
        is_largest = options.worker == max(options.sizes)
        runs = runs_of(options.worker, is_largest, options.schedules, options.backends)
        work(runs, options.data, options.out)
        sys.stdout.flush()
        os._exit(0)
    options.out.mkdir(parents=True, exist_ok=True)
    num_gpus = torch.cuda.device_count()
    if not options.judge:
        if not num_gpus:
            sys.exit("needs a GPU")
        options.sizes = options.sizes or [size for size in (1, 2, 4, 8) if size <= num_gpus]
        # Whole files, long ones too: what a batch of 64k tokens holds is wildly uneven.
        options.data = build_corpus(
            Path("gpu_training_work").resolve(), max_document_bytes=1 << 20, vocab_size=257
        ).prefix
        become_subreaper()
        try:
            run_all(num_gpus, options)
        finally:
            kill_descendants()
    runs = read_runs(options.judge or [options.out])
    rows, failures = judge(runs)
    for row in rows:
        print_row(HEADER, row)
    write_csv(options.out / f"training_{max((r.ranks for r in runs), default=0)}gpu.csv", HEADER, rows)
    missing = [] if options.judge else [size for size in options.sizes if not any(r.ranks == size for r in runs)]
    failures += [f"{size} GPUs: no result, see log_{size}.txt" for size in missing]
    sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main()
