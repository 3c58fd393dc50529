"""One launch that waits for keys, behind collectives on a stream of their own, in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import distributed_attention
from megatron_magi.attention.collective_args import joined_cast
from megatron_magi.comm.group_collective import group_cast
from megatron_magi.comm.impl.native import present_native
from megatron_magi.config import CommConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan
from megatron_magi.runtime.upload import current_device
from megatron_magi.testing.spawn import run_ranks
from tests import forced

NATIVE = MagiConfig(comm=CommConfig(impl="native"))


def capture_both(rank, num_ranks):
    """A cast that is not waited for before attention; one more is under way when the capture begins."""
    device, group = current_device(), dist.group.WORLD
    plan = make_plan(builders.causal(1024 * num_ranks), NATIVE, num_ranks).for_rank(rank)
    generator = torch.Generator("cuda").manual_seed(rank)
    q, k, v = (
        torch.randn(plan.num_rows, heads, 128, device=device, dtype=torch.bfloat16, generator=generator)
        for heads in (8, 2, 2)
    )

    def both():
        handle = group_cast([k, v], joined_cast(plan, device), group, impl="native")
        out, _ = distributed_attention(q, k, v, plan, group, config=NATIVE)
        return out, *handle.wait()

    expected = both()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    before = group_cast([k, v], joined_cast(plan, device), group, impl="native")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = both()
    before.wait()
    for _ in range(20):
        for t in results:
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert present_native(group).failure() is None
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    for a, b in zip(both(), expected, strict=True):  # eager mode goes on
        assert torch.equal(a, b)
    torch.cuda.synchronize()
    del graph


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n), forced.for_hopper])
        for n in (2, 4)
    ],
)
def test_attention_behind_a_cast_in_a_graph_computes_what_eager_mode_does(num_ranks):
    run_ranks(capture_both, num_ranks, backend="nccl", timeout_s=60.0)
