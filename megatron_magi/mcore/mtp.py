"""Multi-token prediction: the shift by one token, in the order in which tokens were dispatched."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args

from megatron_magi.comm.dispatch import roll
from megatron_magi.mcore import seams
from megatron_magi.mcore.carrier import MagiSeqParams

_ROLL = "core.transformer.multi_token_prediction:roll_tensor"


def install() -> None:
    """Lets Megatron's multi-token prediction shift dispatched tensors. Idempotent.

    All of it goes through one function of one module; without a `MagiSeqParams` it does
    what it did.
    """
    seams.put(_ROLL, roll_tensor)


def roll_tensor(
    tensor: torch.Tensor | None,
    shifts: int = -1,
    dims: int = -1,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: Any = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Each token's successor; 0 at the end of a sequence (or of a document, with ``cu_seqlens``).

    Args:
        tensor: ``[batch_size, seqlen]``, this rank's; None gives ``(None, None)``.
        shifts, dims: -1 and the last dimension, the only ones that Megatron uses.
        cp_group: context-parallel ranks.
        packed_seq_params: the carrier; anything else goes to Megatron's own function.

    Returns:
        ``(rolled, count)``. Megatron divides a rank's loss by the count and then combines the
        ranks, so the count is this rank's fair share of the rolled tensor's global sum: the part
        with which the ranks combine to the mean over the microbatch. (In per-token mode a rank
        of which no token counts contributes nothing, as in stock Megatron.)

    Raises:
        ValueError: another shift or dimension.
    """
    if tensor is None:
        return None, None
    if not isinstance(packed_seq_params, MagiSeqParams):
        return seams.original(_ROLL)(tensor, shifts, dims, cp_group, packed_seq_params)
    if shifts != -1 or dims not in (-1, tensor.dim() - 1):
        raise ValueError(f"shifts, dims: expected -1 and the last dimension, got {shifts} and {dims}")
    layout = packed_seq_params.layout
    rows = tensor.reshape(-1)
    rolled = roll(rows, packed_seq_params.plans.successors(rows.device), cp_group)
    rolled = torch.where(layout.roll_keeps, rolled, torch.zeros_like(rolled)).view_as(tensor)
    return rolled, _fair_share(rolled, packed_seq_params, cp_group)


def _fair_share(rolled: torch.Tensor, params: MagiSeqParams, cp_group: dist.ProcessGroup) -> torch.Tensor:
    count = rolled.sum()
    if not rolled.is_floating_point():
        # Token ids: nobody divides by their sum, so it is not worth a reduction.
        return count
    dist.all_reduce(count, group=cp_group)
    if not get_args().calculate_per_token_loss:
        return count / cp_group.size()
    # Megatron multiplies a rank's loss by its own number of tokens over the count, and divides by
    # the global number at the end.
    return count * (params.num_local_loss_tokens / max(params.num_loss_tokens, 1.0))
