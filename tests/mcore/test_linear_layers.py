"""A hybrid of Mamba, gated delta nets, attention and experts over packed documents: as stock on each document alone.

The kernels of the linear layers are for GPUs; here they are definitions in torch (`tests.mcore.linear_kernels`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi import cpu_device
from megatron_magi.testing.spawn import run_ranks

PATTERN, VOCABULARY = "M*EG-", 50
HEADS, GROUPS, HIDDEN = 4, 2, 32
DOCUMENTS = {1: [[0, 13, 14, 44, 51, 53, 61]], 2: [[0, 13, 14, 30, 31, 31], [0, 7, 9, 20, 27, 31]]}
"""Bounds in each of the sequences of a microbatch; of lengths that no number of ranks divides."""
SETTINGS = [(layout, batch_size) for batch_size in DOCUMENTS for layout in (None, "zigzag", "contiguous")]


class Step(NamedTuple):
    """Of all ranks: the loss of each token of the microbatch, and gradients of their sum by name."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


def microbatch(batch_size: int) -> dict[str, torch.Tensor]:
    bounds = torch.tensor(DOCUMENTS[batch_size])
    length = int(bounds[0, -1])
    tokens = torch.randint(VOCABULARY, (batch_size, length + 1), generator=torch.Generator().manual_seed(4))
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(length).expand(batch_size, -1).contiguous(),
        "loss_mask": torch.ones(batch_size, length),
        "cu_seqlens": bounds,
    }


