"""Stock Megatron pretraining of a GPT: the run that others are compared with.

What Megatron's own `pretrain_gpt.py`, which its wheel lacks, does for a GPT on indexed text:
attention is Megatron's, and confined to documents by the mask that the data loader makes
(``--reset-attention-mask``). Context parallelism is refused.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from megatron_magi.mcore import cpu_device, wheel_repairs


def main(argv: list[str]) -> None:
    """Train with Megatron's command line ``argv``, given without the program's name."""
    sys.argv = ["pretrain_gpt.py", *argv]
    cpu_device.install()
    wheel_repairs.install()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    if args.context_parallel_size != 1:
        raise ValueError(f"context_parallel_size: stock attention runs on one rank, got {args.context_parallel_size}")
    config = pretrain_cfg_container_from_args(args, model_cfg=gpt_config_from_args(args))
    _datasets.is_distributed = True  # Megatron's mark of a provider that is called on every rank
    pretrain(config, _datasets, ModelType.encoder_or_decoder, _forward_step)


def _datasets(num_samples: tuple[int, int, int], vp_stage: int | None = None) -> list[Any]:
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    reads_batches = mpu.get_tensor_model_parallel_rank() == 0
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: reads_batches, config).build()


def _batch(data_iterator: Any) -> dict[str, torch.Tensor]:
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_tp_rank
    from megatron.training import get_args

    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    batch = {}
    if tp_rank == 0:
        batch = {name: value.to(device, non_blocking=True) for name, value in next(data_iterator).items()}
    return get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=1,
    )


def _forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    from megatron.training import get_timers

    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = _batch(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([total.detach().view(1), num_tokens.view(1)])
    return total, num_tokens, {"lm loss": report}


if __name__ == "__main__":
    main(sys.argv[1:])
