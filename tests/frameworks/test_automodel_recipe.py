"""NeMo Automodel's own recipe for fine-tuning, on CPUs, with this package's sharder: two ranks as one."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("nemo_automodel", reason="nemo-automodel is not on the path: make test-frameworks")

from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast

import megatron_magi
from megatron_magi.hf.automodel_sharder import own_sharding
from megatron_magi.testing.spawn import run_ranks
from tests.frameworks.page import blocks
from tests.hf.models import VOCABULARY, make_model, packed_batch

CASES = {
    "Llama": ("llama", "mock"),
    "Qwen3-MoE": ("qwen3_moe", "mock"),
    "Mistral": ("mistral", "mock"),
    "Gemma 3, packed": ("gemma3", "packed"),
    "Qwen3-MoE, packed": ("qwen3_moe", "packed"),
    "Llama, prefix tree": ("llama", "tree"),
}


class OnCPU:
    """torch for a recipe, which takes a GPU for granted."""

    def __init__(self, real, **own):
        self._real = real
        vars(self).update(own)

    def __getattr__(self, name):
        return getattr(self._real, name)


def on_cpus(*modules):
    cpu = torch.device("cpu")
    own = {name: lambda *_: None for name in ("reset_peak_memory_stats", "empty_cache", "synchronize")}
    cuda = OnCPU(torch.cuda, current_device=lambda: cpu, max_memory_allocated=lambda *_: 0, **own)
    for module in modules:
        module.torch = OnCPU(torch, cuda=cuda, device=lambda *_: cpu)


def save(folder, name):
    make_model(name, "eager").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(folder)


def data_of(kind):
    """Sections of a recipe's configuration."""
    datasets = "nemo_automodel.components.datasets"
    mock = {"_target_": f"{datasets}.llm.mock.build_unpacked_dataset", "vocab_size": VOCABULARY, "num_sentences": 20}
    collate = "default_collater" if kind != "tree" else "prefix_tree_collate_fn"
    where = "utils" if kind != "tree" else "llm.prefix_tree"
    sections = {"dataset": mock, "dataloader": {"shuffle": False, "collate_fn": f"{datasets}.{where}.{collate}"}}
    if kind == "packed":
        sections["packed_sequence"] = {"packed_sequence_size": 64, "packing_strategy": "neat"}
    if kind == "tree":
        tree = {"num_groups": 8, "prompt_len": 9, "completion_len": 7, "vocab_size": VOCABULARY}
        sections["dataset"] = {"_target_": f"{datasets}.llm.mock_prefix_tree.build_mock_rollout_dataset", **tree}
    return sections


def configured(folder, name, kind, num_ranks, attention):
    """The path of a recipe's configuration."""
    schedule = {"global_batch_size": 2, "local_batch_size": 1, "max_steps": 3, "num_epochs": 1}
    policy = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy"}
    loader = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
    model = {"_target_": loader, "torch_dtype": "float32", "force_hf": True, "attn_implementation": attention}
    config = {
        "seed": 1,
        "step_scheduler": {**schedule, "ckpt_every_steps": 1000},
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "model": {**model, "pretrained_model_name_or_path": f"{folder}/model"},
        "checkpoint": {"enabled": False, "checkpoint_dir": folder},
        "distributed": {"strategy": "fsdp2", "mp_policy": policy, "tp_size": 1, "cp_size": num_ranks},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        **data_of(kind),
    }
    if dist.get_rank() == 0:
        save(f"{folder}/model", name)
        Path(f"{folder}/my.yaml").write_text(yaml.safe_dump(config))
    dist.barrier()
    return f"{folder}/my.yaml"


def train(folder, name, kind, num_ranks, attention):
    """Losses and norms of gradients of three steps, by the lines of the page."""
    path = configured(folder, name, kind, num_ranks, attention)
    lines = blocks("hugging_face.md", "## With NeMo Automodel")[0].replace("my.yaml", path)
    if attention != "magi":
        lines = lines.replace("own_sharding(recipe.model_parts[0])\n", "")
    sys.argv = sys.argv[:1]
    exec(compile(lines, "hugging_face.md", "exec"), {})
    with open(f"{folder}/training.jsonl") as lines:
        steps = [json.loads(line) for line in lines]
    return [(step["loss"], step["grad_norm"]) for step in steps]


def on_ranks(rank, num_ranks, folder):
    megatron_magi.as_magi_attention()
    from nemo_automodel._transformers import auto_model, infrastructure
    from nemo_automodel.recipes.llm import train_ft

    on_cpus(auto_model, infrastructure, train_ft)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks))
    out = {}
    for i, (case, (name, kind)) in enumerate(CASES.items()):
        attention = "eager" if num_ranks == 1 and kind == "mock" else "magi"
        path = f"{folder}/{num_ranks}/{i}"
        out[case] = train(path, name, kind, num_ranks, attention)
    return out


def log_probs(_rank, num_ranks, name):
    """Of labels, gathered by Automodel's verbs, and of one rank; of a pack, and of two rows."""
    from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
    tokens = torch.randint(VOCABULARY, (2, 26), generator=torch.Generator().manual_seed(1))
    rows = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
    model, one_rank, out = own_sharding(make_model(name)), make_model(name), []
    for batch in (packed_batch(), rows):
        logits = one_rank(**{key: x for key, x in batch.items() if key != "labels"}, use_cache=False).logits
        expected = -F.cross_entropy(logits.mT, batch["labels"], reduction="none")
        sharder = ContextParallelSharder(model, mesh, dict(batch))
        context, local = sharder.shard(dict(batch))
        labels = local.pop("labels")
        assert torch.equal(sharder.shard_token_tensor(batch["labels"], fill=-100).flatten(), labels.flatten())
        with context():
            logits = model(**local).logits
        got = -F.cross_entropy(logits.mT, labels, reduction="none")
        by_rows = len(batch["labels"]) > 1
        whole = sharder.gather_token_tensor(got[0] if by_rows else got, seq_dim=0 if by_rows else 1, trim=True)
        assert whole.shape == expected.shape
        (whole * torch.arange(whole.numel()).view_as(whole)).sum().backward()
        out.append((whole - expected).abs().max().item())
    return out


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_log_probabilities_are_gathered_in_the_callers_order(name):
    assert max(max(differences) for differences in run_ranks(log_probs, 2, name)) < 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("automodel"))
    return run_ranks(on_ranks, 2, folder), run_ranks(on_ranks, 1, folder)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_the_recipe_on_two_ranks_trains_as_on_one(results, case):
    two_ranks, one_rank = results
    assert len(one_rank[case]) == 3
    for result in two_ranks:
        for got, expected in zip(result[case], one_rank[case], strict=True):
            assert got == pytest.approx(expected, rel=1e-5)
