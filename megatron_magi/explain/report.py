"""Figures of a mask and of each dispatch, as values and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import DispatchAlgorithm, MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan import Plan, make_plan
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.dispatch import candidates, predictions


@dataclass(frozen=True)
class DispatchFigures:
    """Figures of one dispatch of a mask.

    Attributes:
        algorithm: of `DispatchConfig`.
        taken: the candidate that it comes to: of ``auto`` the one that was chosen, of ``affinity`` with its tolerance.
        plan: its plan.
        balance: largest area of a rank over the mean.
        received_rows: rows of k and v that the busiest rank fetches in a forward pass.
        received_bytes: the bytes of them, by the shape in ``config.overlap.cost``.
        predicted_us: forward and backward pass of attention in one layer, slowest rank, microseconds: what
            ``auto`` chooses by.
    """

    algorithm: str
    taken: str
    plan: Plan
    balance: float
    received_rows: int
    received_bytes: int
    predicted_us: float


_ALIKE = """of predictions within 1 % of the shortest
the one with the least host time, then that with the fewest rows fetched"""


def dispatch_figures(mask: AttnMask, cp_size: int, config: MagiConfig | None = None) -> list[DispatchFigures]:
    """Plans ``mask`` for ``cp_size`` ranks with each dispatch algorithm.

    Args:
        mask: of one sequence or one microbatch.
        cp_size: context-parallel ranks.
        config: all but ``dispatch.algorithm`` is taken from it.

    Raises:
        ValueError: as `make_plan`.
    """
    config = config or MagiConfig()
    algorithms = get_args(DispatchAlgorithm)
    return [_figures(mask, cp_size, replace(config, dispatch=replace(config.dispatch, algorithm=a)))
            for a in algorithms]  # fmt: skip


def _figures(mask: AttnMask, cp_size: int, config: MagiConfig) -> DispatchFigures:
    plan = make_plan(mask, config, cp_size)
    stats, cost, made = plan.stats(), config.overlap.cost, plan.dispatch
    chunked = ChunkedMask(mask, made.chunk_bounds, cp_size)
    found = predictions({"": made.chunk_rank}, chunked, config.dispatch, config.overlap)
    received = max(stats.received_rows)
    named = candidates(chunked, config.dispatch)
    return DispatchFigures(
        algorithm=config.dispatch.algorithm,
        taken=next(name for name, ranks in named.items() if _same_shards(ranks, made.chunk_rank)),
        plan=plan,
        balance=stats.balance,
        received_rows=received,
        received_bytes=received * cost.row_bytes,
        predicted_us=found[""].step_us,
    )


def _same_shards(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether chunks that share a rank in ``a`` do so in ``b``, whichever rank: neighbours are chosen after shards."""
    return np.unique(np.stack([a, b]), axis=1).shape[1] == len(np.unique(a)) == len(np.unique(b))


def explain_text(mask: AttnMask, figures: Sequence[DispatchFigures], chosen: str) -> str:
    """The tables that ``explain`` prints.

    Args:
        mask: that was planned.
        figures: of `dispatch_figures`.
        chosen: the algorithm of which the ranks are listed.
    """
    total_q, total_k = mask.total_seqlen_q, mask.total_seqlen_k
    lines = [
        f"{total_q:,} queries, {total_k:,} keys, {len(mask.slices):,} slices",
        f"{mask.area:,} visible pairs: {mask.area / (total_q * total_k):.2%} of all, "
        f"{mask.area / max(1, total_q):,.0f} keys a query",
        "",
        f"{'dispatch':<20}{'balance':>10}{'rows fetched':>14}{'MB fetched':>12}{'stages':>8}{'predicted us':>14}",
    ]
    for f in figures:
        mark = " *" if f.algorithm == chosen else ""
        lines.append(
            f"{f.algorithm + mark:<20}{f.balance:>10.3f}{f.received_rows:>14,}{f.received_bytes / 1e6:>12.1f}"
            f"{f.plan.degree:>8}{f.predicted_us:>14,.0f}"
        )
    best = next(f for f in figures if f.algorithm == chosen)
    stats, cost = best.plan.stats(), best.plan.config.overlap.cost
    rates = best.plan.config.dispatch.rates or DEFAULT
    lines += [
        "",
        "* is what is used" + (f": auto takes {best.taken}, {_ALIKE}" if chosen == "auto" else ""),
        "balance: largest area of a rank over the mean; fetched: by the busiest rank in a forward pass of one layer,",
        "in as many stages; predicted: forward and backward of one layer's attention on the slowest rank,",
        f"{cost.num_heads_q} query, {cost.num_heads_kv} key heads of {cost.head_dim}, {8 * cost.element_bytes} bits, "
        f"rates of an {rates.device}",
        "",
        f"ranks of {chosen} (*); memory: k and v of own and of fetched rows, of one layer",
        f"{'rank':>4}{'rows':>10}{'area':>18}{'share':>9}{'rows fetched':>14}{'memory, MB':>13}",
    ]
    total = max(1, sum(stats.areas))
    for rank, (rows, area, received) in enumerate(zip(stats.num_rows, stats.areas, stats.received_rows, strict=True)):
        held = (rows + received) * cost.row_bytes / 1e6
        lines.append(f"{rank:>4}{rows:>10,}{area:>18,}{area / total:>9.2%}{received:>14,}{held:>13.1f}")
    return "\n".join(lines)
