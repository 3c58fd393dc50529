"""Attention in one launch, whose later keys arrive while it runs: it equals stages, and ends when nothing comes."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import AttnShape, distributed, distributed_attention, prepare_batch
from megatron_magi.backends.sm90 import forward_steps, mask_numbers, tuning
from megatron_magi.backends.sm90.support import work_counter
from megatron_magi.config import AttendConfig, CommConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda.streams import current_stream
from megatron_magi.mask import builders
from megatron_magi.operands.merge import sink_gradient
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import row_delta, slice_attention_backward, slice_attention_forward
from megatron_magi.plan import make_plan
from megatron_magi.runtime.upload import current_device
from megatron_magi.testing.spawn import run_ranks
from tests import forced
from tests.attention import cases as cs

on_gpus = pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n), forced.for_hopper])
        for n in (2, 4, 8)
    ],
)
NATIVE = CommConfig(impl="native")
OPTIONS = [
    {}, {"heads": (16, 2)}, {"dims": (64, 64)}, {"heads": (2, 2), "dims": (192, 128)},
    {"dims": (256, 256), "heads": (4, 1)}, {"dtype": torch.float16, "heads": (4, 4)},
]  # fmt: skip


def tensors_of(num_rows, seed, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    return [torch.randn(num_rows, *s, device="cuda", dtype=dtype, generator=generator) for s in shapes]


def masks(num_ranks):
    """Masks, and stages of each."""
    total = 1024 * num_ranks
    yield builders.causal(total), None
    yield builders.causal(3 * total), 3
    yield builders.full(total + 77), 2
    yield builders.sliding_window(total, 200, 0), 1
    yield builders.varlen(doc_lengths=[700, 13, 1, total - 714], causal=True), None
    yield builders.varlen(doc_lengths=[total // 4] * 4, causal=True), None  # some ranks fetch nothing
    for seed in range(12):
        yield cs.random_mask(257 * num_ranks + 100 * seed, 6, seed), seed % 4 or None


class Counted:
    """Passes that are prepared by `forward_steps.forward_steps`: one for each plan by which some rank fetches."""

    def __enter__(self):
        self.count, self._real = 0, forward_steps.forward_steps
        self._patch = mock.patch.object(forward_steps, "forward_steps", self)
        self._patch.start()
        return self

    def __call__(self, *args):
        *_, arriving = args
        self.count += arriving is not None
        return self._real(*args)

    def __exit__(self, *_):
        self._patch.stop()


def compare(rank, num_ranks):
    """One launch and stages, over masks, heads and options."""
    gates = 0
    for i, (mask, degree) in enumerate(masks(num_ranks)):
        config = MagiConfig(overlap=OverlapConfig(degree=degree, one_launch=True), comm=NATIVE)
        q, k, v = tensors_of(make_plan(mask, config, num_ranks).for_rank(rank).num_rows, 10 * i + rank,
                             **OPTIONS[i % len(OPTIONS)])  # fmt: skip
        more = {"return_max_logits": i % 2 == 0, "softcap": 2.0 * (i % 3 == 1)}
        if i % 4 == 3:
            more["sink"] = torch.randn(2, q.shape[1], device="cuda")
        dout = torch.randn(*q.shape[:2], v.shape[2], device="cuda").to(q.dtype)
        found = []
        for way in (lambda *_: False, distributed.pays):
            plan = make_plan(mask, config, num_ranks).for_rank(rank)
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            with mock.patch.object(distributed, "pays", way), Counted() as counted:
                out, meta = distributed_attention(*leaves, plan, dist.group.WORLD, config=config, **more)
                grads = torch.autograd.grad(out, leaves, dout)
                found.append(({"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}, meta))
        assert counted.count == (plan.degree > 0), (i, counted.count)
        gates += sum(t.num_recv for t in plan.transfers) > 0
        (staged, meta_a), (at_once, meta_b) = found
        for name, a in staged.items():
            b, a = at_once[name].float(), a.float()
            scale = a.abs().max().clamp(min=1e-3)
            assert b.isfinite().all() and float((a - b).abs().max() / scale) < 1e-2, (i, name)
        torch.testing.assert_close(meta_b.lse, meta_a.lse, atol=2e-3, rtol=1e-3)
        if more["return_max_logits"]:
            torch.testing.assert_close(meta_b.max_logits, meta_a.max_logits, atol=1e-3, rtol=1e-3)
    return gates


@on_gpus
def test_one_launch_computes_what_stages_do(num_ranks):
    assert min(run_ranks(compare, num_ranks, backend="nccl", timeout_s=180)) > 8


@pytest.mark.sm90
def test_one_rank_and_the_operator_compute_what_passes_launched_one_by_one_do():
    """Where nothing is fetched a pass is one list of calls."""
    for i, (mask, _) in enumerate(masks(2)):
        deterministic = i % 5 == 4
        config = MagiConfig(attend=AttendConfig(deterministic=deterministic))
        plan = make_plan(mask, config).for_rank(0)
        q, k, v = (t.requires_grad_() for t in tensors_of(plan.num_rows, i, **OPTIONS[i % len(OPTIONS)]))
        more = {"return_max_logits": i % 2 == 0, "softcap": 2.0 * (i % 3 == 1)}
        leaves, sink = [q, k, v], None
        if i % 4 == 3:
            sink = torch.randn(2, q.shape[1], device="cuda", requires_grad=True)
            leaves.append(sink)
        dout, of_mask = (
            torch.randn(*q.shape[:2], v.shape[2], device="cuda").to(q.dtype),
            {"deterministic": deterministic},
        )
        expected, lse, max_logits = slice_attention_forward(q, k, v, plan.bands[0], sink=sink, **of_mask, **more)
        delta, softcap = row_delta(dout, expected, "ffa"), {"softcap": more["softcap"]}
        grads = [*slice_attention_backward(dout, q, k, v, lse, delta, plan.bands[0], **of_mask, **softcap)]
        if sink is not None:
            grads.append(sink_gradient(sink.detach(), lse, delta))
        for out, meta in (
            distributed_attention(q, k, v, plan, None, config=config, sink=sink, **more),
            slice_attention(q, k, v, plan.bands[0], sink=sink, **of_mask, **more),
        ):
            assert torch.equal(out, expected) and torch.equal(meta.lse, lse), i
            if more["return_max_logits"]:
                assert torch.equal(meta.max_logits, max_logits), i
            for a, b in zip(torch.autograd.grad(out, leaves, dout), grads, strict=True):
                a, b = a.float(), b.float()
                assert a.isfinite().all() and float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) < 1e-2, i


def launch_like_the_batch_before(rank, num_ranks):
    """Results of batches whose launches are prepared like those of the batch before, and of their plans."""
    device, total, last, found = current_device(), 1024 * num_ranks, None, 0
    config = MagiConfig(overlap=OverlapConfig(one_launch=True), comm=NATIVE)
    shape = AttnShape(8, 2, 128, 128, torch.bfloat16).kernels_for(device)
    kinds = [
        builders.varlen(doc_lengths=[total // 4] * 4, causal=True),  # fetches nothing
        *(builders.varlen(doc_lengths=[100 * n, 13, total - 13 - 100 * n], causal=True) for n in range(2, 8)),
        builders.causal(total), builders.sliding_window(total, 200, 0), builders.full(total),
    ]  # fmt: skip
    for i, mask in enumerate((*kinds, *kinds[::-1], *kinds)):
        plan = make_plan(mask, config, num_ranks).for_rank(rank)
        q, k, v = (t.requires_grad_() for t in tensors_of(plan.num_rows, 10 * i + rank))
        dout, results = torch.randn_like(q), []
        batch = prepare_batch({0: plan}, shape, config)
        batch.to(device, like=last)
        last = batch.plans
        for of_batch in (last[0], make_plan(mask, config, num_ranks).for_rank(rank)):
            known = len(of_batch.runtime.calls)
            out, meta = distributed_attention(q, k, v, of_batch, dist.group.WORLD, config=config)
            results.append([out.detach(), meta.lse, *torch.autograd.grad(out, (q, k, v), dout)])
            assert len(of_batch.runtime.calls) == 1 and known == (i > 0 and of_batch is last[0])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)
        assert torch.equal(results[0][0], results[1][0])
        found += 1
    return found


@on_gpus
def test_launches_prepared_like_those_of_the_batch_before_compute_the_same(num_ranks):
    assert min(run_ranks(launch_like_the_batch_before, num_ranks, backend="nccl", timeout_s=180)) == 30


def change_plans(rank, num_ranks, num_calls):
    """A new mask in each call, forward and backward: what arrives is of this call and of no other.

    In deterministic mode dq has a kernel of its own, which waits for keys while gradients of keys travel.
    """
    rng = np.random.default_rng(0)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with Counted() as counted:
        for call in range(num_calls):
            total = int(rng.choice([512, 3000, 20_000])) * num_ranks
            cuts = np.sort(rng.integers(1, total, int(rng.integers(0, 6))))
            lengths = np.diff(cuts, prepend=0, append=total).tolist()
            config = MagiConfig(
                overlap=OverlapConfig(degree=int(rng.integers(1, 4)), one_launch=True),
                attend=AttendConfig(deterministic=call % 2 == 0), comm=NATIVE,
            )  # fmt: skip
            plan = make_plan(builders.varlen(doc_lengths=lengths, causal=False), config, num_ranks)
            rows = plan.dispatch.global_index(rank)
            # All logits are equal, so a row gets the mean of its document's values, which name document and call.
            document = np.searchsorted(np.cumsum(lengths), np.minimum(rows, total - 1), side="right")
            value = torch.from_numpy((document + 8 * (call % 16)).astype(np.float32)).cuda()
            q = torch.zeros(len(rows), 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            k = torch.ones(len(rows), 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            v = value.to(torch.bfloat16)[:, None, None].expand(-1, 2, 128).contiguous().requires_grad_()
            out, _ = distributed_attention(q, k, v, plan.for_rank(rank), dist.group.WORLD, config=config)
            real = torch.from_numpy(rows < total).cuda()
            wrong += (out[real].float() != value[real, None, None]).sum()
            if call % 3 < 2:
                out.backward(torch.full_like(out, 1 + call % 7))
                # Of each row of a document the key gets as much as of all others, of four heads; values are equal.
                wrong += ((v.grad[real].float() - 4 * (1 + call % 7)).abs() > 0.5).sum()
                wrong += (q.grad[real].float().abs() > 0.2).sum()
    return int(wrong), counted.count


@on_gpus
def test_keys_of_each_of_200_calls_with_changing_plans_are_its_own(num_ranks):
    for wrong, count in run_ranks(change_plans, num_ranks, 200, backend="nccl", timeout_s=180):
        assert not wrong and count > 50


def repeat(rank, num_ranks, num_calls):
    """Calls of one plan that follow each other without a pause; how many numbers differ from those of the first."""
    total, wrong = 4096 * num_ranks, torch.zeros((), dtype=torch.int64, device="cuda")
    config = MagiConfig(attend=AttendConfig(deterministic=True), comm=NATIVE)
    for mask in (builders.causal(total), builders.varlen(doc_lengths=[total // 2 - 5, 5, total // 2], causal=True)):
        plan = make_plan(mask, config, num_ranks).for_rank(rank)
        leaves = [t.requires_grad_() for t in tensors_of(plan.num_rows, rank)]
        dout = torch.randn(plan.num_rows, 8, 128, device="cuda").to(torch.bfloat16)
        first = None
        for _ in range(num_calls):
            out, _ = distributed_attention(*leaves, plan, dist.group.WORLD, config=config)
            found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            first = first or found
            wrong += sum((a != b).sum() for a, b in zip(first, found, strict=True))
    return int(wrong)


@on_gpus
def test_calls_that_follow_each_other_give_the_same(num_ranks):
    assert not any(run_ranks(repeat, num_ranks, 60, backend="nccl", timeout_s=120))


def start_items_in_step(rank, num_ranks):
    """Calls in which each item counts as long, of ranks of which one is late; numbers that differ from the first's."""
    plan = make_plan(builders.full(2048 * num_ranks), MagiConfig(), num_ranks).for_rank(rank)
    leaves = [t.requires_grad_() for t in tensors_of(plan.num_rows, rank, heads=(64, 8))]
    dout = torch.randn(plan.num_rows, 64, 128, device="cuda").to(torch.bfloat16)
    attend, seen, found = AttendConfig(deterministic=True), [], []
    real = mask_numbers.row_numbers

    def row_numbers(name, *args):
        numbers = real(name, *args)
        seen.append((name, numbers[f"{name}.long_blocks"], numbers[f"{name}.grid"]))
        return numbers

    with (
        mock.patch.object(tuning, "L2_BYTES", 1),
        mock.patch.object(mask_numbers, "row_numbers", row_numbers),
    ):
        for call in range(7):
            config = MagiConfig(attend=attend, comm=NATIVE, overlap=OverlapConfig(one_launch=call > 0))
            if call % num_ranks == rank:
                torch.cuda._sleep(3_000_000)
            out, _ = distributed_attention(*leaves, plan, dist.group.WORLD, config=config)
            if call % 3 == rank:
                torch.cuda._sleep(3_000_000)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    torch.cuda.synchronize()
    assert {name for name, *_ in seen} == {"rows", "queries"} and {blocks for _, blocks, _ in seen} == {1}
    assert not work_counter(leaves[0].device, current_stream(leaves[0].device)).any()
    for a, b in zip(found[0], found[1], strict=True):  # stages
        assert float((a.float() - b.float()).abs().max() / a.abs().max()) < 1e-2
    return sum(int((a != b).sum()) for call in found[2:] for a, b in zip(found[1], call, strict=True))


