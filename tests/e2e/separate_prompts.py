"""The data of the example in docs/megatron.md without sharing: a sequence is a prompt and one answer. A script."""

from __future__ import annotations

import runpy

import torch

from megatron_magi.mcore.entry import main


class SeparatePrompts(torch.utils.data.Dataset):
    """Item ``8 * i + j`` is answer j of item i of the example."""

    def __init__(self, example: dict, num_samples: int) -> None:
        self.sample = example["SharedPrompts"].sample
        self.seqlen = example["SEQLEN"]
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        prompt, answers = self.sample(int(index) // 8)
        answer = answers[int(index) % 8]
        whole = torch.cat([prompt, answer])
        item = {
            "tokens": whole[:-1],
            "labels": whole[1:],
            "loss_mask": (torch.arange(len(whole) - 1) >= len(prompt) - 1).float(),
            "position_ids": torch.arange(len(whole) - 1),
        }
        return {name: torch.nn.functional.pad(x, (0, self.seqlen - len(x))) for name, x in item.items()}


if __name__ == "__main__":
    example = runpy.run_path("../shared_prompts.py")
    main(dataset_provider=lambda nums: [SeparatePrompts(example, n) if n else None for n in nums])
