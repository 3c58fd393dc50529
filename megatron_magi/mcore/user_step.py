"""A training script of the user's own: its forward step is given dispatched microbatches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args

from megatron_magi.mcore import seams
from megatron_magi.mcore.batch import LocalBatch
from megatron_magi.mcore.forward_step import MagiForwardStep, make_dispatcher
from megatron_magi.mcore.loss import averages_reports, mean_report
from megatron_magi.mcore.loss_log import LossLog
from megatron_magi.mcore.planner import SEQUENCES
from megatron_magi.mcore.sample_packing import is_asked_for
from megatron_magi.mcore.settings import buffer_length, is_magi
from megatron_magi.mcore.stock_step import StockForwardStep

_PRETRAIN = ("training.training:pretrain", "training:pretrain")
_DATA, _STEP = "train_valid_test_dataset_provider", "forward_step_func"
_BLENDED = "core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__"
_OVER_TP, _OVER_CP = "core.utils:get_batch_on_this_tp_rank", "core.utils:get_batch_on_this_cp_rank"


def install() -> None:
    """Makes ``pretrain`` give dispatched microbatches to the forward step it is called with. Idempotent.

    Without `--attention-backend magi` nothing changes.
    """
    _install_pretrain()
    _install_data()
    _install_batches()


class UserForwardStep(MagiForwardStep):
    """Runs a forward step that was written for stock Megatron on this rank's shard of each microbatch.

    Its data iterator has one item: ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` of the shard,
    ``[batch_size, seqlen]`` on the device, with every rank's own tokens. The carrier reaches the model by itself. Its
    loss function must return the sum of this rank's losses, its number of tokens, and a report.

    Args:
        step: as Megatron's ``pretrain`` takes it.
        make_dispatcher: called by `prepare`.
        loss_log: told the plan of each training microbatch, if given.
    """

    takes_read_batches = False

    def __init__(self, step: Callable, make_dispatcher: Callable, loss_log: LossLog | None = None) -> None:
        super().__init__(make_dispatcher, loss_log)
        self._step = step

    def __call__(
        self, data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """The forward step that Megatron's schedules call.

        Raises:
            ValueError: the model does not attend by plan.
        """
        batch = self.read(data_iterator, model)
        options = {"return_schedule_plan": True} if return_schedule_plan else {}
        with _chunk(model).given(batch):
            output, loss = self._step(iter([_fields(batch)]), model, **options)
        return output, functools.partial(_microbatch_mean, loss, averages_reports(get_args(), model))


def _fields(batch: LocalBatch) -> dict[str, torch.Tensor]:
    return {name: getattr(batch, name) for name in SEQUENCES}


def _chunk(model: torch.nn.Module) -> Any:
    try:
        return get_attr_wrapped_model(model, "given", return_model_obj=True)
    except RuntimeError:
        raise ValueError(
            "model: does not attend by plan; build it with Megatron's GPTModelBuilder, or take "
            "megatron_magi.mcore.model.MagiGPTModel in the place of GPTModel"
        ) from None


def _microbatch_mean(loss: Callable, reports_mean: bool, output: torch.Tensor, **kwargs: Any) -> tuple:
    """Calls ``loss`` and scales its result so that Megatron's mean over ranks is the mean over the microbatch.

    Megatron divides a rank's sum by that rank's number of tokens, of which ranks have different ones.
    """
    result = loss(output, **kwargs)
    if kwargs.get("non_loss_data"):
        return result
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            "forward_step: its loss function must return (sum of the losses, number of tokens, report), "
            "as a mean over this rank's tokens cannot become one over all ranks'"
        )
    total, num_tokens, report = result
    group = get_context_parallel_group()
    if reports_mean:
        report = _mean_reports(report, group)
    if not get_args().calculate_per_token_loss:
        everyone = num_tokens.detach().clone()
        dist.all_reduce(everyone, group=group)
        total = total * num_tokens.clamp(min=1) * (group.size() / everyone.clamp(min=1))
    return total, num_tokens, report


def _mean_reports(report: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """`mean_report` of a loss of the user's, each of whose sums may have a number of tokens of its own."""
    report = dict(report)
    names = [name for name, x in report.items() if x.numel() == 2]
    if names:
        counts = torch.stack([report[name].detach()[1].float() for name in names])
        dist.all_reduce(counts, group=group)
        for name, count in zip(names, counts.clamp(min=1), strict=True):
            report |= mean_report({name: report[name]}, group.size() / count)
    return report


def _install_pretrain() -> None:
    stock = seams.original(_PRETRAIN[0])
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        forward_step = given.arguments[_STEP]
        if not isinstance(forward_step, (MagiForwardStep, StockForwardStep)):
            log = make_loss_log(getattr(get_args(), "magi_loss_log", None))
            if is_magi():
                if is_asked_for(get_args()):
                    raise ValueError(
                        "sequence_packing_scheduler: not supported with a forward step of your own; "
                        "pretrain_scripts/pretrain_gpt.py has it"
                    )
                forward_step = UserForwardStep(forward_step, lambda: make_dispatcher(get_args()), log)
                provider = _preparing(given.arguments[_DATA], forward_step.prepare)
                given.arguments.update({_STEP: forward_step, _DATA: provider})
        return stock(*given.args, **given.kwargs)

    for target in _PRETRAIN:
        seams.put(target, pretrain)


def make_loss_log(path: str | None) -> LossLog | None:
    """A log that Megatron's trainer writes to; None without a path.

    Raises:
        ValueError: it cannot be written to.
    """
    if path is None:
        return None
    log = LossLog(path)
    log.install()
    return log


def _preparing(provider: Callable, prepare: Callable[[], None]) -> Callable:
    """``provider``, called on every rank and after ``prepare``."""

    @functools.wraps(provider)
    def provide(*args: Any, **kwargs: Any) -> Any:
        prepare()
        return provider(*args, **kwargs)

    # Megatron's mark of a provider that is called on every rank.
    provide.is_distributed = True
    return provide


def _install_data() -> None:
    stock = seams.original(_BLENDED)

    @functools.wraps(stock)
    def init(self: Any, cls: type, sizes: list, is_built_on_rank: Callable, config: Any, *args: Any, **kw: Any) -> None:
        # Every rank needs the plan of a batch, so every rank reads it.
        is_built = (lambda: True) if is_magi() else is_built_on_rank
        stock(self, cls, sizes, is_built, config, *args, **kw)

    seams.put(_BLENDED, init)


def _install_batches() -> None:
    stock_over_tp, stock_over_cp = seams.original(_OVER_TP), seams.original(_OVER_CP)
    signature = inspect.signature(stock_over_tp)

    @functools.wraps(stock_over_tp)
    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> dict:
        if not is_magi():
            return stock_over_tp(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        command_line = get_args()
        local = buffer_length(command_line) // command_line.context_parallel_size
        shard = {"has_cu_seqlens": False, "is_hybrid_cp": False, "create_attention_mask_in_dataloader": False}
        return stock_over_tp(**{**given, **seams.named(_OVER_TP, **shard), "seq_length": local})

    @functools.wraps(stock_over_cp)
    def get_batch_on_this_cp_rank(batch: dict, *args: Any, **kwargs: Any) -> dict:
        return batch if is_magi() else stock_over_cp(batch, *args, **kwargs)

    seams.put(_OVER_TP, get_batch_on_this_tp_rank)
    seams.put(_OVER_CP, get_batch_on_this_cp_rank)
