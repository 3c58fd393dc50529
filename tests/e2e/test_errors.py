"""What cannot work ends at once, with a message that names the argument or the rank."""

from __future__ import annotations

import re

import pytest

from megatron_magi.testing.megatron_launch import LaunchError, launch, tiny_gpt_args
from tests.e2e.parity import Runs


def test_ranks_with_different_data_abort_naming_the_rank(runs: Runs) -> None:
    args = tiny_gpt_args(runs.corpus, context_parallel_size=3)
    with pytest.raises(LaunchError, match="rank 2 of the group") as error:
        launch(args, 3, before="tests.e2e.hooks:different_data")
    assert "RuntimeError: tokens and plan of a microbatch: ranks disagree" in str(error.value)


def test_other_tokens_with_the_same_plan_are_told_by_all_ranks_of_tensor_parallelism_too(runs: Runs) -> None:
    args = tiny_gpt_args(runs.corpus, "--tensor-model-parallel-size", "2", context_parallel_size=2)
    args.remove("--reset-attention-mask")
    with pytest.raises(LaunchError) as error:
        launch(args, 4, before="tests.e2e.hooks:different_data", grace_s=300)
    assert sorted(error.value.failed) == [0, 1, 2, 3]
    for output in error.value.outputs:
        assert re.search(r"ranks disagree: rank 3 of the group \(global rank 3\) has", output)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--attention-dropout", "0.1"], "ValueError: attention_dropout"),
        (["--num-attention-heads", "5", "--tensor-model-parallel-size", "2"], "ValueError: num_attention_heads"),
        (["--cuda-graph-impl", "local"], "ValueError: cuda_graph_modules"),
    ],
    ids=["attention_dropout", "heads", "cuda_graphs"],
)
def test_command_line_is_refused(extra: list[str], message: str, runs: Runs) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(tiny_gpt_args(runs.corpus, *extra, context_parallel_size=2), 2)
