"""Tensors that outlive the call that makes them."""

from __future__ import annotations

import torch


def lasting() -> torch.inference_mode:
    """Where tensors are made that later calls use, as a context or a decorator: they are normal ones, though this call
    be in inference mode.

    A tensor of inference mode can neither be written in place outside of it nor be saved for a backward, so that an
    evaluation would break the training that follows it. This turns gradients on too: only for what is not computed from
    a caller's tensors.
    """
    return torch.inference_mode(False)
