"""Stock Megatron with its own zigzag batches and our core attention trains as on one rank with its own attention."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_magi
from megatron_magi import cpu_device
from megatron_magi.testing.spawn import run_ranks

EXAMPLE = Path(megatron_magi.__file__).parents[1] / "examples" / "megatron" / "drop_in.py"
LENGTHS, PADDED = (13, 4, 7), (0, 16, 20, 28)


def load(starts: bool = True):
    cpu_device.install(force=True)
    spec = importlib.util.spec_from_file_location("drop_in", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if starts:
        module.start()
    return module


def losses(_rank: int, num_ranks: int, is_stock: bool) -> list[float]:
    example = load()
    return example.train(example.build(None if is_stock else example.ZigzagAttention), 3)


def packed_step(rank: int, num_ranks: int, is_stock: bool) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of packed documents with padding between them."""
    example = load()
    from megatron.core.packed_seq_params import PackedSeqParams

    model = example.build(None if is_stock else example.ZigzagAttention)
    total = PADDED[-1]
    tokens = torch.randint(example.VOCABULARY, (total + 1,), generator=torch.Generator().manual_seed(2))
    document = torch.searchsorted(torch.tensor(PADDED[1:]), torch.arange(total), right=True)
    counts = torch.arange(total) - torch.tensor(PADDED)[document] < torch.tensor(LENGTHS)[document]
    rows, params, hidden = torch.arange(total), None, None
    if is_stock:
        seen = (document[:, None] == document) & (torch.arange(total)[:, None] >= torch.arange(total))
        hidden = ~seen[None, None]
    else:
        pieces = [torch.arange(*pair).view(2 * num_ranks, -1) for pair in itertools.pairwise(PADDED)]
        rows = torch.cat([piece[[rank, 2 * num_ranks - 1 - rank]].flatten() for piece in pieces])
        bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
        padded = torch.tensor(PADDED, dtype=torch.int32)
        params = PackedSeqParams("thd", bounds, bounds, padded, padded, max_seqlen_q=16, max_seqlen_kv=16)
    labels, positions = tokens[1:][rows][None], (rows - torch.tensor(PADDED)[document[rows]])[None]
    found = model(tokens[rows][None], positions, hidden, labels=labels, packed_seq_params=params)
    loss = (found[0] * counts[rows]).sum() / counts.sum()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item(), [parameter.grad for parameter in model.parameters()]


SAMPLES = ((64, 16, 8), (32, 8), (16, 8, 16), (24, 8, 40))
"""Documents of the packed samples of four data-parallel ranks."""


def documents_of(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """The packed samples, as Megatron's data sets return them."""
    draw, samples = torch.Generator().manual_seed(3), []
    for lengths in SAMPLES:
        tokens = torch.randint(vocabulary, (sum(lengths),), generator=draw)
        samples.append({
            "tokens": tokens, "labels": tokens.roll(-1), "loss_mask": (tokens % 5 > 0).float(),
            "position_ids": torch.cat([torch.arange(n) for n in lengths]),
            "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        })  # fmt: skip
    return samples


def whole_documents(_rank: int, _num_ranks: int) -> list[torch.Tensor]:
    """Gradients of all documents, one after the other, on one rank with Megatron's attention."""
    example = load()
    model, count = example.build(None), 0.0
    for sample in documents_of(example.VOCABULARY):
        for begin, end in itertools.pairwise(sample["cu_seqlens"].tolist()):
            one = {name: x[None, begin:end] for name, x in sample.items() if name != "cu_seqlens"}
            losses = model(one["tokens"], one["position_ids"], None, labels=one["labels"])
            (losses * one["loss_mask"]).sum().backward()
            count += one["loss_mask"].sum().item()
    return [parameter.grad / count for parameter in model.parameters()]


def hybrid_step(rank: int, num_ranks: int) -> tuple[list[torch.Tensor], list[int]]:
    """Gradients of one step of Megatron's own schedule of documents over groups, and the sizes of groups it chose."""
    example = load(starts=False)
    from megatron.core import parallel_state
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(hybrid_context_parallel=True, create_gloo_process_groups=False)
    example.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    options = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 16, "calculate_per_token_loss": True}
    model, sizes, counts = example.build(example.ZigzagAttention, **options), [], []

    def forward_step(iterator, gpt):
        sample = next(iterator)
        length, size = len(sample["tokens"]), sample["local_cp_size"]
        batch = {name: sample[name][None] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        batch |= {"cu_seqlens": torch.tensor([[0, length]]), "local_cp_size": size}
        groups = parallel_state.get_hybrid_data_context_parallel_groups
        batch = example.get_batch_on_this_cp_rank(batch, True, parallel_state.get_context_parallel_group(), groups)
        group = batch.get("hybrid_cp_group")
        params = PackedSeqParams(
            "sbhd", max_seqlen_q=length, max_seqlen_kv=length, local_cp_size=int(size), cp_group=group
        )
        sizes.append(int(size))
        counts.append(batch["loss_mask"].sum())
        output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
        return output, lambda losses: ((losses * batch["loss_mask"]).sum(), counts[-1].int(), {})

    data = HybridCPDataLoaderWrapper(iter([[documents_of(example.VOCABULARY)[rank]]]), model.config)
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=1, seq_length=64,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    total = sum(counts)
    for x in (total, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(x)
    return [parameter.grad / total for parameter in model.parameters()], sizes


def test_megatrons_hybrid_context_parallelism_has_the_gradients_of_one_rank() -> None:
    (expected,) = run_ranks(whole_documents, 1)
    found = run_ranks(hybrid_step, 4)
    assert {1, 2, 4} <= {size for _, sizes in found for size in sizes}
    for gradients, _ in found:
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_stock_gpt_trains_on_zigzag_batches_as_on_one_rank() -> None:
    (stock,) = run_ranks(losses, 1, True)
    for found in run_ranks(losses, 2, False):
        assert found == pytest.approx(stock, rel=2e-5)
    assert stock[-1] != pytest.approx(stock[0], rel=1e-3)


def test_packed_documents_with_padding_between_them_are_those_of_one_rank() -> None:
    ((stock, expected),) = run_ranks(packed_step, 1, True)
    for found, gradients in run_ranks(packed_step, 2, False):
        assert found == pytest.approx(stock, rel=2e-6)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
