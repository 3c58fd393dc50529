"""The forward step without plans: what Megatron's own GPT script does, for every other backend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_hybrid_data_context_parallel_groups
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers

from megatron_magi.mcore.loss import microbatch_loss

_OPTIONAL = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
_SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids")


def reads_data(vp_stage: int | None) -> bool:
    """Does this rank build data sets? The first tensor-parallel rank of stages that use a batch does."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and _uses_batch(vp_stage)


def _uses_batch(vp_stage: int | None) -> bool:
    args = get_args()
    at_end = parallel_state.is_pipeline_first_stage(
        ignore_virtual=vp_stage is None, vp_stage=vp_stage
    ) or parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    return at_end or _has_cu_seqlens(args) or _has_mtp(args, vp_stage)


def _has_cu_seqlens(args: Any) -> bool:
    return args.sft or args.dataloader_inter_document_masking


def _has_mtp(args: Any, vp_stage: int | None) -> bool:
    layout = args.pipeline_model_parallel_layout
    return mtp_on_this_rank(
        layout=layout, mtp_num_layers=args.mtp_num_layers, ignore_virtual=vp_stage is None, vp_stage=vp_stage
    )


def _next_batch(data_iterator: Iterator, vp_stage: int | None) -> dict[str, Any]:
    """This rank's share of a microbatch; entries that the stage does not need are None."""
    args = get_args()
    if not _uses_batch(vp_stage):
        return dict.fromkeys((*_SEQUENCES, *_OPTIONAL))
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        loaded = next(data_iterator)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        batch = dict.fromkeys((*_SEQUENCES, *_OPTIONAL))
        batch |= {name: value.to(device, non_blocking=True) for name, value in loaded.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=_has_cu_seqlens(args),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_has_mtp(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking,
    )


def _packed_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    if batch["cu_seqlens"] is None:
        return None
    cu_seqlens, padded = batch["cu_seqlens"][0], batch["cu_seqlens_padded"]
    max_seqlen = int(batch["max_seqlen"].max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=None if padded is None else padded[0],
        cu_seqlens_kv_padded=None if padded is None else padded[0],
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cp_group=batch["hybrid_cp_group"],
        local_cp_size=None if batch["local_cp_size"] is None else int(batch["local_cp_size"]),
        tokens_per_sample=get_args().seq_length,
    )


def stock_forward_step(
    data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Any]:
    """A microbatch in, a model's output and its loss out, as Megatron's schedules call it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = _next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=_packed_params(batch),
    )
    return output, partial(microbatch_loss, batch["loss_mask"])
