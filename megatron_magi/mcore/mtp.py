"""Multi-token prediction of dispatched tokens: the shift by one token, and the mean over all ranks' tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.comm.roll import roll
from megatron_magi.mcore import seams
from megatron_magi.mcore.carrier import MagiSeqParams, find_carrier

_ROLL = "core.transformer.multi_token_prediction:roll_tensor"
_LOSS = "core.models.gpt.gpt_model:process_mtp_loss"


def install() -> None:
    """Lets Megatron's multi-token prediction work on dispatched tensors. Idempotent.

    Without a `MagiSeqParams` both functions do what they did.
    """
    seams.put(_ROLL, roll_tensor)
    seams.put(_LOSS, process_mtp_loss)


def process_mtp_loss(
    *,
    config: Any,
    loss_mask: torch.Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Megatron's function of this name, with the loss of a depth averaged over the tokens of all ranks.

    Megatron divides by the tokens that count on this rank, and in per-token mode multiplies by those that
    counted before the shift: on a rank where none did, the loss of tokens shifted there would be lost.
    Here the loss mask enters multiplied by the number of ranks and the divisor is the count over all of
    them, so the mean over ranks that follows is the mean over tokens. Per-token mode sums over ranks
    and divides by the tokens of the batch: there the weight makes up for it. It is counted from the mask that is
    given, as a script of the user's may give the model another one than the data set's. Where gradients are summed over
    ranks and not averaged, the weight is smaller by their number.

    Args:
        config: Megatron's.
        loss_mask: ``[batch_size, seqlen]``, this rank's, of any dtype.
        cp_group: context-parallel ranks.
        packed_seq_params: the carrier; with anything else this is Megatron's own function.
        **kwargs: passed on.

    Raises:
        ValueError: there is a carrier and no loss mask or group.
    """
    params = find_carrier(packed_seq_params)
    if params is None:
        kwargs |= {"loss_mask": loss_mask, "cp_group": cp_group, "packed_seq_params": packed_seq_params}
        return seams.original(_LOSS)(config=config, **kwargs)
    if loss_mask is None or cp_group is None:
        raise ValueError("loss_mask, cp_group: multi-token prediction of dispatched tokens needs both")
    cp_size, loss_mask = cp_group.size(), loss_mask.float()
    factor = config.mtp_loss_scaling_factor
    if config.calculate_per_token_loss:
        factor = factor * _mean_count(loss_mask, cp_group, params, **kwargs)
    elif params.sums_gradients:
        factor = factor / cp_size
    config = copy.copy(config)
    config.calculate_per_token_loss, config.mtp_loss_scaling_factor = False, factor
    return seams.original(_LOSS)(
        config=config,
        loss_mask=loss_mask * cp_size,
        cp_group=cp_group,
        packed_seq_params=packed_seq_params,
        **kwargs,
    )


def _mean_count(
    loss_mask: torch.Tensor,
    cp_group: dist.ProcessGroup,
    params: MagiSeqParams,
    *,
    labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Mean over ranks of the tokens that count before the first shift; without labels Megatron shifts once for them."""
    if labels is None:
        return roll_tensor(loss_mask, cp_group=cp_group, packed_seq_params=params)[1]
    count = loss_mask.sum()
    dist.all_reduce(count, group=cp_group)
    return count / cp_group.size()


def roll_tensor(
    tensor: torch.Tensor | None,
    shifts: int = -1,
    dims: int = -1,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: Any = None,
    **options: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Each token's successor; 0 at the end of a sequence (or of a document, with ``cu_seqlens``).

    In a prefix tree a loss mask gets the sum over all successors, see `tree_roll`.

    A bool tensor is a padding mask. It comes back as it is, also when sequence parallelism has split it:
    padding has no successor and succeeds no token, and what is no padding stays a token.

    Args:
        tensor: ``[batch_size, seqlen]``, this rank's; None gives ``(None, None)``.
        shifts, dims: -1 and the last dimension, the only ones that Megatron uses.
        cp_group: context-parallel ranks.
        packed_seq_params: the carrier; anything else goes to Megatron's own function.
        **options: ``return_sum``, of Megatron 0.20: False where the caller does not want the count.

    Returns:
        ``(rolled, count)``. Of a loss mask, the one tensor here that is floating point and comes from
        `process_mtp_loss`, the count is the mean over ranks of its sum.

    Raises:
        ValueError: another shift or dimension.
    """
    if tensor is None:
        return None, None
    params = find_carrier(packed_seq_params)
    if params is None:
        return seams.original(_ROLL)(tensor, shifts, dims, cp_group, packed_seq_params, **options)
    if shifts != -1 or dims not in (-1, tensor.dim() - 1):
        raise ValueError(f"shifts, dims: expected -1 and the last dimension, got {shifts} and {dims}")
    if tensor.dtype == torch.bool:
        return tensor, tensor.sum() if options.get("return_sum", True) else None
    layout = params.layout
    rows = tensor.reshape(-1)
    if layout.tree is None:
        rolled = roll(rows, params.plans.successors(rows.device), cp_group)
        rolled = torch.where(layout.roll_keeps, rolled, torch.zeros_like(rolled))
    else:
        rolled = layout.tree(rows, cp_group)
    rolled = rolled.view_as(tensor)
    if not options.get("return_sum", True):
        return rolled, None
    count = rolled.sum()
    if rolled.is_floating_point():
        # No caller divides by a sum of token ids, so only this one is worth a reduction.
        dist.all_reduce(count, group=cp_group)
        count = count / cp_group.size()
    return rolled, count
