"""Small hybrid models over microbatches of packed documents, for tests of linear layers; run by all ranks of a test."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi import cpu_device
from megatron_magi.attention import AttnShape
from megatron_magi.config import AttendConfig, DispatchConfig, MagiConfig

PATTERN, VOCABULARY = "M*EG-", 50
DOCUMENTS = {1: [[0, 13, 14, 44, 51, 53, 61]], 2: [[0, 13, 14, 30, 31, 31], [0, 7, 9, 20, 27, 31]]}
"""Bounds in each of the sequences of a microbatch; of lengths that no number of ranks divides."""
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "use_cpu_initialization": True,
    "mamba_state_dim": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
LARGE: dict[str, Any] = {
    "hidden_size": 256,
    "ffn_hidden_size": 256,
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "mamba_state_dim": 64,
    "mamba_head_dim": 64,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""For kernels on GPUs."""


class Step(NamedTuple):
    """Of all ranks: the loss of each token of the microbatch, and gradients of their sum by name."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


def microbatch(batch_size: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """Documents ``scale`` times as long as `DOCUMENTS` says."""
    bounds = torch.tensor(DOCUMENTS[batch_size]) * scale
    length = int(bounds[0, -1])
    tokens = torch.randint(VOCABULARY, (batch_size, length + 1), generator=torch.Generator().manual_seed(4))
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(length).expand(batch_size, -1).contiguous(),
        "loss_mask": torch.ones(batch_size, length),
        "cu_seqlens": bounds,
    }


def joined(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The microbatch with one document a sequence."""
    batch_size, length = fields["tokens"].shape
    return {**fields, "cu_seqlens": torch.tensor([[0, length]] * batch_size)}


def changed(fields: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """The microbatch with other tokens in a document."""
    tokens = fields["tokens"].clone()
    tokens.view(-1)[begin:end] = (tokens.view(-1)[begin:end] + 7) % VOCABULARY
    return {**fields, "tokens": tokens}


def bounds_of(fields: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Begin and end of each document in the sequences one after another."""
    length = fields["tokens"].shape[1]
    rows = [row + i * length for i, row in enumerate(fields["cu_seqlens"].numpy())]
    return [(int(a), int(b)) for row in rows for a, b in itertools.pairwise(row) if b > a]


def start(*, on_cpu: bool = True) -> None:
    """All ranks are context-parallel; on CPUs with definitions of the kernels."""
    from tests.mcore import linear_kernels

    if on_cpu:
        cpu_device.install(force=True)
    else:
        linear_kernels.tune_less()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_magi.mcore import hybrid, linear_layers

    if on_cpu:
        linear_kernels.install()
    hybrid.install()
    linear_layers.install()
    parallel_state.initialize_model_parallel(
        context_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)


def build(name: str, pattern: str = PATTERN, **options: Any) -> torch.nn.Module:
    """A ``stock`` or ``magi`` model, with the same weights for any number of ranks."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_magi.mcore.hybrid import MagiHybridModel
    from megatron_magi.mcore.hybrid_spec import local_stack_spec

    config = TransformerConfig(
        num_layers=len(pattern), num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        bias_dropout_fusion=False, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, num_moe_experts=4, moe_router_topk=2,
        moe_router_load_balancing_type="none", masked_softmax_fusion=False,
        context_parallel_size=dist.get_world_size(), **(options or SMALL),
    )  # fmt: skip
    cls = {"stock": HybridModel, "magi": MagiHybridModel}[name]
    model = cls(
        config, local_stack_spec(config), VOCABULARY, 1024, hybrid_layer_pattern=pattern, position_embedding_type="rope"
    )
    draw, width = torch.Generator().manual_seed(5), config.hidden_size**-0.5
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(width * torch.randn(parameter.shape, generator=draw) + float(parameter.dim() == 1))
    return model.to(model.embedding.word_embeddings.weight.device, config.params_dtype)


def losses_of(
    model: torch.nn.Module, fields: dict[str, torch.Tensor], layout: str | None, *, foreseen: bool = True
) -> tuple[torch.Tensor, np.ndarray]:
    """This rank's losses, ``[num_rows]``, and the tokens that they are of; beyond the last is padding."""
    from megatron_magi.mcore.batch import BatchDispatcher
    from megatron_magi.mcore.planner import Planner

    rank, config = dist.get_rank(), model.config
    heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    plan = MagiConfig(
        dispatch=DispatchConfig(alignment=len(fields["tokens"]), algorithm="affinity"),
        attend=AttendConfig(impl="torch"),
    )
    planner = Planner(
        plan, rank, dist.get_world_size(), AttnShape(heads, groups, dim, dim, config.params_dtype),
        layout=layout, has_linear_layers=foreseen,
    )  # fmt: skip
    batch = BatchDispatcher(planner, None).dispatch(fields)
    inputs = (batch.tokens, batch.position_ids, None)
    losses = model(*inputs, labels=batch.labels, packed_seq_params=batch.params, padding_mask=batch.padding_mask)
    return losses.reshape(-1), batch.params.plans.dispatch.global_index(rank)


def step(model: torch.nn.Module, fields: dict[str, torch.Tensor], layout: str | None, *, foreseen: bool = True) -> Step:
    """Loss and gradients of a packed microbatch."""
    model.zero_grad()
    losses, index = losses_of(model, fields, layout, foreseen=foreseen)
    whole, rows = torch.zeros(fields["tokens"].numel()), np.flatnonzero(index < fields["tokens"].numel())
    real = losses[torch.from_numpy(rows).to(losses.device)]
    real.sum().backward()
    whole[torch.from_numpy(index[rows])] = real.detach().float().cpu()
    whole = whole.to(losses.device)
    return _summed(whole, model)


def step_alone(model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> Step:
    """Loss and gradients of a stock model on each document by itself."""
    model.zero_grad()
    device = next(model.parameters()).device
    tokens, labels = (fields[name].view(1, -1).to(device) for name in ("tokens", "labels"))
    losses = []
    for begin, end in bounds_of(fields):
        length = end - begin
        hidden = ~torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
        positions = torch.arange(length, device=device)[None]
        losses.append(model(tokens[:, begin:end], positions, hidden, labels=labels[:, begin:end])[0])
    torch.cat(losses).sum().backward()
    return _summed(torch.cat(losses).detach().float(), model)


def _summed(losses: torch.Tensor, model: torch.nn.Module) -> Step:
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    for x in (losses, *gradients.values()):
        dist.all_reduce(x)
    return Step(losses.cpu(), {name: gradient.float().cpu() for name, gradient in gradients.items()})