@on_gpus
def test_thread_blocks_that_start_long_items_in_step_compute_the_same(num_ranks):
    assert not any(run_ranks(start_items_in_step, num_ranks, backend="nccl", timeout_s=120))


def stay_away(rank, num_ranks):
    group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=2))
    config = MagiConfig(overlap=OverlapConfig(one_launch=True), comm=CommConfig(impl="native", verify=False))
    plan = make_plan(builders.causal(2048 * num_ranks), config, num_ranks).for_rank(rank)
    q, k, v = tensors_of(plan.num_rows, rank)
    distributed_attention(q, k, v, plan, group, config=config)
    torch.cuda.synchronize()
    if rank == 0:
        time.sleep(6)
        return
    begin = time.monotonic()
    distributed_attention(q, k, v, plan, group, config=config)
    torch.cuda.synchronize()
    assert 1.5 < time.monotonic() - begin < 5
    fetches = sum(t.num_recv for t in plan.transfers) > 0
    what = rf"rank 0 .* did not arrive within 2 s; attention of rank {rank} .* waited for part 1 of the keys"
    with pytest.raises(RuntimeError, match=what if fetches else "rank 0 .* did not arrive within 2 s"):
        distributed_attention(q, k, v, plan, group, config=config)
    assert torch.ones(3, device="cuda").sum() == 3  # the device is as it was


@on_gpus
def test_attention_that_waits_for_a_rank_which_does_not_come_ends_and_names_it(num_ranks):
    run_ranks(stay_away, num_ranks, backend="nccl", timeout_s=60)
