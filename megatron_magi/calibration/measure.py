"""Measures the rates of this machine: on one GPU, and between GPUs where several processes are started."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention import distributed_attention
from megatron_magi.backends.costs import rates_of
from megatron_magi.calibration.fit import fit_kernels
from megatron_magi.comm.group_collective import GroupCastArgs, group_cast
from megatron_magi.config import AttendConfig, CostModel, DispatchAlgorithm, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.mask import AttnMask
from megatron_magi.mask.builders import causal, full, sliding_window, varlen
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import table_backend
from megatron_magi.plan import make_plan

logger = logging.getLogger(__name__)

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
_COST = CostModel(num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM)
_REPEATS, _CALLS = 5, 3
"""How often is timed, and how many calls at a time."""
_BUSY = 20
"""Passes over 256 MB that the GPU is busy with before what is timed: some 4 ms, in which the host gets ahead."""


def calibrate(impl: str = "auto") -> Rates:
    """Measures the rates of the current GPU; in a process group those of rank 0's, and of what connects the ranks.

    Collective over the default group, if there is one.

    Args:
        impl: the backend that is measured; ``auto``: that which computes on this GPU.

    Raises:
        RuntimeError: there is no GPU, or none that kernels run on.
        ValueError: there is no backend of that name.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("calibrate: there is no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    backend = table_backend(impl, device, torch.bfloat16, (HEAD_DIM, HEAD_DIM))
    if backend is None:
        raise RuntimeError(f"calibrate: no kernels of impl {impl!r} run on {torch.cuda.get_device_name()}")
    logger.info("calibrate: attention is computed by %r", backend.name)
    rates = replace(rates_of(torch.cuda.get_device_name()), device=torch.cuda.get_device_name())
    rates = _kernels(replace(rates, memory_gbytes_per_s=_memory_rate()), backend.name)
    if dist.is_initialized() and dist.get_world_size() > 1:
        rates = _transfers(rates, backend.name)
        text = [rates.to_json()]
        dist.broadcast_object_list(text)
        rates = Rates.from_json(text[0])
    return rates


def masks() -> list[AttnMask]:
    """What the kernels are measured with: whole sequences, long documents, short ones, windows."""
    return [
        full(8192),
        causal(4096),
        causal(16384),
        varlen(doc_lengths=[2048] * 8, causal=True),
        varlen(doc_lengths=[512] * 64, causal=True),
        varlen(doc_lengths=[300, 700] * 24, causal=False),
        sliding_window(left=1024, right=0, doc_lengths=[32768]),
    ]


def median_us(run: Callable[[], object]) -> float:
    """Median microseconds of a call on the GPU: of `_CALLS` that are queued back to back while it is busy."""
    busy = torch.zeros(1 << 26, device="cuda")
    times = []
    run()
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(_BUSY):
            busy.add_(1)
        begin.record()
        for _ in range(_CALLS):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / _CALLS)
    return float(np.median(times))


def _memory_rate() -> float:
    source = torch.zeros(1 << 26, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source)) / 1e3


def _tensors(num_rows: int) -> list[torch.Tensor]:
    """q, k, v that require gradients, and a gradient."""
    heads = (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    return [
        torch.randn(num_rows, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16).requires_grad_(i < 3)
        for i, n in enumerate(heads)
    ]


def _kernels(rates: Rates, impl: str) -> Rates:
    forward, backward, measured = [], [], masks()
    for mask in measured:
        *leaves, dout = _tensors(mask.total_seqlen_q)
        frozen = [leaf.detach() for leaf in leaves]
        forward.append(median_us(lambda f=frozen, m=mask: slice_attention(*f, m, impl=impl)))
        out = slice_attention(*leaves, mask, impl=impl)[0]
        backward.append(median_us(lambda o=out, x=leaves, d=dout: torch.autograd.grad(o, x, d, retain_graph=True)))
        logger.info("%s: forward %.0f us, backward %.0f us", mask, forward[-1], backward[-1])
    rates = fit_kernels(measured, forward, backward, rates, _COST)
    host = _host_us(None, "sequential", impl)
    return replace(rates, host_forward_us=host[0], host_backward_us=host[1])


def _host_us(group: dist.ProcessGroup | None, algorithm: DispatchAlgorithm, impl: str) -> tuple[float, float]:
    """Microseconds that the host takes to issue a forward and a backward pass; the slowest rank's, with one stage."""
    rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
    overlap = OverlapConfig(degree=None if num_ranks == 1 else 1, one_launch=False)
    config = MagiConfig(DispatchConfig(algorithm=algorithm), overlap, AttendConfig(impl=impl))
    plan = make_plan(causal(1024 * num_ranks), config, num_ranks).for_rank(rank)
    *leaves, dout = _tensors(plan.num_rows)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = distributed_attention(*leaves, plan, group, config=config)[0]
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, dout)
        times.append((middle - begin, time.perf_counter() - middle))
    slowest = torch.tensor(np.median(times[4:], axis=0), device="cuda")
    if group is not None:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    forward, backward = (1e6 * slowest).tolist()
    return forward, backward


def _transfers(rates: Rates, impl: str) -> Rates:
    """``rates`` with measured transfers inside a node and, if there are several, between nodes; collective."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    near, far = None, None
    for host in dict.fromkeys(hosts):  # every rank takes part in making every group
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        group = dist.new_group(ranks)
        near = group if hosts[dist.get_rank()] == host else near
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(first) > 1:
        far = dist.new_group(first)
    if near is not None and near.size() > 1:
        latency, rate, hidden = _transfer(near, impl)
        two_way, one_way = (_host_us(near, algorithm, impl) for algorithm in ("zigzag", "sequential"))
        rates = replace(
            rates,
            collective_us=latency,
            gbytes_per_s=rate,
            hidden=hidden,
            host_stage_forward_us=max(0.0, two_way[0] - rates.host_forward_us),
            host_stage_backward_us=max(0.0, two_way[1] - rates.host_backward_us),
            host_one_way_us=max(0.0, sum(two_way) - sum(one_way)) / 2,
        )
    if len(first) > 1:
        rates = replace(rates, ranks_per_node=hosts.count(hosts[0]))
        if dist.get_rank() in first:
            latency, rate, _ = _transfer(far, impl)
            rates = replace(rates, far_collective_us=latency, far_gbytes_per_s=rate)
    return rates


def _transfer(group: dist.ProcessGroup, impl: str) -> tuple[float, float, float]:
    """Measures an all-to-all of k and v: microseconds without rows, GB/s that a rank sends, share hidden by kernels."""
    others = group.size() - 1
    q, k, v, _ = (x.detach() for x in _tensors(8192))

    def cast(rows: int) -> Callable[[], object]:
        splits = [0 if rank == group.rank() else rows // others for rank in range(group.size())]
        index = np.arange(sum(splits)) % len(k)
        args = GroupCastArgs.build(index, splits, splits, None, k.device)
        return lambda: group_cast([k, v], args, group)

    few, many = cast(others), cast(16384)
    latency, long = median_us(lambda: few().wait()), median_us(lambda: many().wait())
    sent = 16384 // others * others * _COST.row_bytes
    mask = causal(8192)
    alone = median_us(lambda: slice_attention(q, k, v, mask, impl=impl))

    def both() -> None:
        handle = many()
        slice_attention(q, k, v, mask, impl=impl)
        handle.wait()

    hidden = (alone + long - median_us(both)) / min(alone, long)
    return latency, sent / max(long - latency, 1e-3) / 1e3, float(np.clip(hidden, 0.0, 1.0))
