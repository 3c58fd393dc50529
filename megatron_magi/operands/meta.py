"""What attention returns besides its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class AttnForwardMeta:
    """By-products of a forward pass; no gradient flows through them.

    Attributes:
        lse: natural log of the softmax denominator, sink included, fp32 (fp64 for fp64
            inputs) ``[num_rows, num_heads_q]``; -inf for rows that see nothing.
        max_logits: largest visible logit of each head after scale and softcap, same dtype,
            ``[num_heads_q]``; -inf where no pair is visible; None unless asked for.
    """

    lse: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None
