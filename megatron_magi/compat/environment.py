"""What user code of MagiAttention asks of the environment."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_magi import envs


def dsink_all_reduce_op() -> str:
    """``"none"``, ``"sum"`` or ``"avg"``: how the gradient of a sink is reduced where no configuration says so."""
    return envs.load().default_config().comm.dsink_all_reduce


comm = SimpleNamespace(dsink_all_reduce_op=dsink_all_reduce_op)
"""The part of MagiAttention's package ``comm`` that its examples call."""
