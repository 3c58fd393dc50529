"""Tables of collectives at fixed addresses."""

from __future__ import annotations

import torch

from megatron_magi.attention.collective_args import cast_args
from megatron_magi.attention.static_moves import StaticMoves
from megatron_magi.backends.base import copy_tables
from megatron_magi.comm.static_args import StaticArgs
from megatron_magi.mask import builders
from megatron_magi.plan import given_dispatch, make_plan

CPU, TOTAL = torch.device("cpu"), 1 << 15


def test_those_made_in_inference_mode_can_be_loaded_outside_of_it():
    dispatch = given_dispatch("contiguous", TOTAL, 2)
    plan = make_plan(builders.causal(TOTAL), cp_size=2, dispatch=dispatch, compute="auto").for_rank(1)
    assert plan.moves is not None
    with torch.inference_mode():
        casts = [cast_args(transfer, CPU) for transfer in plan.transfers if transfer.num_recv]
        args = StaticArgs(casts, plan.num_rows, 2, CPU, 2.0)
        moves = StaticMoves([plan], CPU, 2.0)
    copy_tables(args.take(casts[0]))
    copy_tables(moves.take(plan))
    assert args.tail[0] == casts[0].num_recv
    assert moves.args.rows[: len(plan.moves.rows)].tolist() == plan.moves.rows.tolist()
