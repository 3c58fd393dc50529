"""The core attention module on one rank, against attention written out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_magi.attention import AttnShape
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mask import bands as bd
from megatron_magi.mcore.batch import BatchDispatcher
from megatron_magi.mcore.carrier import MagiSeqParams
from megatron_magi.mcore.core_attention import MagiCoreAttention, MagiTECoreAttention
from megatron_magi.mcore.planner import Planner
from megatron_magi.testing.error_budget import assert_within_budget

ONE_RANK = dist.ProcessGroup(0, 1)
SEQLEN, NUM_HEADS, NUM_GROUPS, HEAD_DIM = 24, 4, 2, 8


def _params(batch_size: int, seed: int = 0) -> MagiSeqParams:
    tokens = torch.randint(0, 6, (batch_size, SEQLEN), generator=torch.Generator().manual_seed(seed))
    ids = torch.zeros_like(tokens)
    batch = {"tokens": tokens, "labels": ids, "position_ids": ids, "loss_mask": torch.ones(tokens.shape)}
    config = MagiConfig(dispatch=DispatchConfig(alignment=batch_size))
    shape = AttnShape(NUM_HEADS, NUM_GROUPS, HEAD_DIM, HEAD_DIM, torch.float32)
    return BatchDispatcher(Planner(config, 0, 1, shape, eod=5), None).dispatch(batch).params


def _module(
    cls: type[MagiCoreAttention] = MagiCoreAttention,
    softmax_scale: float | None = None,
    tp_group: dist.ProcessGroup = ONE_RANK,
    **options,
) -> MagiCoreAttention:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=NUM_HEADS * HEAD_DIM,
        num_attention_heads=NUM_HEADS,
        num_query_groups=NUM_GROUPS,
        attention_dropout=0.0,
        **options,
    )
    groups = SimpleNamespace(tp=tp_group, cp=ONE_RANK)
    return cls(config, 1, AttnMaskType.causal, "self", softmax_scale=softmax_scale, pg_collection=groups)


def _qkv(batch_size: int, v_dim: int = HEAD_DIM) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((NUM_HEADS, HEAD_DIM), (NUM_GROUPS, HEAD_DIM), (NUM_GROUPS, v_dim))
    return [torch.randn(SEQLEN, batch_size, *shape, generator=generator).requires_grad_() for shape in shapes]


def _written_out(
    qkv: list[torch.Tensor],
    params: MagiSeqParams,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    scale: float = HEAD_DIM**-0.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[seqlen, batch_size, heads * dim]`` and the largest visible logit of each head."""
    q, k, v = qkv[0], *(x.repeat_interleave(NUM_HEADS // NUM_GROUPS, dim=2) for x in qkv[1:3])
    bounds = torch.from_numpy(np.unique(params.plans.for_layer(1, None).bands[0][:, bd.Q1]))
    document = torch.searchsorted(bounds, torch.arange(SEQLEN * q.shape[1]), right=True).view(-1, SEQLEN)
    distance = torch.arange(SEQLEN)[:, None] - torch.arange(SEQLEN)
    visible = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
    if window is not None:
        visible &= distance <= window
    logits = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    largest = logits.amax(dim=(0, 2, 3))
    if sink is not None:
        logits = torch.cat([logits, sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :SEQLEN]
    return torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2), largest


def _assert_same(
    module: MagiCoreAttention, batch_size: int, v_dim: int = HEAD_DIM, *, sink: torch.Tensor | None = None, **options
) -> None:
    """Output and gradients, that of a learnt sink too, err as little against fp64 as attention written out in fp32."""
    params, qkv, learnt = _params(batch_size), _qkv(batch_size, v_dim), list(module.parameters())
    weight = torch.randn(SEQLEN, batch_size, NUM_HEADS * v_dim, generator=torch.Generator().manual_seed(2))

    def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad(out, inputs, weight.to(out.dtype))]

    def written_out(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in (*qkv, *learnt)]
        sinks = inputs[3] if learnt else sink
        return with_gradients(_written_out(inputs, params, sink=sinks, **options)[0], inputs)

    got = with_gradients(module(*qkv, None, packed_seq_params=params), [*qkv, *learnt])
    plain, exact = written_out(torch.float32), written_out(torch.float64)
    for name, *results in zip(["out", "dq", "dk", "dv", "dsink"][: len(got)], got, plain, exact, strict=True):
        assert_within_budget(name, *results, elementwise=name != "dsink")


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("v_dim", [HEAD_DIM, 5])
def test_equals_attention_inside_documents(batch_size: int, v_dim: int) -> None:
    _assert_same(_module(), batch_size, v_dim)


def test_window_narrows_documents() -> None:
    _assert_same(_module(window_size=(3, 0)), 2, window=3)


def test_logits_have_the_scale_that_the_layer_gives() -> None:
    _assert_same(_module(softmax_scale=1.5), 1, scale=1.5)


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_a_tensor_parallel_rank_has_the_sinks_of_its_heads(softmax_type: str) -> None:
    module = _module(tp_group=dist.ProcessGroup(0, 2), softmax_type=softmax_type)
    assert module.softmax_offset.shape == (NUM_HEADS // 2,)


def test_layers_that_skip_the_window_have_none() -> None:
    assert _module(window_size=(3, 0), window_attn_skip_freq=1).window is None


def test_off_by_one_is_a_sink_of_logit_zero() -> None:
    _assert_same(_module(softmax_type="off-by-one"), 1, sink=torch.zeros(NUM_HEADS))


def test_learnt_sink_has_the_gradient_of_the_written_out_one() -> None:
    module = _module(softmax_type="learnable")
    with torch.no_grad():
        module.softmax_offset.copy_(torch.tensor([3.0, -3.0, 2.0, 0.5]))
    _assert_same(module, 2)
    assert module.softmax_offset.tensor_model_parallel
    assert list(module.state_dict()) == ["softmax_offset"]


def test_without_batch_dimension_it_comes_back() -> None:
    params, qkv = _params(1), _qkv(1)
    module = _module()
    flat = module(*(x.squeeze(1) for x in qkv), None, packed_seq_params=params)
    torch.testing.assert_close(flat, module(*qkv, None, packed_seq_params=params))


def test_backward_does_not_keep_the_tensor_that_q_k_and_v_are_cut_from() -> None:
    dims = [HEAD_DIM * NUM_HEADS // NUM_GROUPS, HEAD_DIM, HEAD_DIM]
    mixed = torch.randn(SEQLEN, 1, NUM_GROUPS, sum(dims), requires_grad=True)
    q, k, v = mixed.split(dims, dim=3)
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.add(x.data_ptr()) or x, lambda x: x):
        out = _module()(q.reshape(SEQLEN, 1, NUM_HEADS, HEAD_DIM), k, v, None, packed_seq_params=_params(1))
    begin = mixed.data_ptr()
    assert kept
    assert not any(begin <= address < begin + mixed.nbytes for address in kept)
    out.sum().backward()
    assert mixed.grad.abs().sum() > 0


def test_backward_keeps_no_copies_beside_a_tensor_that_q_keeps() -> None:
    mixed = torch.randn(SEQLEN, 1, NUM_HEADS, 3 * HEAD_DIM, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
    ):
        out = _module()(*mixed.split(HEAD_DIM, dim=3), None, packed_seq_params=_params(1))
    begin = mixed.untyped_storage().data_ptr()
    assert begin in kept
    assert sum(x.nbytes for at, x in kept.items() if at != begin) < 2 * out.nbytes, "out and lse"


def test_largest_logit_is_kept_over_microbatches_until_cleared() -> None:
    module = _module(qk_clip=True)
    largest = []
    for scale in (3.0, 1.0):
        params, (q, k, v) = _params(1), _qkv(1)
        module(q * scale, k, v, None, packed_seq_params=params)
        largest.append(_written_out([q * scale, k, v], params)[1])
        torch.testing.assert_close(module.current_max_attn_logits, torch.stack(largest).amax(0))
        assert not module.current_max_attn_logits.requires_grad
    module.current_max_attn_logits = None
    module(q, k, v, None, packed_seq_params=params)
    torch.testing.assert_close(module.current_max_attn_logits, largest[1])


def test_logits_of_evaluations_clip_no_weights() -> None:
    """Megatron clips after the next step, by the largest logit that it finds."""
    module, params, (q, k, v) = _module(qk_clip=True), _params(1), _qkv(1)
    module.eval()
    module(q * 100, k, v, None, packed_seq_params=params)
    assert module.current_max_attn_logits is None
    module.train()
    module(q, k, v, None, packed_seq_params=params)
    torch.testing.assert_close(module.current_max_attn_logits, _written_out([q, k, v], params)[1])


def test_a_call_without_plan_or_with_a_bias_is_refused() -> None:
    module, qkv = _module(), _qkv(1)
    with pytest.raises(
        ValueError, match=r"^packed_seq_params: MagiCoreAttention needs .* calls megatron_magi.mcore.install"
    ):
        module(*qkv, None)
    with pytest.raises(ValueError, match="attention_bias"):
        module(*qkv, None, attention_bias=torch.zeros(1), packed_seq_params=_params(1))


@pytest.mark.parametrize("name", ["fp8_dot_product_attention", "fp8_multi_head_attention"])
def test_attention_in_8_bits_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        _module(**{name: True})


def test_sinks_beside_te_start_at_zero_and_draw_nothing() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    module = _module(MagiTECoreAttention, softmax_type="learnable")
    assert module.softmax_offset.tolist() == [0.0] * NUM_HEADS
    assert torch.equal(torch.get_rng_state(), state)


def test_sinks_of_local_attention_are_drawn_by_the_init_method_unless_none_is_wanted() -> None:
    drawn = _module(softmax_type="learnable", init_method=lambda x: torch.nn.init.constant_(x, 0.25)).softmax_offset
    assert drawn.tolist() == [0.25] * NUM_HEADS
    never = _module(
        softmax_type="learnable", init_method=lambda x: pytest.fail("drawn"), perform_initialization=False
    ).softmax_offset
    assert (never.shape, never.dtype) == (drawn.shape, drawn.dtype)


@pytest.mark.parametrize("softmax_type", ["learnable", "vanilla"])
def test_checkpoint_beside_te_has_the_keys_of_tes_attention(softmax_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a learnt sink TE's attention saves, and asks for, an extra state; without one it has no keys."""
    from megatron_magi.mcore import core_attention

    seen = {}
    monkeypatch.setattr(core_attention, "make_sharded_tensors_for_checkpoint", lambda state, *a, **k: seen | state)
    options = {"softmax_type": softmax_type}
    metadata = {"dp_cp_group": None}
    of_te = _module(MagiTECoreAttention, **options).sharded_state_dict(metadata=metadata)
    of_local = _module(**options).sharded_state_dict(metadata=metadata)
    learnt = {"softmax_offset"} if softmax_type == "learnable" else set()
    assert set(of_local) == learnt
    assert set(of_te) == (learnt | {"_extra_state"} if learnt else set())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_has_the_sinks_of_all_tensor_parallel_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # else Megatron knows no ranks
    module = _module(tp_group=dist.ProcessGroup(rank, 2), softmax_type="learnable")
    saved = module.sharded_state_dict("layer.", metadata={"dp_cp_group": dist.ProcessGroup(1, 3)})
    tensor = saved.pop("layer.softmax_offset")
    assert not saved and tensor.key == "layer.softmax_offset"
    assert (tensor.global_shape, tensor.global_offset) == ((NUM_HEADS,), (rank * NUM_HEADS // 2,))
    assert tensor.replica_id[-1] == 1, "data-parallel rank 0 saves it"


def test_extra_state_of_tes_attention_is_dropped_when_it_is_loaded() -> None:
    module = _module(MagiTECoreAttention, softmax_type="learnable")
    saved = {"softmax_offset": torch.ones(NUM_HEADS), "_extra_state": torch.empty(0, dtype=torch.uint8)}
    module.load_state_dict(saved, strict=True)
    assert module.softmax_offset.tolist() == [1.0] * NUM_HEADS
    with pytest.raises(RuntimeError, match="Unexpected key"):
        _module(softmax_type="learnable").load_state_dict(saved, strict=True)
