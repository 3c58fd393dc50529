"""Data loaders of accelerate and the Trainer under context parallelism: ranks of one sequence read the same batches."""

import functools
import multiprocessing
import random
from itertools import chain

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

import accelerate.data_loader
from accelerate import Accelerator, DataLoaderConfiguration
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import seed_worker

from megatron_magi.hf import MagiParallelismConfig
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import VOCABULARY, make_model
from tests.hf.test_trainer import fresh_state

pytestmark = pytest.mark.ranks(2)

NUM_SAMPLES, SEQLEN = 10, 24
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 0.0, "seed": 3}


def samples():
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, SEQLEN), generator=draw)
    return [{"input_ids": x, "labels": x} for x in tokens]


class Stream(torch.utils.data.IterableDataset):
    """Counts the samples that are read."""

    num_reads = 0

    def __iter__(self):
        for sample in samples():
            Stream.num_reads += 1
            yield sample


def fill_in_the_middle(features):
    """A collator that draws."""
    rows = []
    for feature in features:
        x = feature["input_ids"]
        a, b = sorted(random.sample(range(1, len(x)), 2))
        rows.append(torch.cat([x[:a], x[b:], x[a:b]])[torch.randperm(len(x))])
    return {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}


def trainer_of(folder, cp_size, data, collator=None, **options):
    fresh_state()
    parallel = {} if cp_size == 1 else {"parallelism_config": MagiParallelismConfig(cp_size=cp_size)}
    options = {"save_strategy": "no", "max_steps": 3, "per_device_train_batch_size": 2, **options}
    arguments = TrainingArguments(folder, per_device_eval_batch_size=2, **QUIET, **options, **parallel)
    return Trainer(make_model("llama"), arguments, collator, train_dataset=data, eval_dataset=data)


def losses(trainer, **options):
    trainer.train(**options)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def streams(folder, cp_size):
    """Losses of streams: of training, of training that is resumed, of evaluation, and predictions."""
    found = {"trained": losses(trainer_of(folder, cp_size, Stream()))}
    for batches, options in {
        "dispatched": {"dispatch_batches": True, "use_seedable_sampler": True},
        "split": {"split_batches": True},
        "read by all": {"dispatch_batches": False},
    }.items():
        data = samples() if batches == "dispatched" else Stream()
        found[batches] = losses(trainer_of(folder, cp_size, data, accelerator_config=options))
    trainer_of(f"{folder}/saved", cp_size, Stream(), save_strategy="steps", save_steps=2, max_steps=2).train()
    resumed = trainer_of(f"{folder}/saved", cp_size, Stream())
    found["resumed"] = losses(resumed, resume_from_checkpoint=True)
    metrics = trainer_of(folder, cp_size, Stream())
    found["evaluated"] = metrics.evaluate()["eval_loss"]
    predicted = metrics.predict(Stream())
    found["predicted"] = predicted.predictions.sum(-1).tolist(), predicted.label_ids.tolist()
    return found


def drawn(folder, cp_size):
    """Losses of batches whose collator draws in workers, in two epochs, and evaluated."""
    options = {"dataloader_num_workers": 1, "max_steps": 7}
    trainer = trainer_of(folder, cp_size, samples(), fill_in_the_middle, **options)
    found = losses(trainer)
    return [*found, trainer.evaluate()["eval_loss"]]


def in_a_loop(shuffle_by):
    """Batches of a loader that an accelerator prepares in a loop of one's own, where ranks are seeded differently."""
    fresh_state()
    torch.manual_seed(torch.distributed.get_rank())
    configuration = DataLoaderConfiguration(use_seedable_sampler=shuffle_by == "seedable", data_seed=4)
    accelerator = Accelerator(
        cpu=True, dataloader_config=configuration, parallelism_config=MagiParallelismConfig(cp_size=2)
    )
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(40), batch_size=4, shuffle=True))
    return [batch.tolist() for _ in range(2) for batch in loader]


def on_two_ranks(rank, _num_ranks, folder):
    multiprocessing.current_process()._config["daemon"] = False  # else loaders could not start workers
    before = Stream.num_reads
    found = {"streams": streams(folder, 2)}
    found["reads"] = Stream.num_reads - before
    found["drawn"] = drawn(folder, 2)
    found["in a loop"] = {kind: in_a_loop(kind) for kind in ("seedable", "not")}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("loaders"))
    try:
        one_rank = {"streams": streams(f"{folder}/one", 1), "drawn": drawn(f"{folder}/one", 1)}
    finally:
        fresh_state()
    return run_ranks(on_two_ranks, 2, folder), one_rank


