"""Batches of the unmodified Trainer are planned by its data loader's workers, once, and give the same losses."""

import multiprocessing

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from megatron_magi.api import clear_cache, runtime
from megatron_magi.hf import MagiParallelismConfig
from megatron_magi.hf.planning_collator import PlannedBatch
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import make_model
from tests.hf.test_loaders import QUIET
from tests.hf.test_trainer import fresh_state, samples

pytestmark = pytest.mark.ranks(2)


def padded(features):
    """A collator of a user's, as that of TRL's trainer: padded, with a mask."""
    longest = max(len(feature["input_ids"]) for feature in features)
    tokens = torch.zeros(len(features), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, feature in enumerate(features):
        n = len(feature["input_ids"])
        tokens[i, :n], mask[i, :n] = torch.tensor(feature["input_ids"]), 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


COLLATORS = {"packed": DataCollatorWithFlattening(return_flash_attn_kwargs=True), "padded": padded}


def train(folder, kind, num_workers, persistent=False):
    """Losses of training and evaluation, and how many plans the training process has made."""
    fresh_state()
    made, make = [], runtime.make_plan

    def noted(mask, *args):
        made.append(mask)
        return make(mask, *args)

    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, per_device_eval_batch_size=2, save_strategy="no",
        dataloader_num_workers=num_workers, dataloader_persistent_workers=persistent,
        **{**QUIET, "learning_rate": 1e-2}, parallelism_config=MagiParallelismConfig(cp_size=2),
    )  # fmt: skip
    trainer = Trainer(make_model("gemma3"), arguments, COLLATORS[kind], samples(), samples()[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "make_plan", noted)
        clear_cache()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append(trainer.evaluate()["eval_loss"])
    return losses, len(made)


def on_two_ranks(_rank, _num_ranks, folder):
    multiprocessing.current_process()._config["daemon"] = False  # else loaders could not start workers
    cases = [("packed", 0), ("packed", 2), ("packed", 2, True), ("padded", 0), ("padded", 2)]
    return {case: train(folder, *case) for case in cases}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("planned")), timeout_s=180.0)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_losses_are_those_without_workers_and_nothing_is_planned_twice(results, kind):
    for found in results:
        in_step, num_plans = found[kind, 0]
        assert num_plans >= 8 and len(in_step) == 7
        for case in [(kind, 2), *([(kind, 2, True)] if kind == "packed" else [])]:
            assert found[case] == (in_step, 0)


def test_a_loop_that_moves_all_of_a_batch_moves_plans_too() -> None:
    planned = PlannedBatch({}, None, 0)
    assert planned.to("cpu", non_blocking=True) is planned
