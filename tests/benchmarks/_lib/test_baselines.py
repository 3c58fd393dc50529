"""The other ways of context parallelism compute what the dense definition says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks._lib.baselines import BASELINES, Cluster, Unsupported
from benchmarks._lib.baselines.base import document_bounds, num_tokens, split, zigzag
from benchmarks._lib.baselines.subgroups import place
from benchmarks._lib.cases import MASKS, Case
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.testing.spawn import run_ranks
from tests.dense_attention import dense_attention

LENGTH, HEADS_Q, HEADS_KV, DIM = 203, 8, 4, 8
DOCS = (31, 5, 90, 1, 76)
ZIGZAG = {"ring", "double_ring", "usp", "subgroups"}
WHOLE = ("full", "causal")
SQUARE = {"double_ring", "usp"}


def small_case(name: str) -> Case:
    if name == "window":
        return Case("window", builders.sliding_window(LENGTH, 15, 0), causal=True, window=16)
    if name == "block_causal":
        mask = builders.block_causal(block_size=16, doc_lengths=DOCS)
        return Case("block_causal", mask, doc_lengths=DOCS, plain=False)
    if name.startswith("documents"):
        causal = name.endswith("causal")
        return Case(name, builders.varlen(doc_lengths=DOCS, causal=causal), causal, doc_lengths=DOCS)
    return MASKS[name](LENGTH)


CASES = {n: small_case(n) for n in ("full", "causal", "documents_causal", "documents_full", "window", "block_causal")}


def token_index(runs: np.ndarray) -> np.ndarray:
    """The tokens of runs one by one."""
    return np.concatenate([np.arange(low, high) for low, high in runs])


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    return [torch.randn(LENGTH, n, DIM, generator=generator, dtype=torch.float64) for n in heads]


def run_all(rank: int, num_ranks: int) -> dict[tuple[str, str], object]:
    """Results of every baseline on every mask, or why it has none; twice, so that a second call is seen too."""
    del rank
    cluster, found = Cluster(), {}
    tensors = draw()
    for name, way in BASELINES.items():
        for case_name, case in CASES.items():
            try:
                ready = way(case, cluster, HEADS_KV)
            except Unsupported as reason:
                found[name, case_name] = str(reason)
                continue
            index = torch.from_numpy(token_index(ready.runs))
            for _ in range(2):
                q, k, v, dout = (t[index].requires_grad_(i < 3) for i, t in enumerate(tensors))
                out = ready.attend(q, k, v)
                grads = torch.autograd.grad(out, (q, k, v), dout)
            found[name, case_name] = index, [t.detach() for t in (out, *grads)]
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_baseline_computes_the_dense_definition(ranks, num_ranks):
    found = ranks(num_ranks, run_all)
    q, k, v, dout = draw()
    for case_name, case in CASES.items():
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, _ = dense_attention(*leaves, dense_mask(case.mask))
        exact = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        for name in BASELINES:
            given = [of_rank[name, case_name] for of_rank in found]
            if isinstance(given[0], str):
                if name.startswith("te_"):
                    assert "not installed, or needs GPUs" in given[0]
                    continue
                if name.startswith("torch_"):
                    reason = "needs GPUs" if "flex" not in name else "are not whole blocks of 128 on each rank"
                    assert reason in given[0]
                    continue
                refused = (*WHOLE, "window", "block_causal") if name == "subgroups" else ("window", "block_causal")
                assert (name in SQUARE and num_ranks == 2) or (name in ZIGZAG and case_name in refused), (
                    name, case_name, given[0],
                )  # fmt: skip
                continue
            index = torch.cat([index for index, _ in given])
            assert torch.equal(index.sort()[0], torch.arange(LENGTH)), (name, case_name)
            for part, want in enumerate(exact):
                have = torch.cat([parts[part] for _, parts in given])
                error = (have - want[index]).abs().max()
                assert error < 1e-12, f"{name}, {case_name}, {('out', 'dq', 'dk', 'dv')[part]}: off by {error:.1e}"


def heads_that_do_not_divide(rank: int, num_ranks: int) -> str:
    del rank, num_ranks
    with pytest.raises(Unsupported) as error:
        BASELINES["ulysses"](CASES["full"], Cluster(), 1)
    return str(error.value)


def test_ulysses_refuses_ranks_that_do_not_divide_the_key_heads(ranks):
    assert ranks(2, heads_that_do_not_divide)[0] == "1 key heads cannot be divided by 2 ranks"


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_parts_of_runs_are_even_and_hold_each_token_once(num_parts):
    runs = np.array([[3, 10], [12, 13], [20, 41]])
    parts = split(runs, num_parts)
    assert np.array_equal(np.concatenate([token_index(p) for p in parts]), token_index(runs))
    assert max(map(num_tokens, parts)) - min(map(num_tokens, parts)) <= 1


def test_zigzag_gives_every_rank_the_same_area_of_each_causal_document():
    case = Case("", builders.varlen(doc_lengths=(64, 32), causal=True), True, doc_lengths=(64, 32))
    visible = dense_mask(case.mask)
    areas = {int(visible[token_index(part)].sum()) for part in zigzag(case, 4)}
    assert len(areas) == 1


def test_documents_get_as_many_ranks_as_their_work_asks_for():
    lengths = (80, 20, 20, 20, 20)  # of a work of 64, and 4 each: 20 for each of four ranks
    placed = place(document_bounds(Case("", builders.varlen(doc_lengths=lengths), doc_lengths=lengths)), 4)
    assert [x.tolist() for x in placed[4]] == [[0]] and all(len(x) == 0 for x in placed[2])
    assert sorted(i for group in placed[1] for i in group.tolist()) == [1, 2, 3, 4]
    assert all(len(group) == 1 for group in placed[1])
    # Groups of three ranks: one, or all.
    assert sorted(place(np.array([[0, 30], [30, 32]]), 3)) == [1, 3]


ALIGNED_DOCS = (64, 240, 16, 192)
ALIGNED = Case("documents", builders.varlen(doc_lengths=ALIGNED_DOCS, causal=True), True, doc_lengths=ALIGNED_DOCS)
WHOLE_CASES = (MASKS["full"](512), MASKS["causal"](512))
WINDOW_512 = Case("window", builders.sliding_window(512, 99, 0), causal=True, window=100)
"""Masks of 512 tokens."""


def run_others(rank: int, num_ranks: int, ways: dict[str, tuple[Case, ...]]) -> dict[tuple[str, str], list[float]]:
    """Relative errors of ways of other libraries in bf16, on the masks that each has."""
    del num_ranks
    cluster, found, length = Cluster(), {}, 512
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS_Q, 64), (HEADS_KV, 64), (HEADS_KV, 64), (HEADS_Q, 64))
    tensors = [torch.randn(length, *s, generator=generator).to("cuda", torch.bfloat16) for s in shapes]
    for name, cases in ways.items():
        for case in cases:
            ready = BASELINES[name](case, cluster, HEADS_KV)
            index = torch.from_numpy(token_index(ready.runs)).to("cuda")
            q, k, v, dout = (t[index].requires_grad_(i < 3) for i, t in enumerate(tensors))
            out = ready.attend(q, k, v)
            have = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
            leaves = [t.double().requires_grad_() for t in tensors[:3]]
            whole, _ = dense_attention(*leaves, torch.from_numpy(dense_mask(case.mask)).to(q.device))
            want = [whole.detach(), *torch.autograd.grad(whole, leaves, tensors[3].double())]
            errors = [float((a - b[index]).norm() / b[index].norm()) for a, b in zip(have, want, strict=True)]
            found[name, case.name] = errors
    return found


FLEX_DOCS = (32, 384, 96)
FLEX_CASES = {
    "full": MASKS["full"](512),
    "causal": MASKS["causal"](512),
    "documents": Case("documents", builders.varlen(doc_lengths=FLEX_DOCS), True, doc_lengths=FLEX_DOCS),
    "window": Case("window", builders.sliding_window(512, 99, 0), causal=True, window=100),
}
FLEX = ("torch_flex", "torch_flex_head_tail", "torch_flex_blocks")


def run_flex(rank: int, num_ranks: int) -> dict[tuple[str, str], object]:
    """The forward of FlexAttention's ways, fp64; and how keys and values get the gradients of other ranks' copies."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as experimental
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
    from torch.nn.attention.flex_attention import create_block_mask

    del num_ranks
    experimental._compiled_create_block_mask = create_block_mask  # else each mask is compiled
    cluster, found, generator = Cluster(), {}, torch.Generator().manual_seed(0)
    whole = [torch.randn(512, heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    for name in FLEX:
        for mask, case in FLEX_CASES.items():
            try:
                ready = BASELINES[name](case, cluster, 2)
            except Unsupported as reason:
                found[name, mask] = str(reason)
                continue
            index = torch.from_numpy(token_index(ready.runs))
            want, _ = dense_attention(*whole, dense_mask(case.mask))
            found[name, mask] = index, float((ready.attend(*(x[index] for x in whole)) - want[index]).abs().max())
    k, v = (torch.ones(1, 1, 2, 1, requires_grad=True) for _ in range(2))
    gathered = flex_cp_allgather(k, v, 2, torch.distributed.group.WORLD.group_name)
    sum(x.sum() * (rank + 1) for x in gathered).backward()
    return {**found, "gradient": float(k.grad.sum())}


def test_flex_attention_of_pytorch_computes_the_dense_definition_however_it_is_balanced(ranks):
    found = ranks(2, run_flex)
    for name in FLEX:
        for mask in FLEX_CASES:
            given = [of_rank[name, mask] for of_rank in found]
            if (name, mask) == ("torch_flex_head_tail", "full"):
                assert given == ["head and tail are for causal masks"] * 2
                continue
            assert torch.equal(torch.cat([index for index, _ in given]).sort()[0], torch.arange(512)), (name, mask)
            assert max(error for _, error in given) < 1e-12, (name, mask)
    assert [of_rank["gradient"] for of_rank in found] == [2 * (1 + 2)] * 2


def test_accelerate_calls_pytorchs_way_that_gathers():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
    from accelerate.utils import TorchContextParallelConfig
    from torch.distributed.tensor.experimental import _attention as experimental
    from torch.distributed.tensor.experimental import context_parallel

    before = experimental._cp_options.rotate_method
    handler = TorchContextParallelConfig()
    fake = SimpleNamespace(parallelism_config=SimpleNamespace(cp_handler=handler), torch_device_mesh={"cp": None})
    try:
        accelerate.Accelerator._prepare_cp(fake)
        assert fake._cp_context.func is context_parallel
        assert experimental._cp_options.rotate_method is experimental._RotateMethod.ALL_GATHER
        assert handler.cp_comm_strategy == "allgather"
    finally:
        experimental._cp_options.rotate_method = before


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_pytorchs_own_ways_compute_the_dense_definition():
    ways = dict.fromkeys(("torch_ring", "torch_all_gather"), WHOLE_CASES)
    for found in run_ranks(run_others, 2, ways, backend="nccl"):
        assert len(found) == 4 and all(error < 1e-2 for errors in found.values() for error in errors), found


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_transformer_engines_own_ways_compute_the_dense_definition():
    pytest.importorskip("transformer_engine")
    ways = {"te_p2p": (*WHOLE_CASES, ALIGNED), "te_all_gather": (*WHOLE_CASES, ALIGNED, WINDOW_512)}
    for found in run_ranks(run_others, 2, ways, backend="nccl"):
        assert len(found) == 7 and all(error < 1e-2 for errors in found.values() for error in errors), found
