"""torchtitan's own trainer on CPUs: its data loader, model, FSDP and loss, with the example's attention."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

pytest.importorskip("torchtitan", reason="torchtitan is not on the path: make test-frameworks")

import megatron_magi
from megatron_magi.testing.spawn import run_ranks
from tests.frameworks.page import blocks

FOLDER = Path(megatron_magi.__file__).parents[1] / "examples/torchtitan"
SEQLEN, STEPS = 64, 3


def on_cpus():
    """torchtitan takes the accelerator that torch names, and else CUDA; it asks for names and memory of a device."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {"get_device_name": "CPU", "get_device_properties": type("CPU", (), {"total_memory": 1})}
    answers |= {"memory_stats": {}, "reset_peak_memory_stats": None, "empty_cache": None}
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    torch.cpu.current_device = lambda: 0
    from torchtitan.models.common.attention import FlexAttention

    # Compiled flex attention has no backward on CPUs: what its mask says, pair by pair.
    FlexAttention.compiled_flex_attn = staticmethod(of_all_pairs)


def of_all_pairs(q, k, v, *, block_mask, scale, enable_gqa, **_):
    index = [torch.arange(n) for n in (q.shape[0], 1, q.shape[2], k.shape[2])]
    seen = block_mask.mask_mod(*(x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(index)))
    options = {"attn_mask": seen, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options), None


def save_data(folder):
    """A corpus of documents of 3 to 40 words, and a tokenizer with a token for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(200)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "tokenizer").mkdir()
    words.save(str(folder / "tokenizer/tokenizer.json"))
    special = {"bos_token": "1", "eos_token": "2"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    draw = torch.Generator().manual_seed(0)
    (folder / "data").mkdir()
    with open(folder / "data/data.json", "w") as file:
        for _ in range(60):
            count = int(torch.randint(3, 40, (), generator=draw))
            text = " ".join(map(str, torch.randint(3, 200, (count,), generator=draw).tolist()))
            file.write(json.dumps({"text": text}) + "\n")


def lines_of_the_page(_rank, _num_ranks):
    """Types of what torchtitan's own parser makes of the page's command, and of the page's function."""
    sys.path.insert(0, str(FOLDER))
    on_cpus()
    from torchtitan.config.manager import ConfigManager

    command, function = blocks("torchtitan.md", "# torchtitan")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["export", "PYTHONPATH=examples/torchtitan"]
    names = {}
    exec(compile(function, "torchtitan.md", "exec"), names)
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    kinds = [
        (type(made).__qualname__, {type(layer.attention.inner_attention).__qualname__ for layer in layers_of(made)})
        for made in (config, names["qwen3_14b"]())
    ]
    return kinds, config.parallelism.context_parallel_degree, config.training.seq_len


def layers_of(config):
    return config.model_spec.model.layers


@pytest.mark.ranks(1)
def test_the_lines_of_the_page_make_configurations_of_it():
    ((kinds, cp_size, seqlen),) = run_ranks(lines_of_the_page, 1)
    assert kinds == [("MagiTrainer.Config", {"FlexAttention.Config"})] * 2
    assert (cp_size, seqlen) == (8, 131072)


def losses_of(folder, cp_size, with_magi, change=lambda config: None):
    """Losses, norms of gradients and the parameters in the end."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.llama3 import config_registry

    config = config_registry.llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = f"{folder}/tokenizer", f"{folder}/out"
    config.dataloader.dataset_path = f"{folder}/data"
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, SEQLEN, STEPS
    config.training.mixed_precision_param = "float32"
    config.training.max_norm = 1e9
    config.optimizer = default_adamw(lr=1e-3, eps=1e-3)  # so that rounding is not made a step
    config.training.disable_cuda_graphs = True
    config.checkpoint, config.validator.enable = CheckpointManager.Config(enable=False), False
    config.parallelism = ParallelismConfig(context_parallel_degree=cp_size)
    config.debug.seed = 0
    if with_magi:
        sys.path.insert(0, str(FOLDER))
        import magi_titan

        config = magi_titan.with_magi(config)
    change(config)
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
    set_parameters(trainer.model_parts[0])
    found, norms = [], []
    trainer.metrics_processor.log = lambda _step, loss, *_, **__: found.append(loss)
    optimizers, step = trainer.optimizers, trainer.optimizers.step
    optimizers.step = lambda: (norms.append(norm_of(trainer.model_parts[0])), step())
    trainer.train()
    parameters = {name: whole(p) for name, p in trainer.model_parts[0].named_parameters()}
    rows = trainer.ntokens_seen
    trainer.close()
    return torch.tensor([found, norms]), parameters, rows


def set_parameters(model):
    """The same whatever the number of ranks; torchtitan draws each rank's shard of them."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=draw) * (0.05 if parameter.ndim > 1 else 0.1)
            values += parameter.ndim == 1
            parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))


def norm_of(model):
    """Of all gradients, in fp64; torchtitan's own, in fp32, depends on the number of ranks."""
    return sum(whole(p.grad).double().square().sum() for p in model.parameters()).sqrt().item()


def whole(parameter):
    return parameter.full_tensor().detach() if hasattr(parameter, "full_tensor") else parameter.detach()


def on_ranks(rank, num_ranks, folder):
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    on_cpus()
    out = {"magi": losses_of(folder, num_ranks, True)}
    if num_ranks == 1:
        out["stock"] = losses_of(folder, 1, False)
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan")
    save_data(folder)
    return {n: run_ranks(on_ranks, n, str(folder)) for n in (1, 2)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_packed_documents_train_as_with_its_own_attention_on_one_rank(results, num_ranks):
    losses, parameters, tokens = results[1][0]["stock"]
    assert losses.shape == (2, STEPS) and losses[0, 0] != losses[0, 1]
    for result in results[num_ranks]:
        own = result["magi"]
        torch.testing.assert_close(own[0], losses, rtol=1e-5, atol=1e-6)
        for name, parameter in parameters.items():
            torch.testing.assert_close(own[1][name], parameter, rtol=1e-5, atol=1e-6)
        assert own[2] == tokens // num_ranks
