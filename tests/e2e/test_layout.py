"""`--magi-layout`: the loss curve does not depend on where tokens lie."""

from __future__ import annotations

import pytest

from tests.e2e.parity import Case, Runs, assert_same_curve

ODD_LENGTH = ("--seq-length", "125", "--max-position-embeddings", "125")
TWO_SEQUENCES = ("--micro-batch-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def case(layout: str, *model: str, parallel: tuple[str, ...] = (), **kwargs: object) -> Case:
    return Case(model, ("--magi-layout", layout, *parallel), **kwargs)


CASES = {
    "planned": case("planned"),
    "zigzag": case("zigzag"),
    "contiguous": case("contiguous"),
    "zigzag_cp4_two_sequences_of_odd_length": case("zigzag", *TWO_SEQUENCES, *ODD_LENGTH, num_ranks=4, cp_size=4),
    "contiguous_two_sequences_tp2_sp": case(
        "contiguous", *TWO_SEQUENCES, *ODD_LENGTH, parallel=TENSOR, num_ranks=4, same_weights=True
    ),
    "contiguous_multi_token_prediction": case("contiguous", "--mtp-num-layers", "1"),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_curve_equals_stock_on_one_rank(name: str, runs: Runs) -> None:
    assert_same_curve(runs.magi(CASES[name]), runs.stock(CASES[name]))
