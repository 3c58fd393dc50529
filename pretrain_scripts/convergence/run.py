"""Trains one model several times and compares the loss curves: Megatron's own attention and magi, with several seeds.

    # a GPT of 103 M parameters on the source of Python's standard library; for two GPUs
    python pretrain_scripts/convergence/run.py gpt_103m_4k --cp-sizes 2 --out convergence_out

    # Llama 1B, 8k tokens, global batch 16, CP 1, 2, 4 and 8; on eight GPUs
    python pretrain_scripts/convergence/run.py llama_1b_8k --out convergence_out --data-path PREFIX \\
        -- --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL

Each run uses all ranks; those beyond the CP size are data-parallel, so all runs of a seed see the same batches, and a
rank has as many tokens of a microbatch in one as in the other. Stock is Transformer Engine's layers and attention if it
is installed, else Megatron's local attention. Runs that are complete are not repeated, others begin again. It fails if
a curve of magi differs more from that of stock with the same seed than stock's curves with two seeds do. With
--control-ranks stock is trained once more with each seed over other data-parallel sizes: its sums have another order
and nothing else differs, so the table shows beside magi's differences what rounding alone makes. Arguments after -- go
to all runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import curves
import torch
import yaml

from megatron_magi.demo.corpus import build_corpus

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SETTINGS = sorted(path.stem for path in HERE.glob("*.yaml"))
SEEDS = (1234, 4321, 2718)
TORCH_LAYERS = ["--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm"]
TORCH_LAYERS += ["--no-masked-softmax-fusion"]
CPU = ["--distributed-backend", "gloo", "--use-cpu-initialization", "--bf16=false"]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and compares; 0 if all curves are within the band."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    cp_sizes = options.cp_sizes or [size for size in (1, 2, 4, 8) if options.ranks % size == 0]
    out = options.out.resolve() / options.setting
    out.mkdir(parents=True, exist_ok=True)
    shared = ["--config", str(HERE / f"{options.setting}.yaml"), *layers(), *data_args(options.data_path, out)]
    shared += options.megatron
    attentions: dict[str, list[str]] = {curves.STOCK: []}
    sequences = sequences_of(options.setting, options.megatron)
    for size in cp_sizes:
        attentions[f"magi_cp{size}"] = ["--attention-backend", "magi", "--context-parallel-size", str(size)]
        attentions[f"magi_cp{size}"] += ["--micro-batch-size", str(sequences * size)]
    runs = [(name, arguments, options.ranks) for name, arguments in attentions.items()]
    runs += [(curves.control_name(ranks), [], ranks) for ranks in options.control_ranks]
    for seed, (name, arguments, ranks) in itertools.product(options.seeds, runs):
        train(curves.run_name(name, seed), [*shared, "--seed", str(seed), *arguments], ranks, out)
    return curves.report(out, f"{options.setting}, {options.ranks} ranks: {what_is_stock()} and magi")


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `megatron` is what comes after the first ``--``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS, help="a YAML file next to this one")
    parser.add_argument("--out", type=Path, required=True, help="folder of losses, logs, plot and table")
    parser.add_argument("--data-path", help="prefix of an indexed data set; without it Python's standard library")
    ranks_help = "number of processes, each with a GPU of its own if there are any (default: %(default)s)"
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help=ranks_help)
    parser.add_argument(
        "--cp-sizes", type=int, nargs="+", help="of the runs with magi (default: 1, 2, 4, 8 as far as RANKS allows)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="at least two (default: %(default)s)")
    parser.add_argument(
        "--control-ranks",
        type=int,
        nargs="+",
        default=[],
        help="numbers of processes of further runs of stock (default: none)",
    )
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:end])
    if len(set(options.seeds)) < 2:
        parser.error("argument --seeds: at least two different ones make a band")
    if any(ranks < 1 or ranks == options.ranks for ranks in options.control_ranks):
        parser.error(f"argument --control-ranks: positive numbers other than the {options.ranks} of stock's runs")
    options.megatron = list(argv[end + 1 :])
    return options


def sequences_of(setting: str, further: Sequence[str]) -> int:
    """Sequences of a microbatch of stock: what comes last in the arguments, or else the file's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--micro-batch-size", type=int)
    given = parser.parse_known_args(further)[0].micro_batch_size
    return given or yaml.safe_load((HERE / f"{setting}.yaml").read_text())["micro-batch-size"]


def what_is_stock() -> str:
    """Name of the attention that magi is compared with."""
    return "Transformer Engine" if has_transformer_engine() else "Megatron's local attention"


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def layers() -> list[str]:
    """Arguments for the layers and devices of this machine."""
    if has_transformer_engine():
        # A mask of seqlen^2 for each sequence, which TE does not read.
        return ["--no-create-attention-mask-in-dataloader"]
    return TORCH_LAYERS if torch.cuda.is_available() else [*TORCH_LAYERS, *CPU]


def data_args(data_path: str | None, out: Path) -> list[str]:
    """Arguments for the data; bytes of the standard library, made on first use, if no path is given."""
    if data_path is not None:
        return ["--data-path", data_path]
    corpus = build_corpus(out.parent / "corpus", max_document_bytes=1 << 20, vocab_size=257)
    return ["--data-path", str(corpus.prefix), "--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]


def train(name: str, arguments: list[str], ranks: int, out: Path) -> None:
    """One run: losses to NAME.jsonl, output to NAME.log. Ends the process if it fails."""
    losses, log, done = out / f"{name}.jsonl", out / f"{name}.log", out / f"{name}.done"
    said = json.dumps([*arguments, ranks])
    if done.exists() and done.read_text() == said:
        print(f"{name}: is there", flush=True)
        return
    done.unlink(missing_ok=True)
    losses.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "pretrain_scripts" / "pretrain_gpt.py"), *arguments, "--magi-loss-log", str(losses)]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads)} if not torch.cuda.is_available() else {}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    begin = time.monotonic()
    with log.open("w") as output:
        # torchrun ends its ranks when it is interrupted, as this process then is.
        status = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, check=False
        ).returncode
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        sys.exit(f"{name}: status {status}, see {log}; it ends with\n{tail}")
    found = curves.read_losses(losses)
    print(f"{name}: {len(found)} iterations, last loss {found[-1]:.4f}, {time.monotonic() - begin:.0f} s", flush=True)
    done.write_text(said)


if __name__ == "__main__":
    sys.exit(main())
