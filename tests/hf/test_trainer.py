"""The unmodified Trainer and Accelerator on two ranks: the losses and parameters of one."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from megatron_magi.hf import MagiParallelismConfig
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import make_model, packed_batch

pytestmark = pytest.mark.ranks(2)

LENGTHS = [9, 14, 22, 5, 17, 11, 8, 20]
NUM_EVALUATED = 3
"""The last batch is not full, and counts less in the mean."""


def samples():
    return [{"input_ids": packed_batch((n,), seed=n)["input_ids"][0].tolist()} for n in LENGTHS]


def fresh_state():
    """accelerate keeps what it knows of the process for good, and wants an address although there is a group."""
    if "RANK" in os.environ:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(folder, cp_size, accumulate):
    """Losses of each step and of the evaluation, and the parameters in the end."""
    fresh_state()
    model = make_model("gemma3")
    data = {"train_dataset": samples(), "eval_dataset": samples()[:NUM_EVALUATED]}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    sizes["gradient_accumulation_steps"] = accumulate
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "steps", "logging_steps": 1}
    parallel = {} if cp_size == 1 else {"parallelism_config": MagiParallelismConfig(cp_size=cp_size)}
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        seed=3,
        max_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="no",
        **sizes,
        **quiet,
        **parallel,
    )
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    # One that evaluates alone: a Trainer of transformers leaves DDP out if it trains after that.
    first = Trainer(make_model("gemma3"), arguments, collator, **data)
    history = [first.evaluate()["eval_loss"]]
    if cp_size > 1:
        with pytest.raises(ValueError, match="evaluated it before training"):
            first.train()
    trainer = Trainer(model, arguments, collator, **data)
    trainer.train()
    history += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    history.append(trainer.evaluate()["eval_loss"])
    return history, {name: p.detach().clone() for name, p in model.named_parameters()}


def evaluate(_rank, num_ranks, folder, cp_size):
    """Losses and metrics of batches of two, the last of one, with two data-parallel ranks: packed, and padded."""
    fresh_state()
    parallel = {}
    if cp_size > 1:
        parallel["parallelism_config"] = MagiParallelismConfig(cp_size=cp_size, dp_shard_size=num_ranks // cp_size)
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_eval_batch_size=2, report_to=[], disable_tqdm=True, **parallel
    )
    trainer = Trainer(make_model("gemma3"), arguments, DataCollatorWithFlattening(), eval_dataset=samples()[:7])
    packed = trainer.evaluate()
    metrics = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, _labels: logits.argmax(-1)}
    rows = Trainer(make_model("llama"), arguments, padded, eval_dataset=samples()[:7], **metrics).evaluate()
    return [packed["eval_loss"], *(rows[f"eval_{name}"] for name in ("loss", "accuracy", "count"))]


def padded(features):
    """A collator: rows of one length."""
    tokens = [torch.tensor(x["input_ids"]) for x in features]
    ids, labels = (torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=n) for n in (0, -100))
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).to(torch.int64)}


def accuracy(evaluated):
    """Of predicted tokens, and how many there are."""
    is_right = (evaluated.predictions[:, :-1] == evaluated.label_ids[:, 1:])[evaluated.label_ids[:, 1:] >= 0]
    return {"accuracy": is_right.mean().item(), "count": len(is_right)}


def predict(folder, cp_size):
    """Logits and labels, and metrics of predicted tokens, for batches that are padded and not all full."""
    fresh_state()
    parallel = {} if cp_size == 1 else {"parallelism_config": MagiParallelismConfig(cp_size=cp_size)}
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_eval_batch_size=2, report_to=[], disable_tqdm=True, **parallel
    )
    predicted = Trainer(make_model("llama"), arguments, padded).predict(samples()[:5])
    metrics = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, _labels: logits.argmax(-1)}
    evaluated = Trainer(make_model("llama"), arguments, padded, eval_dataset=samples()[:5], **metrics).evaluate()
    logits = predicted.predictions[
        predicted.label_ids >= 0
    ]  # of padding they are whatever the padded length makes them
    return logits, predicted.label_ids, evaluated["eval_accuracy"], evaluated["eval_count"]


def step_of(accelerator, name):
    """A step of a model on all ranks, compared with one on this rank: differences of the loss and of the gradients."""
    expected = make_model(name)
    batch = packed_batch()
    expected_loss = expected(**batch).loss
    expected_loss.backward()
    model = make_model(name)
    wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = wrapped(**batch).loss
    accelerator.backward(loss)
    grads = {name.removeprefix("module."): p.grad for name, p in wrapped.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    differences = [(whole[name] - p.grad).abs().max().item() for name, p in expected.named_parameters()]
    return abs(loss.item() - expected_loss.item()), max(differences)


def in_a_loop_of_accelerate():
    """A step of DDP."""
    fresh_state()
    accelerator = Accelerator(cpu=True, parallelism_config=MagiParallelismConfig(cp_size=2))
    assert accelerator.torch_device_mesh["dp_cp"].size() == 2, "the ranks over which losses are averaged"
    return step_of(accelerator, "mistral")


def beside_fsdp2():
    """The same with accelerate's FSDP2, which it keeps for GPUs: it is told to use it here."""
    fresh_state()
    accelerator = Accelerator(cpu=True, parallelism_config=MagiParallelismConfig(cp_size=2))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    return step_of(accelerator, "gpt_oss")


