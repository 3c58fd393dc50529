"""The predicted time of a step of attention, from counts of what ranks compute and send."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megatron_magi.backends.costs import kernel_costs_of
from megatron_magi.config import CostModel, OverlapConfig
from megatron_magi.cost_model import KernelCosts, Rates
from megatron_magi.plan.counts import Counts, Work
from megatron_magi.plan.degree import choose_degrees


class Prediction(NamedTuple):
    """Predicted microseconds of a forward and a backward pass.

    Attributes:
        step_us: both, of the slowest rank, with the host that issues them.
        device_us: the same if the host is always ahead.
        forward_us, backward_us: of the slowest rank on the GPU.
        degree: remote stages.
        host_us: of the host with the most to issue.
        num_rows: rows sent in a forward pass, over all ranks.
    """

    step_us: float
    device_us: float
    forward_us: float
    backward_us: float
    degree: int
    host_us: float = 0.0
    num_rows: int = 0


def predict(counts: Counts, num_rows: int, rates: Rates, overlap: OverlapConfig) -> Prediction:
    """Predicts a step; the same on every machine, as it only adds, multiplies, divides and compares.

    Args:
        counts: of a dispatch.
        num_rows: rows of a rank's shard; of the longest one.
        rates: of the GPU.
        overlap: how stages are chosen and ordered; its ``cost`` has the shape of the attention.
    """
    return predict_all(counts.map(lambda alone: alone[None]), [num_rows], rates, overlap)[0]


class Moved(NamedTuple):
    """Rows of queries that ranks receive to compute them for others, and that they send to be computed: from and to
    their own node, and others; int64 ``[num_dispatches, 2, cp_size]`` (`counts.count_moves`).
    """

    received: np.ndarray
    sent: np.ndarray


def predict_all(
    counts: Counts, num_rows: Sequence[int], rates: Rates, overlap: OverlapConfig, moved: Moved | None = None
) -> list[Prediction]:
    """`predict` for several dispatches over the same ranks at once, with equal results.

    Args:
        counts: of all dispatches, int64 ``[num_dispatches, 2, cp_size]`` each.
        num_rows: of each dispatch.
        rates, overlap: see `predict`.
        moved: of queries that are not computed where they are held; none when None.
    """
    received = counts.received.sum(axis=1)
    degrees = choose_degrees(counts.work.area[:, 0], counts.work.area[:, 1], received, overlap, rates)
    # Kernels wait for rows of their own node only.
    at_once = (degrees > 0) & ~counts.received[:, 1].any(axis=1)
    at_once &= overlap.one_launch and overlap.degree != 0 and not overlap.hide_tail_reduce
    most_bytes = kernel_costs_of(rates.device).most_forward_bytes
    is_small = (received.shape[1] <= 2) | (received.max(axis=1) * overlap.cost.row_bytes <= most_bytes)
    alike: dict[tuple[bool, bool, int], list[int]] = {}
    for at, (backward, forward, degree) in enumerate(
        zip(at_once.tolist(), (at_once & is_small).tolist(), degrees.tolist(), strict=True)
    ):
        alike.setdefault((forward, backward, 1 if forward else degree), []).append(at)  # then stages do not matter
    found: dict[int, Prediction] = {}
    for (forward, backward, degree), those in alike.items():
        rows = np.array([num_rows[at] for at in those])[:, None]
        of_those = counts if len(those) == len(degrees) else counts.map(itemgetter(those))
        moving = None if moved is None else Moved(*(x[those] for x in moved))
        made = _predict_alike(of_those, rows, rates, overlap, degree, (forward, backward), moving)
        found.update(zip(those, made, strict=True))
    return [found[at]._replace(degree=degree) for at, degree in enumerate(degrees.tolist())]


def _predict_alike(
    counts: Counts,
    num_rows: np.ndarray,
    rates: Rates,
    overlap: OverlapConfig,
    degree: int,
    at_once: tuple[bool, bool],
    moved: Moved | None,
) -> list[Prediction]:
    """`predict_all` for dispatches with one number of stages.

    Args:
        num_rows: of each dispatch, int64 ``[num_dispatches, 1]``.
        degree: remote stages.
        at_once: whether the forward, and the backward, is one launch.
    """
    received, sent = counts.received.sum(axis=1), counts.sent.sum(axis=1)
    own, fetched = (Work(*(c[:, place].astype(np.float64) for c in counts.work)) for place in (0, 1))
    kernels = kernel_costs_of(rates.device)
    hidden, passes = 0.0 if overlap.degree == 0 else rates.hidden, []
    saved = np.where((received > 0) & (sent > 0), 0.0, rates.host_one_way_us)
    both = own.with_fetched(fetched) if any(at_once) else own
    for is_backward, one in ((False, at_once[0]), (True, at_once[1])):
        steps, stages = _Steps(num_rows, rates, kernels, overlap.cost, degree > 0 and not one), 1 if one else degree
        attend = steps.backward if is_backward else steps.forward
        key_bytes = overlap.cost.row_bytes
        fetch = _transfer_us(counts.received, counts.sent, stages, rates, key_bytes)
        reduce = _transfer_us(counts.sent, counts.received, stages, rates, key_bytes) * is_backward
        if one:
            device = _at_once_us(attend(both), fetch, hidden) + reduce
        else:
            device = _pass_us(attend(own), attend(fetched, adds=True), fetch, reduce, degree, hidden)
        issue, of_stage = rates.host_us(is_backward)
        device, more_us = device + steps.ends_us(is_backward), 0.0
        if moved is not None:
            moves = moved.received.any(axis=(1, 2))[:, None]
            device = device + moves * _moves_us(moved, num_rows, rates, overlap.cost, is_backward)
            more_us = moves * of_stage  # like the collective and the launch of a stage
        # One launch is issued like a pass over own keys.
        passes.append((device, issue + (0 if one else degree) * (of_stage - saved) + more_us))
    forward_us, backward_us = (device.max(axis=1) for device, _ in passes)
    step_us = sum(np.maximum(device, host).max(axis=1) for device, host in passes)
    host_us = sum(host.max(axis=1) for _, host in passes)
    figures = (step_us, forward_us + backward_us, forward_us, backward_us, host_us, received.sum(axis=1))
    return [
        Prediction(step, device, forward, backward, degree, host, rows)
        for step, device, forward, backward, host, rows in zip(*(x.tolist() for x in figures), strict=True)
    ]


def kernels_us(counts: Counts, num_rows: int, rates: Rates, cost: CostModel) -> tuple[float, float]:
    """Microseconds of the forward and of the backward kernels where nothing is fetched, on the slowest rank."""
    own = Work(*(c[None, 0].astype(np.float64) for c in counts.work))
    steps = _Steps(np.array([[num_rows]]), rates, kernel_costs_of(rates.device), cost, is_staged=False)
    return float(steps.forward(own).max()), float(steps.backward(own).max() + steps.ends_us(is_backward=True).item())


class _Steps(NamedTuple):
    """Kernels of the stages of a rank; ``is_staged``: their results are accumulated in fp32; ``num_rows``: int64
    ``[num_dispatches, 1]``.
    """

    num_rows: np.ndarray
    rates: Rates
    kernels: KernelCosts
    cost: CostModel
    is_staged: bool

    def _packed(self, stage: Work) -> np.ndarray:
        """Query heads that share a tile, on each rank."""
        group = max(1, self.cost.num_heads_q // self.cost.num_heads_kv)
        is_short = (stage.starts > 1) & (self.num_rows < self.kernels.short_rows * stage.starts)
        return np.where(is_short, float(math.gcd(group, self.kernels.most_packed_heads)), 1.0)

    def _memory_us(self, bytes_a_row: float, rows: np.ndarray) -> np.ndarray:
        return rows * (bytes_a_row * self.cost.num_heads_q) / (self.rates.memory_gbytes_per_s * 1e3)

    def forward(self, stage: Work, adds: bool = False) -> np.ndarray:
        """Microseconds of the forward over a stage, all its parts together; ``adds``: merges with earlier results."""
        packed, most_keys = self._packed(stage), self.kernels.tall_tile_keys[128, 128][1]
        is_tall = (packed > 1) | (stage.area >= most_keys * self.num_rows)
        (tall, tall_block), (rows, keys) = self.kernels.tall_forward_tile, self.kernels.forward_tile
        height, block = np.where(is_tall, float(tall), rows), np.where(is_tall, float(tall_block), keys)
        tile = height / packed
        columns = stage.row_edges * tile / 2 + stage.rows * (block / 2 + self.rates.tile_columns)
        dk, dv = self.cost.head_dims
        flops = (stage.area + columns) * (2.0 * self.cost.num_heads_q * (dk + dv))
        # Results of stages are merged in fp32: written, and read if there are earlier ones.
        merged = self._memory_us((8.0 if adds else 2.0) * dv, stage.rows) if self.is_staged else 0.0
        launches = np.where(stage.area > 0, self.rates.forward_us, 0.0)
        tail = self._with_tail(stage.rows * self.cost.num_heads_q / height)
        return flops * tail / (self.rates.forward_tflops * 1e6) + merged + launches

    def backward(self, stage: Work, adds: bool = False) -> np.ndarray:
        """Microseconds of the backward over a stage, all its parts together; ``adds``: adds to earlier dq."""
        rates, (dk, dv), packed = self.rates, self.cost.head_dims, self._packed(stage)
        separate = self._has_separate_dq(stage, packed)
        packed = np.where(separate, packed, 1.0)
        kernels, block = self.kernels, self.kernels.query_block / packed
        rows = stage.key_edges * (kernels.key_tile / 2) + stage.keys * (block / 2 + rates.tile_rows / packed)
        columns = stage.row_edges * (kernels.dq_tile / packed / 2) + stage.rows * (
            kernels.dq_block / 2 + rates.tile_columns
        )
        # If dq has a kernel of its own, logits are computed twice.
        width = np.where(separate, 2.0 * dk + 2.0 * dv, 3.0 * dk + 2.0 * dv)
        queries = np.where(separate, (stage.area + columns) * (2.0 * dk + dv), 0.0)
        # Then a tile of keys processes all query heads of a key head; its SM may be busy longer than the others.
        heads = np.where(separate, self.cost.num_heads_kv, self.cost.num_heads_q)
        longest = (stage.tallest + block / 2 + rates.tile_rows / packed) * (kernels.key_tile * kernels.num_sms) / heads
        tail = self._with_tail(stage.keys * heads / kernels.key_tile)
        products = np.maximum((stage.area + rows) * tail, longest) * width + queries * tail
        # dq is written, or added to; if it is accumulated in memory, the sums are also zeroed and read.
        gradient = (np.where(separate, 0.0, 8.0) + (8.0 if adds else 4.0 if self.is_staged else 2.0)) * dk
        some = np.where(stage.area > 0, 1.0, 0.0)
        return some * (
            products * (2.0 * self.cost.num_heads_q) / (rates.backward_tflops * 1e6)
            + self._memory_us(1.0, self.num_rows) * gradient
            + rates.backward_us
        )

    def _has_separate_dq(self, stage: Work, packed: np.ndarray) -> np.ndarray:
        """Whether dq has a kernel of its own, on each rank."""
        keys, sum_bytes = stage.area / self.num_rows, 4 * self.num_rows * self.cost.num_heads_q * self.cost.head_dim
        some, single = (
            np.any([(sum_bytes >= many) & (keys < few) for many, few in limits], axis=0)
            for limits in (self.kernels.separate_dq_packed, self.kernels.separate_dq)
        )
        return np.where(packed > 1, some, single)

    def _with_tail(self, items: np.ndarray) -> np.ndarray:
        """Factor by which a kernel with this many items is slower than with perfectly divisible work."""
        return 1 + self.kernels.tail * self.kernels.num_sms / np.maximum(items, 1.0)

    def ends_us(self, is_backward: bool) -> np.ndarray:
        """Microseconds of work once in a pass: casts of sums, and in the backward row statistics."""
        dk, dv = self.cost.head_dims
        cast = 6.0 * (dk if is_backward else dv) if self.is_staged else 0.0
        return self._memory_us(cast + (4.0 * dv if is_backward else 0.0), self.num_rows)


def _moves_us(moved: Moved, num_rows: np.ndarray, rates: Rates, cost: CostModel, is_backward: bool) -> np.ndarray:
    """Microseconds of a pass for rows of queries that other ranks compute, ``[num_dispatches, cp_size]``.

    Nothing hides them: kernels begin when q and dout have arrived. Meanwhile a host copies its own rows next to where
    those of its guests will be.
    """
    dk, dv = cost.head_dims
    there, back = (dv, dk) if is_backward else (dk, dv)
    of_lse = 0 if is_backward else 4
    of_row = cost.num_heads_q * cost.element_bytes
    there_us = _transfer_us(moved.received, moved.sent, 1, rates, there * of_row)
    back_us = _transfer_us(moved.sent, moved.received, 1, rates, back * of_row + of_lse * cost.num_heads_q)
    guests, sent = moved.received.sum(axis=1), moved.sent.sum(axis=1)
    us_of_byte = 2 * of_row / (rates.memory_gbytes_per_s * 1e3)
    own_us = (guests > 0) * num_rows * (there * us_of_byte)
    return np.maximum(there_us, own_us) + back_us + (guests * there + sent * back) * us_of_byte


def _transfer_us(received: np.ndarray, sent: np.ndarray, degree: int, rates: Rates, row_bytes: int) -> np.ndarray:
    """Microseconds of one of the all-to-alls that move these rows, ``[num_dispatches, cp_size]``."""
    if not degree:
        return np.zeros(received[:, 0].shape)
    volume = np.maximum(received, sent) * (row_bytes / (degree * 1e3))
    near = rates.collective_us + volume[:, 0] / rates.gbytes_per_s
    far = rates.far_collective_us + volume[:, 1] / rates.far_gbytes_per_s
    return np.where(volume[:, 1] > 0, np.maximum(near, far), near)


def _at_once_us(attend: np.ndarray, fetch: np.ndarray, hidden: float) -> np.ndarray:
    """Microseconds of a pass in one launch, which waits for keys that have not arrived yet."""
    return np.maximum(attend, fetch) + (1 - hidden) * np.minimum(attend, fetch)


def _pass_us(
    own: np.ndarray, fetched: np.ndarray, fetch: np.ndarray, reduce: np.ndarray, degree: int, hidden: float
) -> np.ndarray:
    """Microseconds of a pass of each rank: a stage is fetched while the previous one is computed."""
    if not degree:
        return own
    attend, computed = fetched / degree, own
    returned = np.zeros_like(own)
    # Exposed communication delays both: kernels and collectives compete for SMs.
    delay = (1 - hidden) * np.minimum(own, fetch)
    computed, arrived = own + delay, fetch + delay
    for stage in range(1, degree + 1):
        begin = np.maximum(computed, arrived)
        if stage < degree:
            delay = (1 - hidden) * np.minimum(attend, fetch)
            begin, arrived = begin + delay, np.maximum(arrived, computed) + fetch + delay
        computed = begin + attend
        returned = np.maximum(computed, returned) + reduce
    return np.maximum(computed, returned)
