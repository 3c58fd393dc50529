"""Packed training under context parallelism, model by model, in the unmodified Trainer."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import megatron_magi
from tests.frameworks.page import blocks
from tests.hf import packed_models
from tests.hf.models import make_model

PAGE = Path(megatron_magi.__file__).parents[1] / "docs/hugging_face.md"


def train(folder, cp_size):
    """Each model, packed; on one rank with eager attention and a row for each document."""
    out = {}
    for name, config in packed_models.MODELS.items():
        packed_models.fresh_state()
        model = make_model(config, "eager" if cp_size == 1 else "magi")
        samples = [{"input_ids": tokens} for tokens in packed_models.documents()]
        if cp_size > 1:
            trainer = by_the_page(model, samples, folder, cp_size)
        else:
            arguments = TrainingArguments(**packed_models.options(folder, cp_size))
            trainer = Trainer(model, arguments, packed_models.padded, samples)
        out[name] = packed_models.train(trainer)
    return out


def by_the_page(model, dataset, folder, cp_size):
    """The Trainer of the page's lines, of which options are left out and the number of ranks is another."""
    lines = blocks("hugging_face.md", "## Several ranks")[0].partition("\n\n")[0]
    for there, here in (("(..., ", "("), ("cp_size=8", f"cp_size={cp_size}"), ("\nTrainer(", "\ntrainer = Trainer(")):
        assert lines.count(there) == 1
        lines = lines.replace(there, here)
    assert lines.endswith(".train()")
    names = {"Trainer": Trainer, "DataCollatorWithFlattening": DataCollatorWithFlattening}
    names["TrainingArguments"] = functools.partial(TrainingArguments, **packed_models.options(folder, 1))
    names |= {"model": model, "dataset": dataset}
    exec(compile(lines.removesuffix(".train()"), "hugging_face.md", "exec"), names)
    return names["trainer"]


def on_ranks(rank, num_ranks, folder):
    for config in packed_models.REFUSED.values():
        packed_models.fresh_state()
        arguments = TrainingArguments(**packed_models.options(f"{folder}/{rank}", num_ranks))
        with pytest.raises(ValueError, match=r"^model: layers that look at other tokens in another way"):
            Trainer(make_model(config), arguments, DataCollatorWithFlattening(), [{"input_ids": [5, 6]}] * 8).train()
    return train(f"{folder}/{rank}", num_ranks)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return packed_models.on_two_ranks_and_one(on_ranks, train, str(tmp_path_factory.mktemp("trainer")))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", packed_models.MODELS)
def test_the_trainer_on_two_ranks_has_the_losses_of_one_and_nothing_unseen_moves(results, name):
    two_ranks, one_rank = results
    for result in two_ranks:
        packed_models.compare(result[name], one_rank[name])


@pytest.mark.parametrize("name", packed_models.ALL)
def test_accelerates_own_context_parallelism_refuses_what_is_not_full_attention(name):
    has_full_alone = set(packed_models.kinds(packed_models.ALL[name])) == {"full_attention"}
    assert ("does not support attention layers of type" in packed_models.refusal(name)) == (not has_full_alone)


def test_the_table_of_the_page_has_the_models_that_are_trained_here():
    assert packed_models.table() in PAGE.read_text(), "run: python -m tests.hf.packed_models"
