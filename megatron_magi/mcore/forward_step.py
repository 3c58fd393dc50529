"""The forward step of Megatron's trainer: a microbatch in, a model's output and its loss out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_context_parallel_group, get_tensor_and_context_parallel_group
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer, print_rank_0

from megatron_magi import envs
from megatron_magi.attention import AttnShape, needed_kernels
from megatron_magi.calibration import with_present_rates
from megatron_magi.comm.transport import peer_collectives
from megatron_magi.config import MagiConfig
from megatron_magi.cuda.target import local_target
from megatron_magi.mcore import loader, sample_packing
from megatron_magi.mcore.batch import BatchDispatcher, LocalBatch, ReadBatches
from megatron_magi.mcore.groups import make_agreement_group
from megatron_magi.mcore.hybrid_pattern import has_sparse_layers, linear_layers
from megatron_magi.mcore.kernels import compile_ahead
from megatron_magi.mcore.layout import layout_of
from megatron_magi.mcore.look_ahead import LookAhead, look_ahead_of
from megatron_magi.mcore.loss import averages_reports, microbatch_loss
from megatron_magi.mcore.loss_log import LossLog
from megatron_magi.mcore.planner import Planner
from megatron_magi.mcore.settings import buffer_length, captures, layer_masks, magi_config, summary, with_nodes
from megatron_magi.mcore.step import count_documents, is_first_run, load_batch, run_model
from megatron_magi.ops.slice_passes import why_not
from megatron_magi.runtime.upload import current_device
from megatron_magi.variables import KERNEL_BACKEND, NATIVE_COLLECTIVES


def make_dispatcher(args: Namespace) -> BatchDispatcher:
    """The dispatcher that a validated command line asks for; collective over all ranks."""
    environment = envs.load()
    config = with_nodes(args, magi_config(args, environment.default_config()), environment)
    config = _with_shared_rates(config, args.tensor_model_parallel_size)
    # Tensor-parallel ranks read the data too. Pipeline stages do so at different times and cannot wait.
    readers = get_tensor_and_context_parallel_group()
    agreement_group = make_agreement_group(readers) if config.comm.verify else None
    cp_group = get_context_parallel_group()
    planner = Planner(
        config,
        cp_group.rank(),
        cp_group.size(),
        attention_shape(args, config),
        masks=layer_masks(args),
        own_positions=args.magi_mask is not None or args.magi_layer_masks is not None,
        eod=end_token(args, get_tokenizer()) if args.reset_attention_mask else None,
        seq_length=None if sample_packing.is_asked_for(args) else buffer_length(args),
        rolls=bool(args.mtp_num_layers),
        num_depths=args.mtp_num_layers or 0,
        compares=agreement_group is not None,
        has_linear_layers=bool(linear_layers(args)),
        has_sparse_layers=has_sparse_layers(args),
        layout=layout_of(args),
    )
    check_captures(args, planner.shape, config.comm.impl, cp_group)
    kernels = needed_kernels(
        planner.shape, config, planner.cp_size, rolls=planner.rolls, captured=captures(args), target=local_target()
    )
    compile_ahead(kernels, args.local_rank, local_target())
    backend = planner.shape.table_backend
    print_rank_0(summary(args, by=None if backend is None else backend.title))
    return BatchDispatcher(planner, agreement_group)


def end_token(args: Namespace, tokenizer: Any) -> int | None:
    """The token at which documents end, of a command line that confines attention by it.

    Raises:
        ValueError: there is none, or Megatron's data sets take it out, and these do not return bounds of documents.
    """
    if args.dataloader_inter_document_masking:
        return tokenizer.eod
    if tokenizer.eod is None:
        raise ValueError(
            "reset_attention_mask: documents end at EOD tokens, and this tokenizer has none; drop it, or give "
            "--dataloader-inter-document-masking"
        )
    if args.allow_ambiguous_pad_tokens and tokenizer.eod != 0 and _pad_token(tokenizer) == tokenizer.eod:
        raise ValueError(
            "allow_ambiguous_pad_tokens: Megatron's data sets replace padding tokens by 0, and so with this tokenizer "
            "the EOD tokens by which --reset-attention-mask finds documents; drop it, or give "
            "--dataloader-inter-document-masking in the place of --reset-attention-mask"
        )
    return tokenizer.eod


def _pad_token(tokenizer: Any) -> int | None:
    try:
        return tokenizer.pad
    except Exception:  # noqa: BLE001  (as Megatron's data sets do, which then have one that is no token)
        return None


def _with_shared_rates(config: MagiConfig, tp_size: int) -> MagiConfig:
    """``config`` with the rates that rank 0 finds, on all ranks; collective. Rates are of GPUs: CPUs take ``affinity``.

    Pipeline stages compare no plans, so stages that chose dispatches by other rates would train on other rows.

    Raises:
        ValueError: there is a calibration on rank 0 that cannot be read.
    """
    if config.dispatch.algorithm == "auto" and not _is_on_gpus():
        return replace(config, dispatch=replace(config.dispatch, algorithm="affinity"))
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [with_present_rates(config).dispatch.rates]
        except ValueError as error:
            found = [str(error)]
    dist.broadcast_object_list(found, src=0)
    (rates,) = found
    if isinstance(rates, str):
        raise ValueError(rates)
    if rates is not None:
        # Neighbours in context parallelism are as many ranks apart as tensor parallelism has.
        rates = replace(rates, ranks_per_node=max(1, rates.ranks_per_node // tp_size))
    return replace(config, dispatch=replace(config.dispatch, rates=rates))


def _is_on_gpus() -> bool:
    return torch.cuda.is_available()


def check_captures(args: Namespace, shape: AttnShape, impl: str, group: dist.ProcessGroup) -> None:
    """Refuses captured attention where kernels of this package do not compute and move rows. Collective over ``group``.

    Args:
        args: a validated command line.
        shape: of the attention.
        impl: of the collectives.
        group: the context-parallel ranks.

    Raises:
        ValueError: it is asked for.
    """
    if not captures(args):
        return
    if shape.table_backend is None or shape.table_backend.capture is None:
        raise ValueError(
            "cuda_graph_impl: full_iteration with --attention-backend magi needs Hopper GPUs, and bf16 or fp16"
        )
    if group.size() == 1:
        return
    if impl not in ("auto", "native"):
        raise ValueError(
            "cuda_graph_impl: full_iteration with context parallelism works with comm.impl native or auto, "
            f"not {impl!r}; drop {NATIVE_COLLECTIVES}"
        )
    native, reason = peer_collectives(group, torch.device("cuda", torch.cuda.current_device()))
    if native is None:
        raise ValueError(
            "cuda_graph_impl: full_iteration with context parallelism needs ranks that reach each other's memory; "
            f"here that {reason}"
        )


def attention_shape(args: Namespace, config: MagiConfig) -> AttnShape:
    """Heads and dtype of attention on this rank, and what computes it.

    Raises:
        ValueError: an implementation is asked for by name, and does not take this.
    """
    cost, impl, device = config.overlap.cost, config.attend.impl, current_device()
    shape = AttnShape(cost.num_heads_q, cost.num_heads_kv, *cost.head_dims, args.params_dtype)
    shape = shape.kernels_for(device, impl)
    reason = None if impl == "auto" else why_not(impl, device, shape.dtype, cost.head_dims, "sdpa_ol, or unset it")
    if reason is not None:
        raise ValueError(f"{KERNEL_BACKEND}: {reason}")
    return shape


class MagiForwardStep:
    """Dispatches the microbatch over context-parallel ranks, on every pipeline stage.

    Args:
        make_dispatcher: called by `prepare`.
        loss_log: told the plan of each training microbatch, if given.
        make_packing: called by `prepare`, if given: the data iterator has samples, which are packed into microbatches.

    Attributes:
        packing: of samples into the microbatches that are dispatched, if there is any.
        takes_read_batches: its data iterator may be `ReadBatches`, as in captured iterations.
    """

    takes_read_batches = True

    def __init__(
        self,
        make_dispatcher: Callable[[], BatchDispatcher],
        loss_log: LossLog | None = None,
        make_packing: Callable[[], sample_packing.SamplePacking] | None = None,
    ) -> None:
        self._make_packing = make_packing
        self._make_dispatcher = make_dispatcher
        self._dispatcher: BatchDispatcher | None = None
        self._group: Any = None
        self._loss_log = loss_log
        self.packing: sample_packing.SamplePacking | None = None
        # Of each model chunk: iteration and kind of the microbatches read last, and how many there were.
        self._read: dict[int | None, tuple[tuple[int, bool], int]] = {}

    def prepare(self) -> None:
        """Makes the dispatcher, and has Megatron's data loaders plan with it.

        Collective over all ranks, once process groups and tokenizer exist. Again does nothing, unless the process
        groups are others, as after a restart inside the process.
        """
        group = get_context_parallel_group()
        if self._dispatcher is None or group is not self._group:
            self._dispatcher, self._group = self._make_dispatcher(), group
            if self._make_packing is None:
                loader.install(self._dispatcher.planner)
            else:
                self.packing = self._make_packing()  # what a loader returns is no microbatch yet

    def __call__(
        self, data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """The forward step that Megatron's schedules call; with ``return_schedule_plan`` the model is not run yet."""
        ahead = look_ahead_of(data_iterator)
        batch = next(data_iterator) if isinstance(data_iterator, ReadBatches) else self.read(data_iterator, model)
        args = get_args()
        output = run_model(
            model,
            return_schedule_plan,
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.params,
            # Only the router of experts reads it.
            padding_mask=batch.padding_mask if args.num_experts else None,
        )
        loss = partial(
            microbatch_loss,
            batch.loss_mask,
            num_loss_tokens=batch.params.num_loss_tokens,
            cp_size=args.context_parallel_size,
            cp_rank=self._group.rank(),
            reports_mean=averages_reports(args, model),
            meanwhile=None if ahead is None else partial(self.look, ahead),
        )
        return output, loss

    def look(self, ahead: LookAhead) -> None:
        """Begins the next microbatch, on all ranks that read it, before it is due."""
        assert self._dispatcher is not None, "prepare() comes first"
        ahead.look(self._dispatcher.begin)

    @property
    def group(self) -> dist.ProcessGroup:
        """The context-parallel ranks, once `prepare` has been called."""
        return self._group

    def read(self, data_iterator: Iterator, model: torch.nn.Module) -> LocalBatch:
        """This rank's shard of the next microbatch, which ``model`` will run."""
        dispatcher = self._dispatcher
        assert dispatcher is not None, "prepare() comes first"
        place = self._place(model)
        try:
            batch = load_batch(lambda: dispatcher.next(data_iterator))
        except Exception as error:
            error.add_note(f"In {place}.")
            raise
        count_documents(model, batch.documents)
        if self._loss_log is not None and is_first_run(model):
            self._loss_log.add_plan(batch.params.plans.stats)
        return batch

    def _place(self, model: torch.nn.Module) -> str:
        """Which microbatch is read now, in words."""
        chunk = get_attr_wrapped_model(model, "vp_stage")
        now = getattr(get_args(), "curr_iteration", 0), model.training
        before, count = self._read.get(chunk, (now, 0))
        count = count + 1 if before == now else 1
        self._read[chunk] = now, count
        iteration = f"iteration {now[0] + 1}"
        return f"microbatch {count} of {iteration if model.training else f'the evaluation after {iteration}'}"
