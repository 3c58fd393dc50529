"""TRL's own SFTTrainer with packing under context parallelism, for the models of the documents' table."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

pytest.importorskip("trl", reason="TRL is not on the path: make test-frameworks")

from accelerate import ParallelismConfig
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.hf import packed_models
from tests.hf.models import VOCABULARY, make_model
from tests.hf.packed_models import ALL, MODELS, NOT_BY_TRL, REFUSED, compare, documents, fresh_state, options

pytestmark = pytest.mark.ranks(2)


class OnCPUs(ParallelismConfig):
    """accelerate's own context parallelism, which is for GPUs alone."""

    def _validate_accelerator(self, accelerator):
        pass


def tokenizer():
    """A token for each number."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


TAKEN = [name for name in MODELS if name not in NOT_BY_TRL]


def trainer_of(name, folder, cp_size, **more):
    """On one rank with transformers' eager attention, where that knows documents in all layers."""
    fresh_state()
    model = make_model(ALL[name], "eager" if cp_size == 1 and name != "GPT-OSS" else "magi")
    data = Dataset.from_list([{"input_ids": tokens} for tokens in documents()])
    own = {"packing": True, "max_length": 24}
    arguments = SFTConfig(**{**options(folder, cp_size), **own, **more})
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer())


def train(folder, cp_size):
    return {name: packed_models.train(trainer_of(name, folder, cp_size)) for name in TAKEN}


def on_ranks(rank, num_ranks, folder):
    parallel = OnCPUs(cp_size=num_ranks)
    with pytest.raises(ValueError, match="Packing is not compatible with context parallelism"):
        trainer_of("Llama", folder, num_ranks, parallelism_config=parallel)
    for name in REFUSED:
        with pytest.raises(ValueError, match=r"^model: layers that look at other tokens in another way"):
            trainer_of(name, folder, num_ranks).train()
    return train(f"{folder}/{rank}", num_ranks)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return packed_models.on_two_ranks_and_one(on_ranks, train, str(tmp_path_factory.mktemp("trainer")))


@pytest.mark.parametrize("name", TAKEN)
def test_packing_on_two_ranks_has_the_losses_of_one_and_nothing_unseen_moves(results, name):
    two_ranks, one_rank = results
    for result in two_ranks:
        compare(result[name], one_rank[name])


@pytest.mark.parametrize("name", sorted(NOT_BY_TRL))
def test_what_the_table_says_of_trl_is_so_on_one_rank(name, tmp_path):
    try:
        with pytest.raises(AttributeError, match="last_hidden_state"):
            trainer_of(name, str(tmp_path), 1).train()
    finally:
        fresh_state()
