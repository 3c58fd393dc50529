"""Where tokens lie under `--attention-backend magi`: ``--magi-layout`` and the dispatch that it stands for."""

from __future__ import annotations

import math
from argparse import Namespace

import numpy as np

from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.plan import Dispatch, given_dispatch


def layout_of(args: Namespace) -> str | None:
    """The layout that a validated command line asks for, as `Planner` takes it: None is the planner's own.

    ``auto`` is the planner's own, for models with linear layers too: under context parallelism each rank has all tokens
    of its heads there, which are brought into their order whatever the layout.
    """
    return None if args.magi_layout in ("auto", "planned") else args.magi_layout


def dispatch_in(layout: str, total_seqlen: int, cp_size: int, config: DispatchConfig) -> Dispatch:
    """The dispatch of a microbatch in a layout that does not depend on its masks.

    Args:
        layout: ``zigzag`` or ``contiguous``, of all sequences of the microbatch one after another.
        total_seqlen: tokens of the microbatch.
        cp_size: number of ranks.
        config: of which `alignment` and `pad_size` count.

    Raises:
        ValueError: ``pad_size`` does not make shards even.
    """
    pad_size = config.pad_size
    if pad_size is None:
        unit = math.lcm(config.alignment, 2 if layout == "zigzag" and cp_size > 1 else 1) * cp_size
        pad_size = -total_seqlen % unit
    elif (total_seqlen + pad_size) % (config.alignment * cp_size):
        raise ValueError(
            f"pad_size: {total_seqlen} tokens and {pad_size} of padding are no multiple of {config.alignment} on each "
            f"of {cp_size} ranks"
        )
    return given_dispatch(layout, total_seqlen, cp_size, pad_size=pad_size)


def positions_of_rows(dispatch: Dispatch, batch_size: int) -> np.ndarray | None:
    """`token_order.TokenOrder.positions`: of Megatron's ``[seqlen, batch_size]``, flattened, rank after rank.

    None if they are in order.
    """
    # Sequence-parallel ranks hold parts of the first dimension, so one flattens it without moving rows.
    ranks = [index.reshape(batch_size, -1).T.reshape(-1) for index in dispatch.global_indices()]
    positions = np.concatenate(ranks).astype(np.int32)
    return None if np.array_equal(positions, np.arange(len(positions))) else positions


def bounds_of_documents(cu_seqlens: np.ndarray, padded_seqlen: int) -> np.ndarray:
    """`token_order.TokenOrder.cu_seqlens_q` of documents that padding follows."""
    tail = [padded_seqlen] if padded_seqlen > cu_seqlens[-1] else []
    return np.append(cu_seqlens, tail).astype(np.int32)


def visible_keys(mask: AttnMask, rows: np.ndarray) -> np.ndarray:
    """The keys that a mask shows some queries, for layers that choose among them.

    Args:
        mask: of the layer.
        rows: queries, int64 ``[num_rows]``.

    Returns:
        int32 ``[2, n, num_rows]``, first and past-the-last key of n intervals, as `mask.bands.row_intervals` has them.
    """
    return np.stack(bd.row_intervals(mask.bands, rows)).astype(np.int32)
