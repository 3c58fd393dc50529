"""Cost factors: the two times that MagiAttention's overlap solver is given, and what they mean to ours.

A factor is the time of a unit of work: of one (query, key) pair over all heads of a rank in the forward, and of one
received row of k and v. `CostModel` has the same as rates.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_magi.config import CostModel

_NOT_GIVEN = 1.0


def get_calc_cost_factor(
    num_heads_q: int, head_dim: int, tflops: float, mfu: float, sec_ratio: float = 1e6, is_fwd: bool = True
) -> float:
    """Time of one visible (query, key) pair, over all heads.

    Args:
        num_heads_q, head_dim: shape of the attention on a rank.
        tflops: peak rate of a rank, FLOP/s (not TFLOP/s).
        mfu: the share of it that attention reaches, 0 to 1.
        sec_ratio: units of the result in a second; microseconds.
        is_fwd: the forward; else the backward, with five products for two.
    """
    num_products = 2 if is_fwd else 5
    return 2 * num_products * num_heads_q * head_dim / (tflops * mfu) * sec_ratio


def get_comm_cost_factor(
    num_heads_kv: int, head_dim: int, bandwidth: float, bwu: float, corr_factor: float, sec_ratio: float = 1e6
) -> float:
    """Time to receive one row of k and v.

    Args:
        num_heads_kv, head_dim: shape of the attention on a rank.
        bandwidth: peak rate at which a rank receives, elements (not bytes) a second.
        bwu: the share of it that is reached, 0 to 1.
        corr_factor: `get_a2a_corr_factor`.
        sec_ratio: units of the result in a second; microseconds.
    """
    return 2 * num_heads_kv * head_dim / (bandwidth * bwu * corr_factor) * sec_ratio


def get_a2a_corr_factor(world_size: int) -> float:
    """The share of an all-to-all's rows that come from other ranks; 1 for one rank."""
    return 1.0 if world_size <= 1 else 1.0 - 1.0 / world_size


def with_cost_factors(cost: CostModel, calc_cost_factor: float, comm_cost_factor: float) -> CostModel:
    """``cost`` with the rates at which one pair and one row take the microseconds given; 1 leaves a rate as it is."""
    if calc_cost_factor != _NOT_GIVEN:
        cost = replace(cost, tflops=replace(cost, tflops=1.0).attend_us(1) / calc_cost_factor)
    if comm_cost_factor != _NOT_GIVEN:
        cost = replace(cost, gbytes_per_s=replace(cost, gbytes_per_s=1.0).fetch_us(1) / comm_cost_factor)
    return cost


def cost_factors(cost: CostModel) -> tuple[float, float]:
    """The factors that stand for ``cost`` in `with_cost_factors`; 1 for a rate that is the GPU's."""
    calc_cost_factor = _NOT_GIVEN if cost.tflops is None else cost.attend_us(1)
    comm_cost_factor = _NOT_GIVEN if cost.gbytes_per_s is None else cost.fetch_us(1)
    return calc_cost_factor, comm_cost_factor