def bounds_of(fields: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    length = fields["tokens"].shape[1]
    rows = [row + i * length for i, row in enumerate(fields["cu_seqlens"].numpy())]
    return [(int(a), int(b)) for row in rows for a, b in zip(row, row[1:], strict=False) if b > a]


def start() -> None:
    """All ranks are context-parallel."""
    cpu_device.install(force=True)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_magi.mcore import hybrid, linear_layers
    from tests.mcore import linear_kernels

    linear_kernels.install()
    hybrid.install()
    linear_layers.install()
    parallel_state.initialize_model_parallel(
        context_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)


def build(name: str, pattern: str = PATTERN, **options: Any) -> torch.nn.Module:
    """The same weights for both classes and any number of ranks."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_magi.mcore.hybrid import MagiHybridModel
    from megatron_magi.mcore.hybrid_spec import local_stack_spec

    config = TransformerConfig(**{**dict(
        num_layers=len(pattern), hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False,
        normalization="RMSNorm", add_bias_linear=False, num_moe_experts=4, moe_router_topk=2, ffn_hidden_size=48,
        context_parallel_size=dist.get_world_size(), moe_router_load_balancing_type="none",
        mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2, activation_func=torch.nn.functional.silu,
        gated_linear_unit=True, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8,
        linear_value_head_dim=4,
    ), **options})  # fmt: skip
    cls = {"stock": HybridModel, "magi": MagiHybridModel}[name]
    model = cls(
        config, local_stack_spec(config), VOCABULARY, 64, hybrid_layer_pattern=pattern, position_embedding_type="rope"
    )
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw) + float(parameter.dim() == 1))
    return model


def losses_of(
    model: torch.nn.Module, fields: dict[str, torch.Tensor], layout: str | None, *, foreseen: bool = True
) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """This rank's losses, ``[num_rows]``, the tokens that they are of, and which are no padding."""
    from megatron_magi.attention import AttnShape
    from megatron_magi.config import DispatchConfig, MagiConfig
    from megatron_magi.mcore.batch import BatchDispatcher
    from megatron_magi.mcore.planner import Planner

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shape = AttnShape(HEADS, GROUPS, HIDDEN // HEADS, HIDDEN // HEADS, torch.float32)
    config = MagiConfig(dispatch=DispatchConfig(alignment=len(fields["tokens"]), algorithm="affinity"))
    planner = Planner(config, rank, num_ranks, shape, layout=layout, has_linear_layers=foreseen)
    batch = BatchDispatcher(planner, None).dispatch(fields)
    inputs = (batch.tokens, batch.position_ids, None)
    losses = model(*inputs, labels=batch.labels, packed_seq_params=batch.params, padding_mask=batch.padding_mask)
    index = batch.params.plans.dispatch.global_index(rank)
    return losses.reshape(-1), index, torch.from_numpy(index < fields["tokens"].numel())


def step(model: torch.nn.Module, fields: dict[str, torch.Tensor], layout: str | None, **options: bool) -> Step:
    model.zero_grad()
    losses, index, real = losses_of(model, fields, layout, **options)
    losses[real].sum().backward()
    whole = torch.zeros(fields["tokens"].numel())
    whole[index[real.numpy()]] = losses[real].detach()
    dist.all_reduce(whole)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradients[name])
    return Step(whole, gradients)


def packed(rank: int, num_ranks: int) -> list[Step]:
    start()
    model = build("magi")
    return [step(model, microbatch(batch_size), layout) for layout, batch_size in SETTINGS]


def alone(rank: int, num_ranks: int) -> list[Step]:
    """Stock Megatron on each document by itself."""
    start()
    model, steps = build("stock"), []
    for batch_size in DOCUMENTS:
        model.zero_grad()
        fields, losses = microbatch(batch_size), []
        tokens, labels = fields["tokens"].view(1, -1), fields["labels"].view(1, -1)
        for begin, end in bounds_of(fields):
            length = end - begin
            hidden = ~torch.ones(length, length, dtype=torch.bool).tril()[None, None]
            positions = torch.arange(length)[None]
            losses.append(model(tokens[:, begin:end], positions, hidden, labels=labels[:, begin:end])[0])
        torch.cat(losses).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        steps.append(Step(torch.cat(losses).detach(), gradients))
    return steps


@pytest.fixture(scope="module")
def expected() -> dict[int, Step]:
    (steps,) = run_ranks(alone, 1, timeout_s=120.0)
    return dict(zip(DOCUMENTS, steps, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_packed_documents_are_those_of_stock_alone(num_ranks: int, expected: dict[int, Step]) -> None:
    found = run_ranks(packed, num_ranks, timeout_s=120.0)[0]
    for (_, batch_size), got in zip(SETTINGS, found, strict=True):
        want = expected[batch_size]
        torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-5)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            scale = gradient.abs().max()
            assert (got.gradients[name] - gradient).abs().max() <= 1e-5 * scale, name


def changed(fields: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """The microbatch with other tokens in a document."""
    tokens = fields["tokens"].clone()
    tokens.view(-1)[begin:end] = (tokens.view(-1)[begin:end] + 7) % VOCABULARY
    return {**fields, "tokens": tokens}


def probe(rank: int, num_ranks: int, layout: str | None, batch_size: int) -> tuple[list[list[bool]], bool]:
    """For each document, if other tokens in it change losses of each; whether one does without documents."""
    start()
    model = build("magi", "MG*")
    fields = microbatch(batch_size)
    bounds = bounds_of(fields)

    def run(fields: dict[str, torch.Tensor]) -> torch.Tensor:
        return step(model, fields, layout).losses

    before, table = run(fields), []
    for document in bounds:
        same = run(changed(fields, *document)) == before
        table.append([not bool(same[begin:end].all()) for begin, end in bounds])
    joined = {**fields, "cu_seqlens": torch.tensor([[0, fields["tokens"].shape[1]]] * batch_size)}
    begin, end = bounds[1]
    spills = (run(changed(joined, *bounds[0])) != run(joined))[begin:end].any()
    return table, bool(spills)


@pytest.mark.parametrize(("layout", "batch_size"), [(None, 1), ("zigzag", 2)])
def test_a_token_of_another_document_changes_nothing(layout: str | None, batch_size: int) -> None:
    for table, spills in run_ranks(probe, 2, layout, batch_size, timeout_s=120.0):
        assert table == np.eye(len(table), dtype=bool).tolist()
        assert spills
