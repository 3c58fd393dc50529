"""Samples of 3 to 60 tokens, as they are or padded to the sequence length. A script.

Its first argument is ``packed`` or ``padded``, its second ``gpt`` or ``hybrid``.
"""

from __future__ import annotations

import sys

import torch

from megatron_magi.mcore.entry import main

SEQLEN = 128


class Samples(torch.utils.data.Dataset):
    """As many, of lengths that follow from their numbers."""

    def __init__(self, num_samples: int, is_padded: bool) -> None:
        self.num_samples, self.is_padded = num_samples, is_padded

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(int(index))
        length = int(torch.randint(3, 61, (), generator=draw))
        whole = torch.randint(0, 256, (length + 1,), generator=draw)
        item = {
            "tokens": whole[:-1],
            "labels": whole[1:],
            "loss_mask": (torch.arange(length) >= length // 4).float(),
            "position_ids": torch.arange(length),
        }
        if self.is_padded:
            item = {name: torch.nn.functional.pad(x, (0, SEQLEN - length)) for name, x in item.items()}
        return item


if __name__ == "__main__":
    kind, model = sys.argv[1:3]
    del sys.argv[1:3]
    main(model=model, dataset_provider=lambda nums: [Samples(n, kind == "padded") if n else None for n in nums])
