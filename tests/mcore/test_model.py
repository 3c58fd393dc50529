"""What the model refuses, and how multi-token prediction shifts what it is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_magi.attention import AttnShape
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mcore import model, mtp
from megatron_magi.mcore.batch import BatchDispatcher
from megatron_magi.mcore.carrier import MagiSeqParams, ShardLayout
from megatron_magi.mcore.hybrid import MagiHybridModel
from megatron_magi.mcore.model import MagiModelMixin
from megatron_magi.mcore.mtp import process_mtp_loss, roll_tensor
from megatron_magi.mcore.planner import Planner


class _Losses:
    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.sum(-1)


class _Model(MagiModelMixin, _Losses):
    def __init__(self, tp_size: int) -> None:
        self.vocab_size = 8
        self.pg_collection = SimpleNamespace(tp=SimpleNamespace(size=lambda: tp_size))


def test_a_loss_of_gathered_logits_is_refused() -> None:
    """Megatron would take them for a tensor-parallel rank's part and add the logarithm of the number of ranks."""
    labels = torch.zeros(1, 4, dtype=torch.int64)
    assert _Model(1).compute_language_model_loss(labels, torch.ones(4, 1, 8)).eq(8).all()
    assert _Model(2).compute_language_model_loss(labels, torch.ones(4, 1, 4)).eq(4).all()
    with pytest.raises(ValueError, match=r"^parallel_output, runtime_gather_output: .* the 4 logits .* got 8"):
        _Model(2).compute_language_model_loss(labels, torch.ones(4, 1, 8))


class _Called(MagiModelMixin):
    """A model whose forward and schedule plan are the arguments that Megatron's would get."""

    config = SimpleNamespace(num_moe_experts=None)

    def __init__(self) -> None:
        """Without a model's parts."""


class _Arguments:
    def forward(self, *args: object, **kwargs: object) -> dict:
        return kwargs

    build_schedule_plan = forward


class _Echo(_Called, _Arguments):
    pass


def test_a_mask_of_attention_in_the_call_of_a_model_is_refused() -> None:
    """No layer reads it: a script that makes one for other masks than causal ones would train on another."""
    echo, hybrid, mask = _Echo(), MagiHybridModel.__new__(MagiHybridModel), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for call in (echo.forward, echo.build_schedule_plan):
        assert call("tokens", "positions", None, labels="labels") == {"labels": "labels"}
    for call in (echo.forward, echo.build_schedule_plan, hybrid.forward):
        for args, kwargs in ((("tokens", "positions", mask), {}), (("tokens",), {"attention_mask": mask})):
            with pytest.raises(ValueError, match=r"^attention_mask: .* give None, and say it by --magi-mask"):
                call(*args, **kwargs)


def test_documents_and_padding_of_a_caller_are_not_replaced_without_a_word() -> None:
    echo, batch = _Echo(), SimpleNamespace(params=MagiSeqParams(), padding_mask=torch.zeros(1, 4, dtype=torch.bool))
    bounds = torch.tensor([0, 2, 4], dtype=torch.int32)
    with echo.given(batch):
        for harmless in ({}, {"packed_seq_params": PackedSeqParams(qkv_format="thd")}):
            found = echo.forward("tokens", padding_mask=batch.padding_mask, **harmless)
            assert found["packed_seq_params"] is batch.params
        with pytest.raises(ValueError, match=r"^packed_seq_params: its bounds .* has to return them"):
            echo.forward("tokens", packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds))
        with pytest.raises(ValueError, match=r"^padding_mask: it would have no effect"):
            echo.forward("tokens", padding_mask=batch.padding_mask.clone())
    assert echo.forward(padding_mask=batch.padding_mask) == {"padding_mask": batch.padding_mask}


def test_latent_attention_with_fused_rope_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's kernel for it rotates rows by their places, and no replaced table of angles is asked."""
    monkeypatch.setattr(model, "check_attention", lambda _: None)

    class Holder(MagiModelMixin, nn.Module):
        def __init__(self, fused: bool) -> None:
            nn.Module.__init__(self)
            self.layer = MLASelfAttention.__new__(MLASelfAttention)
            nn.Module.__init__(self.layer)
            self.layer.config = SimpleNamespace(apply_rope_fusion=fused)
            self.layer.rotary_pos_emb = SimpleNamespace(forward=None)

    Holder(False)._take_positions()
    with pytest.raises(ValueError, match=r"^apply_rope_fusion: with multi-latent attention"):
        Holder(True)._take_positions()


def test_a_padding_mask_is_not_shifted_also_when_it_is_a_part_of_the_shard() -> None:
    mask = torch.tensor([[False, False, True]])
    shifted, count = roll_tensor(mask, packed_seq_params=MagiSeqParams(), cp_group=None)
    assert torch.equal(shifted, mask)
    assert count == 1


def test_a_shift_ends_with_the_document_of_the_data_loader_or_else_with_the_sequence() -> None:
    one_rank = dist.ProcessGroup(0, 1)
    shape = AttnShape(2, 2, 8, 8, torch.float32)
    tokens = torch.arange(1, 9).view(1, 8)
    batch = dict.fromkeys(("tokens", "labels", "position_ids"), tokens) | {"loss_mask": torch.ones(1, 8)}
    for more, expected in (
        ({}, [2, 3, 4, 5, 6, 7, 8, 0]),
        ({"cu_seqlens": torch.tensor([[0, 3, 5, 8, 8]])}, [2, 3, 0, 5, 0, 7, 8, 0]),
    ):
        for foreseen in (True, False):
            planner = Planner(MagiConfig(), 0, 1, shape, eod=3, rolls=foreseen)
            params = BatchDispatcher(planner, None).dispatch(batch | more).params
            assert roll_tensor(tokens, packed_seq_params=params, cp_group=one_rank)[0].tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("labels", "count"), [(torch.zeros(1, 6), 4), (None, 3)], ids=["labels", "none"])
