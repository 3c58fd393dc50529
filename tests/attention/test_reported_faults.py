"""Situations in which wrong numbers of other context parallelism were reported; docs/reported_faults.md lists them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.config import CommConfig, DispatchConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import make_plan
from tests.attention import cases as cs
from tests.attention.test_distributed import gather, run_case

LENGTHS = {
    "one_tail": [58],
    "last_token": [7, 3],
    "shorter_than_the_pieces": [9, 8, 8, 12, 8, 12],
    "single_tokens": [1, 29, 1, 2],
}
"""Of documents, none or few of which are multiples of 2 * ranks."""
CONFIG = MagiConfig(dispatch=DispatchConfig(chunk_size=4), comm=CommConfig(impl="reference"))


def run_twice(rank: int, num_ranks: int, todo: list[cs.Case]) -> list[list[dict[str, torch.Tensor]]]:
    """Each case two times, with NaN in the rows of padding."""
    return [[run_case(case, rank, make_plan(case.mask, case.config, num_ranks)) for _ in range(2)] for case in todo]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_documents_of_any_length_are_exact_and_repeat_bit_for_bit_whatever_padding_holds(ranks, num_ranks) -> None:
    todo = [cs.Case(builders.varlen(doc_lengths=lengths), CONFIG) for lengths in LENGTHS.values()]
    results = ranks(num_ranks, run_twice, todo)
    assert any(n % (2 * num_ranks) for lengths in LENGTHS.values() for n in lengths)
    for i, (name, case) in enumerate(zip(LENGTHS, todo, strict=True)):
        document = np.repeat(np.arange(len(LENGTHS[name])), LENGTHS[name])
        visible = np.tril(document[:, None] == document)
        assert np.array_equal(dense_mask(case.mask), visible), name
        first, second = (gather(case, [of_rank[i][turn] for of_rank in results]) for turn in range(2))
        for part, value in cs.dense_attention(case, cs.inputs(case)).items():
            torch.testing.assert_close(
                first[part].double(), value, rtol=cs.EXACT, atol=cs.EXACT, msg=lambda m, w=f"{name} {part}": f"{w}: {m}"
            )
            assert torch.equal(first[part], second[part]), f"{name} {part}"


@pytest.mark.parametrize("dims", [(24, 24), (24, 16), (16, 24)], ids=str)
def test_a_sink_beside_a_window_in_packed_documents_gets_its_own_gradient(ranks, dims) -> None:
    """The first document is short, and the dimension of values is no power of two: the shape of the report, smaller."""
    mask = builders.sliding_window(doc_lengths=[2] + [23] * 8, left=15, right=0)
    shape = {"num_heads_q": 8, "num_heads_kv": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = cs.Case(mask, CONFIG, num_sinks=1, **shape)
    found = gather(case, [of_rank[0][0] for of_rank in ranks(2, run_twice, [case])])
    expected = cs.dense_attention(case, cs.inputs(case))
    assert float(expected["dsink"].abs().min()) > 1e-3, "a sink that is left out would not be seen"
    for part, value in expected.items():
        torch.testing.assert_close(
            found[part].double(), value, rtol=cs.EXACT, atol=cs.EXACT, msg=lambda m, w=part: w + m
        )
