"""A step of reinforcement learning on rollouts that share prompts: as trees, and with each prompt repeated.

    python -m benchmarks.training.bench_prefix_tree [--csv FILE] [--prompts 8] [--rollouts 16] [--answer N]
        [--hidden N] ...

A prompt and its rollouts are a microbatch; a step is the forward and backward of all. Repeated, a microbatch is packed
documents, each a rollout. Both run the same model and attention, and must give the same loss. On a GPU the default size
is larger, in bf16; without one the time is CPU time of one thread. Answers have 0.5 to 1.5 times ``--answer`` tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._lib.provenance import write_csv
from megatron_magi import AttnMask, slice_attention
from megatron_magi.mask import builders
from megatron_magi.packing import make_prefix_tree

RATIOS = (0.25, 1.0, 4.0)
"""Tokens of a prompt over those of an answer."""

HEADER = ("prompt_over_answer", "repeated_tokens", "tree_tokens", "repeated_ms", "tree_ms", "speedup")


class Decoder(torch.nn.Module):
    """Layers of attention and a gated MLP, without positions, which cost the same in both."""

    def __init__(self, num_layers: int, hidden: int, head_dim: int, vocabulary: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.embedding = torch.nn.Embedding(vocabulary, hidden)
        torch.nn.init.normal_(self.embedding.weight, std=hidden**-0.5)  # logits of about 1, as losses are compared
        sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 8), "down": (4, 1)}
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {name: torch.nn.Linear(a * hidden, b * hidden, bias=False) for name, (a, b) in sizes.items()}
            )
            for _ in range(num_layers)
        )

    def forward(self, tokens: Tensor, labels: Tensor, mask: AttnMask) -> Tensor:
        """The log-probabilities of labels, fp32 ``[num_rows]``."""
        x = self.embedding(tokens)
        width = x.shape[-1:]
        for layer in self.layers:
            qkv = layer["qkv"](F.rms_norm(x, width)).view(len(x), 3, -1, self.head_dim)
            out, _ = slice_attention(*qkv.unbind(1), mask)
            x = x + layer["out"](out.reshape(len(x), -1))
            gate, up = layer["up"](F.rms_norm(x, width)).chunk(2, dim=-1)
            x = x + layer["down"](F.silu(gate) * up)
        return -F.cross_entropy((F.rms_norm(x, width) @ self.embedding.weight.T).float(), labels, reduction="none")


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward and what their losses are multiplied by."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    mask: AttnMask

    @classmethod
    def of(cls, tokens: np.ndarray, labels: np.ndarray, weights: np.ndarray, mask: AttnMask, device: str) -> Microbatch:
        arrays = (torch.from_numpy(x).to(device) for x in (tokens, labels, weights.astype(np.float32)))
        return cls(*arrays, mask)


def rollouts(args: argparse.Namespace, ratio: float, draw: np.random.Generator) -> tuple[list[np.ndarray], list]:
    """Samples of one prompt, and the weights of their tokens but the first: an advantage on the answer."""
    prompt = draw.integers(0, args.vocabulary, max(1, round(ratio * args.answer)))
    lengths = draw.integers(args.answer // 2, args.answer + args.answer // 2 + 1, args.rollouts)
    samples = [np.concatenate([prompt, draw.integers(0, args.vocabulary, n)]) for n in lengths]
    advantages = draw.standard_normal(args.rollouts)
    return samples, [np.repeat([0.0, a], [len(prompt) - 1, n]) for a, n in zip(advantages, lengths, strict=True)]


def repeated(samples: list[np.ndarray], weights: list[np.ndarray], device: str) -> Microbatch:
    """Each rollout a document with its own prompt."""
    mask = builders.varlen(doc_lengths=[len(sample) - 1 for sample in samples])
    parts = ([s[:-1] for s in samples], [s[1:] for s in samples], weights)
    return Microbatch.of(*(np.concatenate(part) for part in parts), mask, device)


def tree(samples: list[np.ndarray], weights: list[np.ndarray], device: str) -> Microbatch:
    """The prompt once. Making it is part of the step."""
    made = make_prefix_tree(samples)
    return Microbatch.of(made.tokens, made.labels, made.weights(weights), made.mask, device)


def step(model: Decoder, batches: list, make) -> tuple[float, float, int]:
    """Seconds, loss and tokens of a step."""
    device = str(model.embedding.weight.device)
    model.zero_grad()
    start, loss, num_tokens = _now(), torch.zeros((), device=device), 0
    for samples, weights in batches:
        batch = make(samples, weights, device)
        own = -(batch.weights * model(batch.tokens, batch.labels, batch.mask)).sum()
        own.backward()
        loss, num_tokens = loss + own.detach(), num_tokens + len(batch.tokens)
    return _now() - start, loss.item(), num_tokens


def compare(model: Decoder, args: argparse.Namespace, ratio: float) -> tuple:
    """A row of the table: medians of steps after the first, which compiles."""
    draw = np.random.default_rng(0)
    batches = [rollouts(args, ratio, draw) for _ in range(args.prompts)]
    results: dict = {repeated: [], tree: []}
    for _ in range(args.steps + 1):
        for make, own in results.items():
            own.append(step(model, batches, make))
    losses = [results[make][0][1] for make in (repeated, tree)]
    scale = sum(np.abs(weights).sum() for _, own in batches for weights in own)
    tolerance = 1e-5 if model.embedding.weight.dtype == torch.float32 else 1e-2
    if abs(losses[0] - losses[1]) > tolerance * scale:
        raise RuntimeError(f"the losses differ: {losses[0]} repeated, {losses[1]} as trees")
    ms = [1e3 * statistics.median(seconds for seconds, *_ in results[make][1:]) for make in (repeated, tree)]
    tokens = [results[make][0][2] for make in (repeated, tree)]
    return ratio, *tokens, *(f"{x:.1f}" for x in ms), f"{ms[0] / ms[1]:.2f}"


def _now() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Sizes; those that are not given depend on the device."""
    sizes = {
        "answer": (64, 1024),
        "layers": (2, 8),
        "hidden": (128, 2048),
        "head_dim": (32, 128),
        "vocabulary": (512, 32768),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"prompts": 8, "rollouts": 16, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, defaults in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=defaults[torch.cuda.is_available()])
    parser.add_argument("--csv")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[tuple]:
    """Prints the table, and writes it to ``--csv``; returns its rows."""
    args = parse(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Decoder(args.layers, args.hidden, args.head_dim, args.vocabulary)
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
    rows = []
    print(*(f"{name:>18}" for name in HEADER), sep="")
    for ratio in RATIOS:
        rows.append(compare(model, args, ratio))
        print(*(f"{value:>18}" for value in rows[-1]), sep="", flush=True)
        write_csv(args.csv, HEADER, rows)
    return rows


if __name__ == "__main__":
    main()
