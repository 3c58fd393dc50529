"""A training script as Megatron's users have it, with a batch, a loss and data sets of its own; one call is ours."""

from megatron_magi.mcore import install

install()

from functools import partial  # noqa: E402

import torch  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.utils import (  # noqa: E402
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_tokenizer, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens", "cu_seqlens_padded",
          "max_seqlen", "local_cp_size", "hybrid_cp_group")  # fmt: skip


def get_batch(data_iterator, vp_stage):
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * 5
    tp_rank, batch = mpu.get_tensor_model_parallel_rank(), {}
    if tp_rank == 0:
        loaded = next(data_iterator)
        batch = {name: loaded[name].to(DEVICE) if loaded.get(name) is not None else None for name in FIELDS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch[name] for name in FIELDS[:5]]


def loss_func(weights, losses):
    """A loss of this script's own: a token counts by its weight, in the unit of a tenth."""
    total = torch.sum(losses.view(-1).float() * weights.view(-1)) / 10
    num_tokens = (weights.sum() * 10).round().to(torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens])}


def forward_step(data_iterator, model):
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, position_ids, attention_mask = get_batch(data_iterator, vp_stage)
    # Every third byte counts half: what counts is the script's matter, and uneven over ranks.
    weights = None if loss_mask is None else torch.where(labels % 3 == 0, loss_mask / 2, loss_mask)
    losses = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=weights)
    return losses, partial(loss_func, weights)


def datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def is_built_here():
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, is_built_here, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    parsed = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    configure = gpt_config_from_args if parsed.hybrid_layer_pattern is None else hybrid_config_from_args
    configuration = pretrain_cfg_container_from_args(parsed, model_cfg=configure(parsed))
    pretrain(configuration, datasets_provider, ModelType.encoder_or_decoder, forward_step)