def test_multi_token_prediction_counts_the_mask_that_it_is_given(
    dtype: torch.dtype, labels: torch.Tensor | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without labels Megatron makes them of the tokens, and shifts the mask with them."""
    given = {}
    monkeypatch.setattr(mtp.seams, "original", lambda target: lambda **kwargs: given.update(kwargs))
    monkeypatch.setattr(mtp.dist, "all_reduce", lambda x, group: x.mul_(2))  # two ranks with the same rows
    monkeypatch.setattr(mtp, "roll", lambda rows, successors, group: rows.roll(-1))
    layout = ShardLayout(1, 6, torch.arange(6), torch.tensor([True] * 5 + [False]))
    params = MagiSeqParams(plans=SimpleNamespace(successors=lambda device: None), layout=layout)
    config = SimpleNamespace(calculate_per_token_loss=True, mtp_loss_scaling_factor=0.5)
    process_mtp_loss(
        config=config, loss_mask=torch.tensor([[1, 1, 0, 1, 0, 1]]).to(dtype), cp_group=dist.ProcessGroup(0, 2),
        packed_seq_params=params, labels=labels,
    )  # fmt: skip
    assert given["config"].mtp_loss_scaling_factor == 0.5 * count and not given["config"].calculate_per_token_loss
    assert config.mtp_loss_scaling_factor == 0.5 and config.calculate_per_token_loss
    assert given["loss_mask"].dtype == torch.float32 and given["loss_mask"].tolist() == [[2, 2, 0, 2, 0, 2]]


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_token_dispatcher_type": "alltoall",
}


def _completed(options: dict, num_sequences: int, seqlen: int, *, is_given: bool = True, training: bool = True) -> dict:
    """Arguments of a model with experts for a microbatch that two ranks share."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "attention_dropout": 0.0}
    config = TransformerConfig(**sizes, **{**EXPERTS, **options})
    planner = Planner(MagiConfig(dispatch=DispatchConfig(chunk_size=2)), 0, 2, AttnShape(2, 2, 8, 8, torch.float32))
    tokens = torch.arange(num_sequences * seqlen).view(num_sequences, seqlen)
    fields = dict.fromkeys(("tokens", "labels", "position_ids"), tokens) | {"loss_mask": torch.ones(tokens.shape)}
    batch = BatchDispatcher(planner, None).dispatch(fields)
    holder = SimpleNamespace(config=config, _given=batch if is_given else None, training=training)
    return MagiModelMixin._completed(holder, {} if is_given else {"packed_seq_params": batch.params})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor: padding .* of 9 tokens is padded to 12"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type: sinkhorn takes padding"),
        ({"mlp_chunks_for_training": 2}, "mlp_chunks_for_training: "),
        ({"mlp_chunks_for_training": 2, "moe_aux_loss_coeff": 0.0}, ""),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, ""),
    ],
)  # fmt: skip
def test_layers_of_experts_that_would_take_padding_for_tokens_are_refused(options: dict, message: str) -> None:
    """No command line has said before how long microbatches are."""
    assert _completed(options, 1, 8)["padding_mask"] is None
    if not message:
        assert _completed(options, 1, 9)["padding_mask"].shape == (1, 6)
        return
    with pytest.raises(ValueError, match=f"^{message}"):
        _completed(options, 1, 9)


def test_padding_without_its_mask_is_refused_where_there_are_experts() -> None:
    _completed({}, 1, 8, is_given=False)
    with pytest.raises(ValueError, match=r"^padding_mask: none was given"):
        _completed({}, 1, 9, is_given=False)
    _completed({"moe_aux_loss_coeff": 0.0}, 1, 9, is_given=False)


def test_evaluations_count_no_tokens_and_are_refused_only_what_sends_them_elsewhere() -> None:
    of_sequences = {"moe_router_load_balancing_type": "seq_aux_loss"}
    _completed(of_sequences, 2, 9, training=False)
    _completed({"mlp_chunks_for_training": 2}, 1, 9, training=False)
    _completed({}, 1, 9, is_given=False, training=False)
    for options in ({"moe_expert_capacity_factor": 1.0}, {"moe_router_load_balancing_type": "sinkhorn"}):
        with pytest.raises(ValueError, match=r"^moe_.* is padded to 12"):
            _completed(options, 1, 9, training=False)


def test_a_balancing_loss_of_each_sequence_is_refused_for_several() -> None:
    """Sequences are dispatched together: a rank's rows of Megatron's batch are of both."""
    of_sequences = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}
    for coefficients in ([0.0, 0.0], [0.1, 0.0]):
        _completed({**of_sequences, "moe_aux_loss_coeff": coefficients}, 2, 8)
    with pytest.raises(ValueError, match=r"^moe_router_load_balancing_type: seq_aux_loss .* give it one sequence"):
        _completed({**of_sequences, "moe_aux_loss_coeff": [0.1, 0.1]}, 2, 8)


def test_multi_token_prediction_without_a_loss_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loss_mask, cp_group: "):
        process_mtp_loss(config=SimpleNamespace(), packed_seq_params=MagiSeqParams())
