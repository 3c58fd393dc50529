"""The forward step without plans: what Megatron's own GPT script does, for every other backend."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_hybrid_data_context_parallel_groups
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args

from megatron_magi.mcore import seams
from megatron_magi.mcore.hybrid_pattern import linear_layers
from megatron_magi.mcore.loss import make_distillation_loss, microbatch_loss
from megatron_magi.mcore.step import count_documents, load_batch, run_model
from megatron_magi.runtime.upload import current_device

_OPTIONAL = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
_SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids")


def reads_data(vp_stage: int | None) -> bool:
    """Does this rank build data sets? The first tensor-parallel rank of stages that use a batch does."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and _uses_batch(vp_stage)


def _uses_batch(vp_stage: int | None) -> bool:
    args, chunk = get_args(), _chunk(vp_stage)
    at_end = parallel_state.is_pipeline_first_stage(**chunk) or parallel_state.is_pipeline_last_stage(**chunk)
    return at_end or _has_cu_seqlens(args) or _has_mtp(args, vp_stage)


def _chunk(vp_stage: int | None) -> dict[str, Any]:
    """Arguments of Megatron's questions about a model chunk; about the rank where it has no chunks."""
    return {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}


def _has_cu_seqlens(args: Any) -> bool:
    return args.sft or args.dataloader_inter_document_masking


def _has_mtp(args: Any, vp_stage: int | None) -> bool:
    layout = args.pipeline_model_parallel_layout
    if layout is not None:  # Megatron keeps what it has parsed
        layout = PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
    return mtp_on_this_rank(layout=layout, mtp_num_layers=args.mtp_num_layers, **_chunk(vp_stage))


def _next_batch(data_iterator: Iterator, vp_stage: int | None) -> dict[str, Any]:
    """This rank's share of a microbatch; entries that the stage does not need are None."""
    args = get_args()
    if not _uses_batch(vp_stage):
        return dict.fromkeys((*_SEQUENCES, *_OPTIONAL))
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        loaded = next(data_iterator)
        _check_fields(loaded, args)
        device = current_device()
        batch = dict.fromkeys((*_SEQUENCES, *_OPTIONAL))
        # A user's data set may have fields that Megatron does not know.
        batch |= {name: loaded[name].to(device, non_blocking=True) for name in batch if name in loaded}
    options = seams.named(
        "core.utils:get_batch_on_this_tp_rank",
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
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(**_chunk(vp_stage)),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(**_chunk(vp_stage)),
    )
    batch = get_batch_on_this_tp_rank(batch, **options)
    # Before 0.19 Megatron packs one sample alone.
    batch = getattr(utils, "flatten_batch_for_packed_sequences", lambda packed: packed)(batch)
    if batch["tokens"] is None and batch["labels"] is None:
        # A stage in the middle, which needs nothing but the bounds of documents: these stay whole.
        return batch
    options = seams.named(
        "core.utils:get_batch_on_this_cp_rank",
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
        # Conversations are padded for a zigzag over the whole sequence.
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )
    return get_batch_on_this_cp_rank(batch, **options)


def _check_fields(loaded: Mapping[str, torch.Tensor], args: Any) -> None:
    """Refuses a microbatch without what Megatron's other tensor-parallel ranks would wait for.

    Raises:
        ValueError: a data set of the user's lacks a field.
    """
    wanted = [*_SEQUENCES, *(["attention_mask"] if args.create_attention_mask_in_dataloader else [])]
    missing = [name for name in wanted if name not in loaded]
    if missing:
        advice = "; give --no-create-attention-mask-in-dataloader" if "attention_mask" in missing else ""
        raise ValueError(f"dataset_provider: its items have no {' and no '.join(missing)}{advice}")


def _packed_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    if batch["cu_seqlens"] is None:
        return None
    padded = batch["cu_seqlens_padded"]
    # Megatron's kernels go by the padded bounds where there are any.
    bounds = (batch["cu_seqlens"] if padded is None else padded)[0]
    max_seqlen = int(batch["max_seqlen"].max())
    has_mamba = "M" in linear_layers(get_args())
    fields = seams.named(
        "core.packed_seq_params:PackedSeqParams",
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=None if padded is None else bounds,
        cu_seqlens_kv_padded=None if padded is None else bounds,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cp_group=batch["hybrid_cp_group"],
        local_cp_size=None if batch["local_cp_size"] is None else int(batch["local_cp_size"]),
        tokens_per_sample=get_args().seq_length,
        # Of these Mamba's documents are made; without, its state runs on from each into the next.
        total_tokens=int(bounds[-1]) if has_mamba else None,
    )
    return PackedSeqParams(**fields)


class StockForwardStep:
    """A microbatch in, a model's output and its loss out.

    Args:
        args: a validated command line.
    """

    def __init__(self, args: Namespace) -> None:
        self._distill: Callable | None = None if args.logits_load_dir is None else make_distillation_loss(args)

    def __call__(
        self, data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """The forward step that Megatron's schedules call; with ``return_schedule_plan`` the model is not run yet."""
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        batch = load_batch(lambda: _next_batch(data_iterator, vp_stage))
        cu_seqlens = batch["cu_seqlens"]
        count_documents(model, None if cu_seqlens is None else cu_seqlens[0])
        output = run_model(
            model,
            return_schedule_plan,
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=_packed_params(batch),
        )
        if self._distill is not None:
            return output, partial(self._distill, batch["loss_mask"], model=model)
        return output, partial(microbatch_loss, batch["loss_mask"])
