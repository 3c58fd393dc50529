"""What the model refuses, and how multi-token prediction shifts what it is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_magi.mcore.carrier import MagiSeqParams
from megatron_magi.mcore.model import MagiModelMixin
from megatron_magi.mcore.mtp import process_mtp_loss, roll_tensor


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


def test_a_padding_mask_is_not_shifted_also_when_it_is_a_part_of_the_shard() -> None:
    mask = torch.tensor([[False, False, True]])
    shifted, count = roll_tensor(mask, packed_seq_params=MagiSeqParams(), cp_group=None)
    assert torch.equal(shifted, mask)
    assert count == 1


def test_multi_token_prediction_without_a_loss_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loss_mask, cp_group: "):
        process_mtp_loss(config=SimpleNamespace(), packed_seq_params=MagiSeqParams())
