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


def load():
    cpu_device.install(force=True)
    spec = importlib.util.spec_from_file_location("drop_in", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


def test_a_stock_gpt_trains_on_zigzag_batches_as_on_one_rank() -> None:
    (stock,) = run_ranks(losses, 1, True, timeout_s=120.0)
    for found in run_ranks(losses, 2, False, timeout_s=120.0):
        assert found == pytest.approx(stock, rel=2e-5)
    assert stock[-1] != pytest.approx(stock[0], rel=1e-3)


def test_packed_documents_with_padding_between_them_are_those_of_one_rank() -> None:
    ((stock, expected),) = run_ranks(packed_step, 1, True, timeout_s=120.0)
    for found, gradients in run_ranks(packed_step, 2, False, timeout_s=120.0):
        assert found == pytest.approx(stock, rel=2e-6)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
