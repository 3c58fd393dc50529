"""DeepSeek's sparse attention over packed documents, and the loss of its indexer: as stock on each document alone."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_magi.testing.spawn import run_ranks
from tests.comm.test_collective_checks import be_quick
from tests.mcore import linear_models
from tests.mcore.linear_models import VOCABULARY, Step, joined, microbatch, start, step, step_alone

VARIANTS: dict[str, dict[str, Any]] = {
    "documents": {"calculate_per_token_loss": True, "q_lora_rank": 16, "qk_layernorm": True},
    "sparse_loss": {"calculate_per_token_loss": True, "dsa_indexer_use_sparse_loss": True, "q_lora_rank": None},
    "shared_lists": {"dsa_indexer_topk_freq": 2, "dsa_indexer_scoring_relu": False, "q_lora_rank": 16},
    "not_absorbed": {"absorbed": False, "calculate_per_token_loss": True, "q_lora_rank": 16},
}
"""Those with a loss of each token take packed documents; Megatron's mean is over a sequence."""
LAYOUTS = (None, "zigzag")


def build(name: str, absorbed: bool = True, **options: Any) -> torch.nn.Module:
    """A ``stock`` or ``magi`` model, with the same weights for any number of ranks."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_magi.mcore.hybrid import MagiHybridModel
    from megatron_magi.mcore.hybrid_spec import local_stack_spec

    config = MLATransformerConfig(
        num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, kv_lora_rank=16, qk_head_dim=8,
        qk_pos_emb_head_dim=8, v_head_dim=12, rope_type="rope", attention_dropout=0.0, hidden_dropout=0.0,
        bias_dropout_fusion=False, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, masked_softmax_fusion=False, apply_rope_fusion=False,
        use_cpu_initialization=True, context_parallel_size=dist.get_world_size(), cp_comm_type="allgather",
        experimental_attention_variant="dsa", dsa_indexer_n_heads=8, dsa_indexer_head_dim=16, dsa_indexer_topk=7,
        dsa_indexer_rotate_activation=False, dsa_indexer_loss_coeff=3.0, **options,
    )  # fmt: skip
    spec = local_stack_spec(config)
    if not absorbed:  # as in Megatron's layers for ModelOpt
        sparse, latent = (getattr(spec.submodules, name).submodules for name in ("dsa_layer", "mla_layer"))
        core = sparse.self_attention.submodules.core_attention
        sparse.self_attention = latent.self_attention
        sparse.self_attention.submodules.core_attention = core
    cls = {"stock": HybridModel, "magi": MagiHybridModel}[name]
    model = cls(config, spec, VOCABULARY, 1024, hybrid_layer_pattern="DD-", position_embedding_type="none")
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw) + float(parameter.dim() == 1))
    return model


def fields_of(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return microbatch(1) if options.get("calculate_per_token_loss") else joined(microbatch(1))


def logged() -> torch.Tensor:
    """The indexers' losses since the last call, over all ranks."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Log

    Log.reduce_loss_in_tracker()
    found = Log.tracker["values"].clone()
    Log.clean_loss_in_tracker()
    return found


def packed(rank: int, num_ranks: int) -> list[tuple[Step, torch.Tensor]]:
    """Of each variant: on one rank stock on each document, then packed in each layout."""
    start()
    from megatron_magi.mcore import indexer

    indexer.ROW_ELEMENTS, indexer.HEAD_ELEMENTS = 61 * 13, 61 * 13 * 3  # several chunks of rows and of heads
    found = []
    for options in VARIANTS.values():
        if num_ranks == 1:
            found.append((step_alone(build("stock", **options), fields_of(options)), logged()))
        model = build("magi", **options)
        found += [(step(model, fields_of(options), layout, foreseen=False), logged()) for layout in LAYOUTS]
    return found


def test_packed_documents_are_those_of_stock_alone() -> None:
    (one_rank,), two_ranks = (run_ranks(packed, num_ranks) for num_ranks in (1, 2))
    n = len(LAYOUTS)
    assert len(one_rank) == (n + 1) * len(VARIANTS)
    for i, (want, want_logged) in enumerate(one_rank[:: n + 1]):
        assert (want_logged > 0).any()
        for got, got_logged in one_rank[(n + 1) * i + 1 : (n + 1) * (i + 1)] + two_ranks[0][n * i : n * (i + 1)]:
            torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got_logged, want_logged, rtol=1e-5, atol=1e-6)
            assert got.gradients.keys() == want.gradients.keys()
            for name, gradient in want.gradients.items():
                assert gradient.abs().max() > 0, name
                assert (got.gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def not_finite(rank: int, num_ranks: int) -> str:
    """What a rank is told of a gradient that is not finite on the second."""
    start()
    be_quick()
    from megatron_magi.mcore.sparse_attention import MagiDSAttention

    def spoil(_module: Any, _inputs: Any, out: torch.Tensor) -> None:
        if rank == 1:
            out.register_hook(lambda grad: grad * torch.nan)

    options = VARIANTS["documents"]
    model = build("magi", **options)
    next(m for m in model.modules() if isinstance(m, MagiDSAttention)).register_forward_hook(spoil)
    checked = functools.partial(linear_models.AttendConfig, sanity_check=True)
    with mock.patch.object(linear_models, "AttendConfig", checked):
        try:
            step(model, fields_of(options), None, foreseen=False)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_gradient_that_is_not_finite_on_one_rank_is_named_on_all() -> None:
    first, second = run_ranks(not_finite, 2)
    text = "dout: row 0 holds nan; it may be hidden or visible, on rank 1 of the group"
    assert second.startswith(f"ValueError: {text}"), second
    assert first.startswith("RuntimeError: ") and f"raised ValueError: {text}" in first, first