@pytest.mark.parametrize("kind", ["trained", "dispatched", "split", "read by all", "resumed", "evaluated"])
def test_streams_have_the_losses_of_one_rank(results, kind):
    two_ranks, one_rank = results
    for result in two_ranks:
        assert result["streams"][kind] == pytest.approx(one_rank["streams"][kind], abs=1e-4)


def test_predictions_of_a_stream_are_those_of_one_rank(results):
    two_ranks, one_rank = results
    expected, labels = one_rank["streams"]["predicted"]
    assert len(labels) == NUM_SAMPLES
    for result in two_ranks:
        found, of_labels = result["streams"]["predicted"]
        assert of_labels == labels
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_rank_0_alone_reads_a_stream_that_is_dispatched(results):
    first, second = (result["reads"] for result in results[0])
    assert first > second


def test_workers_draw_alike_and_as_on_one_rank(results):
    two_ranks, one_rank = results
    assert len({round(x, 3) for x in one_rank["drawn"]}) == len(one_rank["drawn"])
    for result in two_ranks:
        assert result["drawn"] == pytest.approx(one_rank["drawn"], abs=1e-4)


@pytest.mark.parametrize("kind", ["seedable", "not"])
def test_ranks_that_are_seeded_differently_shuffle_alike(results, kind):
    one, other = (result["in a loop"][kind] for result in results[0])
    assert one == other and sorted(chain(*one[:10])) == list(range(40)) and one[:10] != one[10:]


def batches_of_four_ranks(rank, _num_ranks):
    """By data-parallel rank: batches of a stream and of its rest, workers' seeds, a sampler that knows of ranks."""
    fresh_state()
    parallel = MagiParallelismConfig(cp_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=parallel)
    numbers = torch.utils.data.DataLoader(NumberStream(), batch_size=3)
    stream = accelerator.prepare(numbers)
    read = [batch.tolist() for batch in stream]
    rest = [batch.tolist() for batch in accelerator.skip_first_batches(stream, 1)]
    of_last = []
    for batch in stream:
        last = accelerator.gather_for_metrics(batch)
        of_last.append(last.tolist())
    seed = functools.partial(seed_worker, num_workers=1, rank=rank)
    seeded = accelerator.prepare(torch.utils.data.DataLoader(range(8), num_workers=1, worker_init_fn=seed))
    sampler = BatchRebalanceSampler(list(range(1, 17)), 8, dp_size=4, grad_accum=1, rank=rank)
    accelerator.prepare(torch.utils.data.DataLoader(range(16), batch_sampler=sampler))
    balanced = sampler.dp_size, sampler.rank, sampler.effective_batch_size, list(sampler)
    return read, rest, of_last, seeded.worker_init_fn.keywords["rank"], balanced


class NumberStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(14))


@pytest.mark.ranks(4)
def test_beside_data_parallelism_batches_are_those_of_data_parallel_ranks():
    found = run_ranks(batches_of_four_ranks, 4)
    assert found[0] == found[1] and found[2] == found[3]
    for index, (read, rest, gathered, seed, balanced) in enumerate(found[::2]):
        # 14 samples in batches of 3 for two: the last ones are completed by the first.
        assert read[:2] == [[3 * index, 3 * index + 1, 3 * index + 2], [6 + 3 * index, 7 + 3 * index, 8 + 3 * index]]
        assert rest == read[1:]
        assert list(chain(*gathered)) == list(range(14))
        assert seed == index
        assert balanced[:3] == (2, index, 4)
    one, other = (set(chain(*result[4][3])) for result in found[::2])
    assert one | other == set(range(16)) and not one & other


def test_without_context_parallelism_a_dispatching_loader_is_that_of_accelerate():
    fresh_state()
    stock = accelerate.data_loader.DataLoaderDispatcher
    from megatron_magi.hf.loaders import BatchDispatcher

    loader = BatchDispatcher(NumberStream(), batch_size=2)
    assert isinstance(loader, stock) and type(loader.state).__name__ == "PartialState"
    assert [batch.tolist() for batch in loader] == [[i, i + 1] for i in range(0, 14, 2)]
