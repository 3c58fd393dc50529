"""A language model of transformers, trained by its Trainer with each sequence split over several ranks.

    torchrun --nproc-per-node 2 examples/transformers/train.py [--steps N] [--cpu]

Documents of random tokens are packed by the flattening collator. The model's layers alternate between a window and
full attention. The three lines that use this package are marked.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Gemma3TextConfig, Trainer, TrainingArguments

from megatron_magi.hf import MagiParallelismConfig  # (1) importing it registers the attention

VOCABULARY = 256


class Documents(torch.utils.data.Dataset):
    """Documents that count up from a random token."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        draw = torch.Generator().manual_seed(index)
        start, length = (int(torch.randint(low, 250, (), generator=draw)) for low in (0, 20))
        return {"input_ids": [(start + i) % VOCABULARY for i in range(length)]}


def make_model() -> torch.nn.Module:
    """A small Gemma 3 with random weights."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="magi")  # (2)


def main(argv: list[str] | None = None) -> list[float]:
    """Trains, and returns the losses of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cpu", action="store_true", help="also where there are GPUs")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    on_cpu = args.cpu or not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir="runs/transformers",
        parallelism_config=MagiParallelismConfig(cp_size=int(os.environ.get("WORLD_SIZE", "1"))),  # (3)
        per_device_train_batch_size=4,
        max_steps=args.steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
    )
    trainer = Trainer(make_model(), arguments, DataCollatorWithFlattening(), Documents())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
