"""TRL's GRPO trainer: its own over padded rows with eager attention, and the example's over trees, on 1 and 2 ranks."""

import functools
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
pytest.importorskip("trl", reason="TRL is not on the path: make test-frameworks")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import megatron_magi
from tests.frameworks.page import blocks
from tests.hf import packed_models
from tests.hf.models import VOCABULARY, make_model
from tests.hf.packed_models import fresh_state, options

sys.path.insert(0, str(Path(megatron_magi.__file__).parents[1] / "examples/trl"))
from tree_grpo import TreeGRPOTrainer

pytestmark = pytest.mark.ranks(2)

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [20, 21, 22, 23, 24]]
GENERATIONS = 3
QUANTILE = {"top_entropy_quantile": 0.8}
CASES = {
    "default": {},
    "reference model": {"beta": 0.1, "loss_type": "grpo", "temperature": 0.7},
    "steps of one generation": {"steps_per_generation": 2, "num_iterations": 2},
}


def tokenizer():
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")


def completions(prompts):
    """Of some lengths, the same whoever draws them."""
    draw = torch.Generator().manual_seed(sum(map(sum, prompts)))
    lengths = torch.randint(1, 9, (len(prompts),), generator=draw).tolist()
    return [torch.randint(2, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


def rollouts(prompts, _trainer):
    ids = [list(map(int, prompt.split())) for prompt in prompts]
    answers = completions(ids)
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}


def reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(folder, name, cp_size, kind, own):
    """Losses, norms of gradients and parameters in the end, and the tokens of the model's calls."""
    fresh_state()
    attention = "magi" if kind is TreeGRPOTrainer else "eager"
    said = {
        **options(f"{folder}/{name}", cp_size),
        "per_device_train_batch_size": GENERATIONS,
        "num_generations": GENERATIONS,
    }
    said |= {"max_completion_length": 8, "shuffle_dataset": False, "gradient_checkpointing": False}
    said |= {"model_init_kwargs": {"attn_implementation": attention, "dtype": "float32"}, **own}
    data = Dataset.from_list([{"prompt": " ".join(map(str, prompt))} for prompt in PROMPTS])
    trainer = kind(
        f"{folder}/model",
        args=GRPOConfig(**said),
        reward_funcs=reward,
        train_dataset=data,
        processing_class=tokenizer(),
        rollout_func=rollouts,
    )
    model, rows = trainer.model, []
    model.base_model.embed_tokens.register_forward_hook(lambda _module, _args, out: rows.append(out[..., 0].numel()))
    trainer.train()
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return logged, {name: p.detach().clone() for name, p in model.named_parameters()}, rows


def on_ranks(rank, num_ranks, folder):
    with pytest.raises(ValueError, match="top_entropy_quantile"):
        train(folder, rank, num_ranks, TreeGRPOTrainer, QUANTILE)
    with pytest.raises(ValueError, match="num_generations"):
        train(folder, rank, num_ranks, TreeGRPOTrainer, {"per_device_train_batch_size": 4, "num_generations": 8})
    return {name: train(folder, rank, num_ranks, TreeGRPOTrainer, own) for name, own in CASES.items()}


def on_one(folder, cp_size):
    kinds = {"trees": TreeGRPOTrainer, "stock": GRPOTrainer}
    cases = {**CASES, "quantile": QUANTILE}
    return {kind: {name: train(folder, kind, 1, kinds[kind], own) for name, own in cases.items()} for kind in kinds}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("grpo"))
    make_model("llama").save_pretrained(f"{folder}/model")
    return packed_models.on_two_ranks_and_one(on_ranks, on_one, folder)


def test_the_lines_of_the_page_train_with_completions_of_the_model(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    lines = blocks("rollouts.md", "## In TRL")[0].replace("my/model", str(tmp_path))
    quick = {**options(str(tmp_path), 1), "max_completion_length": 6}
    del quick["per_device_train_batch_size"]
    names = {"reward": reward, "data": Dataset.from_list([{"prompt": "5 6 7 8"}] * 3)}
    names["GRPOConfig"] = functools.partial(GRPOConfig, **quick)
    trainers = []
    plain = TreeGRPOTrainer.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeGRPOTrainer, "train", lambda self: trainers.append(self) or plain(self))
        fresh_state()
        try:
            exec(compile(lines, "rollouts.md", "exec"), names)
        finally:
            fresh_state()
    (trainer,) = trainers
    assert trainer.state.global_step == 3 and trainer.num_generations == 8


def check(got, expected):
    assert len(got[0]) == len(expected[0]) == 3
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(expected[0]), rtol=1e-4, atol=1e-5)
    assert max(norm for _, norm in expected[0]) > 0.1
    for name, parameter in expected[1].items():
        torch.testing.assert_close(got[1][name], parameter, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [*CASES, "quantile"])
def test_trees_train_as_trls_own_rows_on_one_rank(results, case):
    _, one_rank = results
    check(one_rank["trees"][case], one_rank["stock"][case])


@pytest.mark.parametrize("case", CASES)
def test_trees_over_two_ranks_train_as_trls_own_rows_on_one(results, case):
    two_ranks, one_rank = results
    for result in two_ranks:
        check(result[case], one_rank["stock"][case])


def test_each_prompt_is_computed_once(results):
    two_ranks, one_rank = results
    for step, prompt in enumerate(PROMPTS):
        answers = completions([prompt] * GENERATIONS)
        every = GENERATIONS * (len(prompt) + max(map(len, answers)))
        tree = len(prompt) - 1 + sum(map(len, answers))
        assert one_rank["stock"]["default"][2][step] == every
        assert one_rank["trees"]["default"][2][step] <= tree < every
        assert sum(result["default"][2][step] for result in two_ranks) <= tree + 1
