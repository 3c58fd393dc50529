"""Batches of the unmodified Trainer are planned by its data loader's workers, once, and give the same losses."""

import multiprocessing

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from megatron_magi.api import clear_cache, runtime
from megatron_magi.attention import PreparedBatch
from megatron_magi.hf import MagiParallelismConfig, attention
from megatron_magi.hf.parallel import dtype_of_attention
from megatron_magi.hf.planning_collator import PlanAhead, PlannedBatch
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import make_model, packed_batch
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


def dtypes(folder, **options):
    """What workers plan for, and what attention gets."""
    fresh_state()
    planned, got, set_model, attend = set(), set(), PlanAhead.set_model, attention.calc_attn

    def note_ahead(ahead, *args):
        set_model(ahead, *args)
        planned.add(ahead.shape.dtype)

    def note(q, k, v, *args, **kwargs):
        got.update((q.dtype, k.dtype, v.dtype))
        return attend(q, k, v, *args, **kwargs)

    parallel = MagiParallelismConfig(cp_size=2)
    arguments = TrainingArguments(folder, max_steps=1, **QUIET, **options, parallelism_config=parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanAhead, "set_model", note_ahead)
        patch.setattr(attention, "calc_attn", note)
        Trainer(make_model("llama"), arguments, COLLATORS["packed"], samples()).train()
    return planned, got


def on_two_ranks(_rank, _num_ranks, folder):
    in_dtypes = {is_bf16: dtypes(folder, bf16=is_bf16) for is_bf16 in (False, True)}
    multiprocessing.current_process()._config["daemon"] = False  # else loaders could not start workers
    cases = [("packed", 0), ("packed", 2), ("packed", 2, True), ("padded", 0), ("padded", 2)]
    return {"dtypes": in_dtypes, **{case: train(folder, *case) for case in cases}}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("planned")))


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_losses_are_those_without_workers_and_nothing_is_planned_twice(results, kind):
    for found in results:
        in_step, num_plans = found[kind, 0]
        assert num_plans >= 8 and len(in_step) == 7
        for case in [(kind, 2), *([(kind, 2, True)] if kind == "packed" else [])]:
            assert found[case] == (in_step, 0)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_workers_plan_for_the_dtype_that_attention_gets(results, is_bf16):
    expected = torch.bfloat16 if is_bf16 else torch.float32
    for found in results:
        assert found["dtypes"][is_bf16] == ({expected}, {expected})


def test_the_dtype_is_autocasts_then_fsdps_then_that_of_parameters():
    fresh_state()
    try:
        model, accelerator = make_model("llama"), Accelerator(cpu=True, mixed_precision="no")
        assert dtype_of_attention(accelerator, model) == torch.float32
        assert dtype_of_attention(accelerator, model.half()) == torch.float16
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
        assert dtype_of_attention(accelerator, model.float()) == torch.bfloat16
        assert dtype_of_attention(accelerator, model.double()) == torch.float64
        fresh_state()
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        assert dtype_of_attention(accelerator, model.float()) == torch.bfloat16
    finally:
        fresh_state()


def test_the_tables_of_a_batch_that_is_used_twice_are_copied_once(monkeypatch):
    copies, copy = [], PreparedBatch.to
    monkeypatch.setattr(PreparedBatch, "to", lambda self, device: copies.append(device) or copy(self, device))
    ahead = PlanAhead()
    ahead.set_model(make_model("gemma3"), torch.float32, None, 2, 1)
    planned, cpu = ahead.plan(packed_batch()), torch.device("cpu")
    plans = planned.at_hand(cpu)
    ready = [plan.for_rank(1) for plan in plans.values()]
    assert planned.at_hand(cpu) is plans and copies == [cpu]
    assert [plan.for_rank(1) for plan in plans.values()] == ready and len(ready) == 2


def test_a_loop_that_moves_all_of_a_batch_moves_plans_too() -> None:
    planned = PlannedBatch({}, None)
    assert planned.to("cpu", non_blocking=True) is planned
