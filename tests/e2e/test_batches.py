"""Other ways in which batches come and results go."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import launch, tiny_gpt_args
from tests.e2e.parity import LOSS_TOLERANCE, NUM_ITERATIONS, Case, Runs, assert_same_curve, write_corpus


def test_documents_from_the_data_loader_equal_documents_from_eod(runs: Runs) -> None:
    expected = runs.stock(Case())
    got = runs.magi(Case(parallel=("--dataloader-inter-document-masking",), without=("--reset-attention-mask",)))
    assert_same_curve(got, expected)


def test_magi_on_one_rank_equals_stock(runs: Runs) -> None:
    case = Case(parallel=("--attention-backend=magi",), num_ranks=1, cp_size=1)
    run = runs.magi(case)
    assert_same_curve(run, runs.stock(case))
    assert "> attention by megatron_magi: " in run.outputs[0] and "> attention by" not in runs.stock(case).outputs[0]


def test_evaluation_loss_is_that_of_stock(runs: Runs) -> None:
    case = Case(("--eval-iters", "2", "--split", "80,20,0", "--eval-interval", "5"))
    losses = []
    for run in (runs.stock(case), runs.magi(case)):
        lines = [line for line in run.stdout.splitlines() if "validation loss at iteration 5" in line]
        losses.append(float(lines[0].split("lm loss value:")[1].split("|")[0]))
    assert abs(losses[1] - losses[0]) <= LOSS_TOLERANCE * losses[0]


@pytest.mark.parametrize("mode", [(), ("--skip-train",)], ids=["training", "evaluation_only"])
def test_each_validation_set_has_the_loss_of_stock(mode: tuple[str, ...], runs: Runs, tmp_path: Path) -> None:
    sets = [str(write_corpus(tmp_path, num_tokens)) for num_tokens in (1500, 1000)]
    data = ("--train-data-path", str(runs.corpus), "--valid-data-path", *sets)
    model = (*data, "--full-validation", "--multiple-validation-sets", "--eval-interval", "1", *mode)
    found = []
    for size, workers in ((1, ()), (2, ()), (2, ("--num-workers", "2"))):
        args = tiny_gpt_args("mock", *model, *workers, train_iters=2, global_batch_size=1, context_parallel_size=size)
        run = launch([a for a in args if a != "--mock-data"], size)
        lines = re.findall(r"(validation-\d loss at .*?) \| lm loss value: (\S+)", run.stdout)
        found.append([(line, float(loss)) for line, loss in lines])
    expected, *others = found
    assert len(expected) == (2 if mode else 6) and len({loss for _, loss in expected}) >= 2
    for got in others:
        assert [line for line, _ in got] == [line for line, _ in expected]
        assert [loss for _, loss in got] == pytest.approx([loss for _, loss in expected], rel=LOSS_TOLERANCE)


def test_largest_logit_over_all_ranks_is_reported_and_clipped(runs: Runs) -> None:
    clip = ("--bf16", "--qk-clip", "--qk-clip-threshold", "0.1")
    # One microbatch for the four of two ranks: the largest is that of all of them.
    whole = ("--attention-backend", "magi", "--micro-batch-size", "4")
    one = runs.magi(Case(parallel=(*clip, *whole), num_ranks=1, cp_size=1))
    two = runs.magi(Case(parallel=clip))
    free = runs.magi(Case(parallel=("--bf16", "--log-max-attention-logit")))
    of_one, of_two, unclipped = ([r["max_attention_logit"] for r in run.records] for run in (one, two, free))
    assert len(of_two) == NUM_ITERATIONS
    assert of_two == pytest.approx(of_one, rel=0.02)
    assert unclipped[0] == of_two[0] > 0.1
    assert unclipped[-1] > of_two[-1]


def test_loss_log_has_unrounded_losses_and_figures_of_the_plans(runs: Runs) -> None:
    got = runs.magi(Case(), "--log-interval", "1")
    printed = [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", got.stdout)]
    logged = [record["lm loss"] for record in got.records]
    # What Megatron prints second is the mean of the first two.
    assert [logged[0], *logged[2:]] == pytest.approx([printed[0], *printed[2:]], rel=1e-6)
    for record in got.records:
        assert record["num_plans"] == 4
        assert 2 * max(record["areas"]) / sum(record["areas"]) <= record["balance"] <= 2  # that of the worst plan
        assert record["received_rows"] == record["lower_bound_rows"] > 0
        assert len(record["areas"]) == 2


def test_other_backends_train_as_megatron_trains_them(runs: Runs) -> None:
    model = ("--num-layers", "4")
    parallel = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    interleaved = ("--num-layers-per-virtual-pipeline-stage", "1")
    # Stages in the middle get no mask from Megatron, so documents cannot confine there.
    without = ("--reset-attention-mask",)
    case = Case(model, (*parallel, *interleaved), num_ranks=4, cp_size=1, without=without, same_weights=True)
    assert_same_curve(runs.magi(case), runs.stock(case))


def test_operations_are_counted_over_documents_and_without_padding(runs: Runs) -> None:
    model = ("--num-layers", "4", "--seq-length", "125", "--max-position-embeddings", "125")
    pipeline = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
    counted = []
    for case in (Case(model), Case(model, pipeline, num_ranks=4)):
        case = replace(case, before="tests.e2e.hooks:count_operations")
        lines = (runs.magi(case).workdir / "operations.jsonl").read_text().splitlines()
        counted.append([tuple(json.loads(line)) for line in lines])
    assert counted[0] == counted[1]
    assert len(counted[0]) == NUM_ITERATIONS
    for num_tokens, squares in counted[0]:
        assert num_tokens == 4 * 125
        assert 4 * 125 < squares < 4 * 125**2


def test_other_backends_distill_as_megatron_does(runs: Runs) -> None:
    options = ("--logits-load-dir", "teacher", "--logits-load-kd-loss-alpha", "0.25")
    case = Case(parallel=options, num_ranks=1, cp_size=1, before="tests.e2e.hooks:teacher_without_files")
    plain, got = runs.stock(Case()), runs.magi(case)
    for record in got.records:
        parts = 0.75 * record["lm loss"] + 0.25 * record["logits distillation loss"]
        assert record["total loss"] == pytest.approx(parts, rel=1e-6)
    assert got.losses[1] == plain.losses[1]
    assert got.losses[NUM_ITERATIONS] != plain.losses[NUM_ITERATIONS]


def test_skipped_iterations_are_skipped_on_every_rank(runs: Runs) -> None:
    skip = ("--seq-length", "125", "--max-position-embeddings", "125", "--iterations-to-skip", "2")
    case = Case(skip, ("--tensor-model-parallel-size", "2"), num_ranks=4)
    expected, got = runs.stock(case), runs.magi(case)
    assert list(got.losses) == list(expected.losses) == [1, *range(3, NUM_ITERATIONS + 1)]
    for iteration, loss in expected.losses.items():
        assert abs(got.losses[iteration] - loss) <= LOSS_TOLERANCE * loss


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", ["sequences", "packed"])
def test_fused_rope_of_several_sequences_equals_stock_without_the_fusion(way: str, num_ranks: int, runs: Runs) -> None:
    """The kernel takes a shard of two sequences for rows of one; where they are packed, documents restart positions."""
    model = ("--micro-batch-size", "2", "--rotary-percent", "0.5")
    packed = ("--dataloader-inter-document-masking",) if way == "packed" else ()
    without = ("--reset-attention-mask",) if packed else ()
    options = (*packed, "--attention-backend", "magi")
    # Stock's layers without Transformer Engine take no bounds of documents.
    expected = runs.magi(Case(model, options, 1, 1, without=without)) if packed else runs.stock(Case(model))
    fused = Case(model, options, num_ranks, num_ranks, (*without, "--no-rope-fusion"), "tests.e2e.hooks:fused_rope")
    assert_same_curve(runs.magi(fused), expected)
