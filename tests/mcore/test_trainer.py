"""What Megatron's schedules are told where batches are dispatched."""

from __future__ import annotations

from typing import Any

from megatron_magi.mcore.trainer import _with_length


def test_stages_exchange_tensors_of_the_padded_length_with_decoder_seq_length_too() -> None:
    def schedule(**given: Any) -> dict[str, Any]:
        return given

    given = _with_length(schedule, 126)(seq_length=125, decoder_seq_length=125, micro_batch_size=2)
    assert given.pop("decoder_seq_length", None) is None
    assert given == {"seq_length": 126, "micro_batch_size": 2}
