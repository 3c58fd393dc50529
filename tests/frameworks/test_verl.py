"""verl's own FSDP engine on CPUs: an actor update with rollouts as trees, on one rank and over two."""

import functools
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("verl", reason="verl is not on the path: make test-frameworks")

import megatron_magi
from megatron_magi.testing.spawn import run_ranks
from tests.frameworks.page import blocks
from tests.hf.models import VOCABULARY, make_model

FOLDER = Path(megatron_magi.__file__).parents[1] / "examples/verl"


def on_cpus():
    """A platform of verl's: it has those of accelerators alone."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    answers = {"device_name": "cpu", "vendor_name": "cpu", "device_module": torch.cpu}
    calls = {"current_device": "cpu", "is_available": True, "device_count": 1, "communication_backend_name": "gloo"}
    own = {name: property(lambda _self, x=x: x) for name, x in answers.items()}
    own |= {name: lambda _self, *_, x=x: x for name, x in calls.items()}
    rest = set(PlatformBase.__abstractmethods__) - own.keys()
    own |= {name: lambda _self, *_: None for name in rest}
    platform_manager.set_platform(type("CPU", (PlatformBase,), own)())


def by_the_page():
    """What the page's first line says of the model, as verl's command line reads it, and the engine that verl takes."""
    from omegaconf import OmegaConf
    from verl.workers.config import HFModelConfig
    from verl.workers.engine import EngineRegistry

    words = blocks("rollouts.md", "## In verl")[0].splitlines()[0].split()
    said = OmegaConf.to_container(OmegaConf.from_dotlist([word.removeprefix("+") for word in words]))
    (model,) = said["actor_rollout_ref"].values()
    assert model.keys() <= HFModelConfig.__dataclass_fields__.keys()

    def make(*configs):
        with pytest.MonkeyPatch.context() as patch:  # it has engines for accelerators alone
            patch.setenv("VERL_ENGINE_DEVICE", "cuda")
            patch.setenv("VERL_ENGINE_VENDOR", "nvidia")
            return EngineRegistry.new("language_model", "fsdp2", *configs)

    return model, make


def engine_of(folder, said, sp_size, packed, make):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        **said,
        enable_gradient_checkpointing=False,
        use_remove_padding=packed,
    )
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=precision, use_torch_compile=False, ulysses_sequence_parallel_size=sp_size
    )
    optimizer = FSDPOptimizerConfig(lr=1e-2, optimizer="SGD", clip_grad=1e9, betas=None, weight_decay=0.0)
    made = make(model, engine, optimizer, CheckpointConfig())
    made.initialize()
    return made


def batch_of(packed):
    """Two prompts with three answers each, as verl's trainer gives them to an actor."""
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(0)
    prompts = [p for p in torch.randint(0, VOCABULARY, (2, 9), generator=draw) for _ in range(3)]
    answers = [torch.randint(0, VOCABULARY, (n,), generator=draw) for n in (3, 7, 5) * 2]
    samples = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    columns = {"input_ids": samples, "position_ids": [torch.arange(len(s)) for s in samples]}
    columns |= {"prompts": prompts, "responses": answers, "response_mask": [torch.ones(len(a)) for a in answers]}
    columns["loss_mask"] = [torch.ones(len(s)) for s in samples]
    columns["old_log_probs"] = [-4 + torch.randn(len(a), generator=draw) for a in answers]
    columns["advantages"] = [torch.randn(len(a), generator=draw) for a in answers]
    rows = {name: torch.nested.as_nested_tensor(x, layout=torch.jagged) for name, x in columns.items()}
    said = {"temperature": 0.7, "calculate_entropy": True, "use_remove_padding": packed, "return_model_output": True}
    said |= {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3, "global_batch_size": 6}
    return tu.get_tensordict(rows, non_tensor_dict=said)


def update(folder, said, sp_size, packed, make):
    """An actor update by verl's PPO loss: log-probabilities, losses, the norm of gradients, and parameters after it."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=3, entropy_coeff=0.1, use_dynamic_bsz=False
    )
    engine = engine_of(folder, said, sp_size, packed, make)
    rows = []
    engine.module.register_forward_pre_hook(
        lambda _model, _x, named: rows.append(named["input_ids"].numel()), with_kwargs=True
    )
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(batch_of(packed), functools.partial(ppo_loss, config))
        norm = engine.optimizer_step()
    parameters = {name: p.full_tensor().detach() for name, p in engine.module.named_parameters()}
    found = out["model_output"]
    # Of the last token of a sample, after which nothing comes, verl's own are of the next sample's first.
    numbers = torch.cat([x[:-1] for name in ("log_probs", "entropy") for x in found[name].unbind()])
    return numbers, out["loss"], norm, parameters, rows


def on_ranks(_rank, num_ranks, folder):
    on_cpus()
    sys.path.insert(0, str(FOLDER))
    from verl.workers.engine import FSDPEngineWithLMHead

    said, make = by_the_page()
    out = {"trees": update(folder, said, num_ranks, True, make)}
    if num_ranks == 1:
        eager, magi = ({"override_config": {"attn_implementation": name}} for name in ("eager", "magi"))
        out["stock"] = update(folder, eager, 1, False, FSDPEngineWithLMHead)
        out["packed"] = update(folder, magi, 1, True, FSDPEngineWithLMHead)
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("verl"))
    make_model("llama", "eager").save_pretrained(folder)
    return run_ranks(on_ranks, 1, folder)[0], run_ranks(on_ranks, 2, folder)


def check(got, expected):
    for ours, stock in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(stock), rtol=1e-4, atol=1e-5)
    for name, parameter in expected[3].items():
        torch.testing.assert_close(got[3][name], parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["packed", "trees"])
def test_an_actor_update_on_one_rank_is_that_of_verls_padded_rows(results, case):
    one_rank, _ = results
    check(one_rank[case], one_rank["stock"])


@pytest.mark.ranks(2)
def test_an_actor_update_over_trees_on_two_ranks_is_verls_own_and_computes_prompts_once(results):
    one_rank, two_ranks = results
    # Of a prompt of 9 tokens and answers of 3, 7 and 5 all but the last tokens; shards may be padded.
    assert one_rank["packed"][4] == [42, 42] and one_rank["trees"][4] == [23, 23]
    assert all(23 <= n <= 24 for n in sum(torch.tensor(result["trees"][4]) for result in two_ranks).tolist())
    for result in two_ranks:
        check(result["trees"], one_rank["stock"])