def learning_rates(_rank, num_ranks, cp_size):
    """After each batch of a loop of accelerate with two batches in each training step."""
    fresh_state()
    parallel = MagiParallelismConfig(cp_size=cp_size, dp_shard_size=num_ranks // cp_size)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=parallel)
    optimizer = torch.optim.SGD(make_model("llama").parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=2)
    optimizer, scheduler, one_cycle = accelerator.prepare(optimizer, scheduler, one_cycle)
    model, found = torch.nn.Linear(1, 1), []
    for _ in range(6):
        with accelerator.accumulate(model):
            optimizer.step()
            scheduler.step()
            one_cycle.step()
            found.append(scheduler.get_last_lr()[0])
    return found


def gathered():
    """What metrics are made from, of a batch that both ranks read."""
    fresh_state()
    gather = Accelerator(cpu=True, parallelism_config=MagiParallelismConfig(cp_size=2)).gather_for_metrics
    numbers = torch.tensor([1.0, 2.0])
    return gather(numbers).tolist(), gather(["a", "b"]), [x.item() for x in gather(numbers, use_gather_object=True)]


def wrong_size():
    fresh_state()
    with pytest.raises(ValueError, match="cp_size: all sizes together are 4 ranks, there are 2"):
        MagiParallelismConfig(cp_size=4)._validate_accelerator(Accelerator(cpu=True))
    with pytest.raises(ValueError, match=r"cp_size: .* there are 1; on CPUs pass cpu=True"):
        MagiParallelismConfig(cp_size=2)._validate_accelerator(SimpleNamespace(num_processes=1))
    deepspeed = SimpleNamespace(num_processes=2, distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match=r"parallelism_config: .* not with DeepSpeed"):
        MagiParallelismConfig(cp_size=2)._validate_accelerator(deepspeed)


def own_losses(folder):
    """Evaluations whose loss the Trainer makes of logits."""
    for own in ({"label_smoothing_factor": 0.1}, {}):
        fresh_state()
        parallel = MagiParallelismConfig(cp_size=2)
        arguments = TrainingArguments(
            folder, use_cpu=True, report_to=[], disable_tqdm=True, parallelism_config=parallel, **own
        )
        loss = {} if own else {"compute_loss_func": lambda outputs, _labels, **_: outputs.logits.sum()}
        trainer = Trainer(make_model("llama"), arguments, padded, eval_dataset=samples()[:2], **loss)
        with pytest.raises(ValueError, match=r"^labels: none .* label_smoothing_factor and compute_loss_func"):
            trainer.evaluate()


def on_two_ranks(rank, _num_ranks, folder):
    out = {accumulate: train(f"{folder}/{rank}", 2, accumulate) for accumulate in (1, 2)}
    out["ddp"] = in_a_loop_of_accelerate()
    out["fsdp2"] = beside_fsdp2()
    out["gathered"] = gathered()
    out["predicted"] = predict(folder, 2)
    wrong_size()
    own_losses(folder)
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("trainer"))
    try:
        one_rank = {accumulate: train(folder, 1, accumulate) for accumulate in (1, 2)}
        one_rank["predicted"] = predict(folder, 1)
    finally:
        fresh_state()
    return run_ranks(on_two_ranks, 2, folder), one_rank


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_on_two_ranks_trains_as_on_one(results, accumulate):
    two_ranks, one_rank = results
    history, parameters = one_rank[accumulate]
    assert len(history) == 4
    for other_history, other_parameters in (result[accumulate] for result in two_ranks):
        assert other_history == pytest.approx(history, abs=1e-5)
        for name, parameter in parameters.items():
            assert torch.allclose(other_parameters[name], parameter, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_loop_of_accelerate_on_two_ranks_trains_as_on_one(results, wrapper):
    for loss, gradient in (result[wrapper] for result in results[0]):
        assert loss < 1e-5
        assert gradient < 1e-5


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_ranks, cp_size", [(2, 2), (2, 1), (4, 2)])
def test_learning_rates_go_on_by_batches_and_not_by_ranks(num_ranks, cp_size):
    steps = num_ranks // cp_size  # of accelerate for a training step: one for each batch
    expected = [1 / (1 + steps * (batches // 2)) for batches in range(1, 7)]
    assert run_ranks(learning_rates, num_ranks, cp_size) == [pytest.approx(expected)] * num_ranks


def test_metrics_count_a_batch_that_two_ranks_read_once(results):
    for result in results[0]:
        assert result["gathered"] == ([1.0, 2.0], ["a", "b"], [1.0, 2.0])


def test_predictions_and_metrics_are_those_of_whole_sequences(results):
    two_ranks, one_rank = results
    logits, labels, accuracy, count = one_rank["predicted"]
    assert count == (labels[:, 1:] >= 0).sum()
    for other_logits, other_labels, other_accuracy, other_count in (result["predicted"] for result in two_ranks):
        assert np.abs(other_logits - logits).max() < 1e-4 and (other_labels == labels).all()
        assert (other_accuracy, other_count) == (accuracy, count)


@pytest.mark.ranks(4)
def test_evaluation_beside_data_parallelism_is_that_of_data_parallelism_alone(tmp_path):
    alone = run_ranks(evaluate, 2, str(tmp_path), 1)
    beside = run_ranks(evaluate, 4, str(tmp_path), 2)
    assert np.array(beside) == pytest.approx(np.array(alone * 2), abs=1e-5)
