"""The loss of a microbatch, scaled so that context parallelism changes nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args

_SPIKE_FACTOR = 10.0
"""A loss this many times the largest seen is reported as a spike."""


def microbatch_loss(
    loss_mask: torch.Tensor,
    losses: torch.Tensor,
    *,
    num_loss_tokens: float | torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    reports_mean: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses that count.

    Megatron divides the sum by this rank's own number of tokens and then averages gradients
    over context-parallel ranks, a mean of means: wrong where ranks hold different numbers of
    tokens that count. With ``num_loss_tokens`` the sum is scaled so that the mean of means is
    the mean over the microbatch. Megatron's per-token mode divides by the global number of
    tokens and needs no scale.

    A loss mask may hold weights. Numbers of tokens are integers to Megatron, which cuts their sum; cut on each rank,
    the number would depend on how many ranks there are, so each rank says its share of the microbatch's.

    Args:
        loss_mask: ``[batch_size, seqlen]``, this rank's.
        losses: likewise, one loss a token.
        num_loss_tokens: sum of the loss mask over all context-parallel ranks, a number or fp32 ``[]``; None for no
            scaling.
        cp_size: number of these ranks.
        cp_rank: this one.
        reports_mean: Megatron takes the mean over ranks of what is reported, as `averages_reports` says.
        meanwhile: called before the host waits for the loss.

    Returns:
        ``(loss, num_tokens, report)`` as Megatron's schedules take them: num_tokens int ``[]``, whose sum over the
        ranks is that of the microbatch, and the report holds the unscaled sum and num_tokens.
    """
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    # On padding and prompts a loss may be anything, and 0 times infinity is no 0.
    total = torch.where(mask != 0, losses.reshape(-1).float() * mask, 0.0).sum()
    whole, num_tokens = _counts(mask, num_loss_tokens, cp_size, cp_rank)
    report = {"lm loss": torch.cat([total.detach().view(1), num_tokens.view(1)])}
    if meanwhile is not None:
        meanwhile()
    _check(args, total)
    if whole is None:
        return total, num_tokens, report
    counted = max(whole, 1) if isinstance(whole, int) else whole.clamp(min=1)
    if reports_mean:
        report = mean_report(report, cp_size / counted)
    if args.calculate_per_token_loss:
        return total, num_tokens, report
    return total * (num_tokens.clamp(min=1) * (cp_size / counted)), num_tokens, report


def _counts(
    mask: torch.Tensor, num_loss_tokens: float | torch.Tensor | None, cp_size: int, cp_rank: int
) -> tuple[int | torch.Tensor | None, torch.Tensor]:
    """Tokens of the microbatch, None where they are not known, and this rank's, int ``[]``."""
    if num_loss_tokens is None:
        return None, mask.sum().detach().to(torch.int)
    is_tensor = isinstance(num_loss_tokens, torch.Tensor)
    whole = num_loss_tokens.to(torch.int64) if is_tensor else int(num_loss_tokens)
    share = whole * (cp_rank + 1) // cp_size - whole * cp_rank // cp_size
    # A number is filled in on the device: the host would wait for a copy.
    return whole, share.to(torch.int) if is_tensor else mask.new_full((), share, dtype=torch.int)


def averages_reports(args: Namespace, model: torch.nn.Module) -> bool:
    """Does Megatron make a mean of each rank's mean of what is reported? It does in evaluations with ``--sft``."""
    return args.sft and not model.training


def mean_report(report: Mapping[str, torch.Tensor], scale: float | torch.Tensor) -> dict[str, torch.Tensor]:
    """A report whose means over ranks are those over the microbatch, however its tokens are divided among them.

    Args:
        report: by name a sum and a number of tokens of this rank, ``[2]``; others stay as they are.
        scale: number of ranks over the number of tokens that all of them have.
    """
    return {
        name: torch.stack([x[0] * scale, torch.ones_like(x[1])]) if x.numel() == 2 else x for name, x in report.items()
    }


def make_distillation_loss(args: Namespace) -> Callable:
    """Megatron's loss against a teacher's saved logits, which ``--logits-load-dir`` asks for.

    It keeps the place in the saved logits: make it once for a training.

    Returns:
        ``loss(loss_mask, losses, *, model)``, which returns what `microbatch_loss` does.
    """
    from megatron.training.distillation import LossFuncCallable

    stock = LossFuncCallable(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
    )

    def loss(loss_mask: torch.Tensor, losses: torch.Tensor, *, model: torch.nn.Module) -> tuple:
        result = stock(loss_mask, losses, model)
        _check(args, result[0])
        return result

    return loss


def _check(args: Namespace, loss: torch.Tensor) -> None:
    """Has Megatron's rerun machine check the loss, as the command line asks."""
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("infinity", torch.isinf)):
            machine.validate_result(
                result=loss, rejection_func=is_bad, message=f"{name} in the loss of a rank", tolerance=0.0, fatal=True
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss"),
            message="spiky loss",
            tolerance=0.0,
            fatal=False,
        )
