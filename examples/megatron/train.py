"""A GPT trained by Megatron on rollouts that share their prompts, with each sequence split over two ranks.

    torchrun --nproc-per-node 2 examples/megatron/train.py [all of Megatron's arguments]

Each item of the data set is a tree: a prompt and eight answers to it, the prompt stored once. Arguments on the command
line override those below. On GPUs add ``--distributed-backend nccl --bf16``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from megatron_magi.mcore.entry import main
from megatron_magi.packing import make_prefix_tree

SEQLEN, NUM_ANSWERS, VOCABULARY = 256, 8, 500
CONFIG = Path(__file__).parents[2] / "configs" / "tiny_gpt_256_2cpu.yaml"
OWN_DATA = [f"--{flag}=false" for flag in ("mock-data", "reset-attention-mask", "reset-position-ids", "eod-mask-loss")]


class Rollouts(torch.utils.data.Dataset):
    """Prompts that count up; answer i goes on in steps of i + 1."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(int(index))
        prompt = (draw.integers(VOCABULARY) + np.arange(draw.integers(20, 60))) % VOCABULARY
        lengths = draw.integers(4, 20, NUM_ANSWERS)
        answers = [(prompt[-1] + (i + 1) * np.arange(1, n + 1)) % VOCABULARY for i, n in enumerate(lengths)]
        tree = make_prefix_tree([np.concatenate([prompt, answer]) for answer in answers])
        # The loss is that of the answers: of the tokens from the prompt's end on.
        counts = [np.repeat([0, 1], [len(prompt) - 1, n]) for n in lengths]
        return tree.item(SEQLEN, num_nodes=2 * NUM_ANSWERS, samples=counts)


if __name__ == "__main__":
    sys.argv[1:1] = ["--config", str(CONFIG), *OWN_DATA, "--magi-mask", "prefix_tree"]
    main(dataset_provider=lambda numbers: [Rollouts(n) if n else None for n in numbers])
