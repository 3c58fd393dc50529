"""Steps of a Llama of transformers (1B, random weights, bf16), with magi and with transformers' other attentions.

    python -m benchmarks.training.bench_transformers --csv OUT.csv --runs documents:magi:8192 documents:sdpa:8192
    torchrun --nproc-per-node 2 -m benchmarks.training.bench_transformers --csv OUT.csv --runs causal:magi:16384

A run is ``MASK:ATTENTION:TOKENS``: one ``causal`` document or packed ``documents`` (new ones in each step, log-normal
lengths with a median of 1,000 tokens); ``magi``, ``sdpa`` or ``flex_attention``; tokens a GPU. On several GPUs one
sequence lies on all of them and accelerate's FSDP2 shards the parameters: with `MagiParallelismConfig`, or with
accelerate's own context parallelism (``sdpa``, ring attention of torch, which knows one causal document alone).

A step is a forward, a backward and an update by SGD. Times are medians over the second half of the steps, of the
slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks._lib.provenance import print_row, write_csv
from megatron_magi.hf import MagiParallelismConfig

VOCABULARY = 32_000
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
HEADER = ["ranks", "mask", "attention", "tokens_a_gpu", "step_ms", "best_ms", "steps", "peak_gib", "first_loss", "loss"]


def batch_of(mask: str, num_tokens: int, step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens ``[1, num_tokens]``, their labels and positions."""
    rng = np.random.default_rng(step)
    lengths = [num_tokens]
    if mask == "documents":
        lengths = []
        while sum(lengths) < num_tokens:
            lengths.append(min(max(1, round(rng.lognormal(np.log(1000.0), 1.5))), num_tokens - sum(lengths)))
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (1, num_tokens)))
    labels = tokens.clone()
    labels[0, torch.from_numpy(positions[0] == 0)] = -100
    batch = {"input_ids": tokens, "labels": labels, "position_ids": torch.from_numpy(positions)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def prepared(attention: str, sizes: dict[str, int], device: torch.device) -> tuple[Any, Any, Accelerator | None]:
    """The model and its optimizer, over all ranks where there are several."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=1 << 20, **sizes)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:
        return model, torch.optim.SGD(model.parameters(), lr=1e-3), None
    AcceleratorState._reset_state(True)
    kind = MagiParallelismConfig if attention == "magi" else ParallelismConfig
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    on_cpu = device.type == "cpu"
    accelerator = Accelerator(cpu=on_cpu, parallelism_config=kind(cp_size=num_ranks), fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return model, optimizer, accelerator


def loss_of(model: Any, batch: dict[str, torch.Tensor], accelerator: Accelerator | None, attention: str) -> float:
    """Runs forward and backward; returns the loss of the whole batch."""
    if accelerator is None or attention == "magi":
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()
    shifted = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    batch = {**batch, "shift_labels": shifted}
    buffers = list(batch.values())
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        loss = model(**batch, labels=batch["shift_labels"], use_cache=False).loss
        accelerator.backward(loss)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def measure(run: str, num_steps: int, sizes: dict[str, int], device: torch.device) -> list[Any]:
    """One row of the table."""
    mask, attention, tokens = run.split(":")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1 and mask == "documents" and attention != "magi":
        raise ValueError(f"runs: accelerate's context parallelism knows no documents, got {run}")
    model, optimizer, accelerator = prepared(attention, sizes, device)
    model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for step in range(num_steps):
        batch = batch_of(mask, int(tokens) * num_ranks, step, device)
        _wait(device, num_ranks)
        begin = time.perf_counter()
        losses.append(loss_of(model, batch, accelerator, attention))
        optimizer.step()
        optimizer.zero_grad()
        _wait(device, num_ranks)
        times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    late = times[num_steps // 2 :]
    row = [num_ranks, mask, attention, tokens, f"{np.median(late):.1f}", f"{min(late):.1f}", num_steps, f"{peak:.1f}"]
    return [*row, f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]


def _wait(device: torch.device, num_ranks: int) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if num_ranks > 1:
        dist.barrier()


def main() -> None:
    """Runs one after another and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, help="MASK:ATTENTION:TOKENS")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--csv", required=True, help="the file to write")
    parser.add_argument("--tiny", action="store_true", help="a model that runs on CPUs")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    rows = []
    for run in args.runs:
        try:
            rows.append(measure(run, args.steps, TINY if args.tiny else LLAMA_1B, device))
        except torch.OutOfMemoryError:
            mask, attention, tokens = run.split(":")
            rows.append([os.environ.get("WORLD_SIZE", "1"), mask, attention, tokens, *["out of memory"] * 6])
        gc.collect()
        torch.cuda.empty_cache()
        if rank == 0:
            print_row(HEADER, rows[-1])
            write_csv(args.csv, HEADER, rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
