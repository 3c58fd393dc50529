"""Any mask in training: the same losses on one rank and on several, and those of samples without sharing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi.testing.megatron_launch import LaunchError, RunResult, launch, tiny_gpt_args
from tests.e2e.parity import NUM_ITERATIONS, Case, Runs, assert_same_curve
from tests.e2e.test_loss_parity import MICRO_BATCH_2, ODD_LENGTH

GUIDE = Path(megatron_magi.__file__).parents[1] / "docs/megatron.md"
MASKS = "tests.e2e.masks"
MAGI = ("--attention-backend", "magi")
VIDEO = ("--magi-mask", "block_causal:block_size=16")


def _on_one_rank(runs: Runs, *model: str) -> RunResult:
    return runs.magi(Case(model, MAGI, num_ranks=1, cp_size=1))


def test_video_in_documents_trains_alike_on_one_rank_and_on_two_with_masks_of_layers_too(runs: Runs) -> None:
    layers = ("--magi-layer-masks", f"{MASKS}:windows_on_even_layers")
    video, mixed = _on_one_rank(runs, *VIDEO), _on_one_rank(runs, *VIDEO, *layers)
    assert_same_curve(runs.magi(Case(VIDEO)), video)
    assert_same_curve(runs.magi(Case((*VIDEO, *layers))), mixed)
    assert len({run.losses[1] for run in (video, mixed, runs.stock(Case()))}) == 3


def test_prefix_lm_of_two_odd_sequences_trains_alike_on_one_rank_and_on_three(runs: Runs) -> None:
    model = (*ODD_LENGTH, *MICRO_BATCH_2)
    mask = ("--magi-mask", f"{MASKS}:prefix_of_first_byte:most=40")
    one = _on_one_rank(runs, *model, *mask)
    assert_same_curve(runs.magi(Case((*model, *mask), num_ranks=3, cp_size=3)), one)
    assert one.losses[1] != runs.stock(Case(model)).losses[1]


@pytest.mark.parametrize("mtp_num_layers", [0, 2])
def test_tree_of_eight_samples_trains_as_the_samples_by_themselves(tmp_path: Path, mtp_num_layers: int) -> None:
    """The example of docs/megatron.md. Each iteration has two trees, or 16 sequences of stock Megatron."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "SharedPrompts" in b)
    script = tmp_path / "shared_prompts.py"
    call = "make_prefix_tree([torch.cat([prompt, answer]) for answer in answers]"
    assert call in block
    script.write_text(block.replace(call, f"{call}, num_ahead={mtp_num_layers}"))
    # Megatron weighs the losses of depths by the tokens of a microbatch: here it is a tree, there its samples.
    weight = ("--mtp-loss-scaling-factor", "1.0")
    mtp = ("--mtp-num-layers", str(mtp_num_layers), *weight) if mtp_num_layers else ()

    def train(script: Path, cp_size: int, global_batch_size: int, *extra: str) -> RunResult:
        options = ["--calculate-per-token-loss", "--no-create-attention-mask-in-dataloader", *mtp, *extra]
        sizes = {"global_batch_size": global_batch_size, "context_parallel_size": cp_size}
        args = tiny_gpt_args("mock", *options, train_iters=NUM_ITERATIONS, **sizes)
        unused = ("--mock-data", "--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
        args = [a for a in args if a not in unused]
        return launch(args, cp_size, script=str(script), workdir=tmp_path / f"run{cp_size}_{global_batch_size}")

    expected = train(
        Path(__file__).with_name("separate_prompts.py"), 1, 16, *(("--micro-batch-size", "8") if mtp else ())
    )
    tree = ("--magi-mask", "prefix_tree", *MAGI)
    assert_same_curve(train(script, 1, 2, *tree), expected)
    assert_same_curve(train(script, 2, 2, *tree), expected)


def test_mask_that_fails_on_one_rank_ends_all_with_its_message(runs: Runs) -> None:
    mask = ("--magi-mask", f"{MASKS}:fails_on_the_last_rank")
    with pytest.raises(LaunchError) as error:
        launch(tiny_gpt_args(runs.corpus, *mask, context_parallel_size=2), 2, grace_s=300)
    assert sorted(error.value.failed) == [0, 1]
    for output in error.value.outputs:
        assert re.search(r"Error: magi_mask: '.*:fails_on_the_last_rank' raised KeyError: 'frames'", output)
    assert "on 1 of 2 ranks, first on global rank 1" in error.value.outputs[0]
