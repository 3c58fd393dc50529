"""verl's own Megatron engine, of a model by Megatron Bridge, on CPUs: an actor update with rollouts as trees."""

import functools
import importlib
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("verl", reason="verl is not on the path: make test-frameworks")

from megatron_magi.testing.spawn import run_ranks
from tests.frameworks.page import blocks
from tests.frameworks.test_verl import FOLDER, batch_of, check, on_cpus, update
from tests.hf.models import make_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="verl's ranks are on CPUs here")


def engine_of(folder, cp_size):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    from tests.frameworks.bridge_layers import LOCAL, stand_in

    stand_in("megatron.energon")  # of Bridge's data sets, which verl does not use
    on_cpus()
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from verl.workers.engine import EngineRegistry

    (line,) = (line for line in blocks("rollouts.md", "## In verl")[0].splitlines() if "megatron" in line)
    kind = importlib.import_module(line.split("external_lib=")[1]).MagiMegatronEngine
    assert kind in EngineRegistry._engines["language_model"]["megatron"].values()
    model = HFModelConfig(
        path=folder, load_tokenizer=False, enable_gradient_checkpointing=False, use_remove_padding=True
    )
    config = McoreEngineConfig(
        context_parallel_size=cp_size,
        use_distributed_optimizer=False,
        sequence_parallel=False,
        override_transformer_config={"transformer_layer_spec": local_layer_spec, **LOCAL},
    )
    object.__setattr__(config, "dtype", "float32")  # verl takes 16-bit types alone
    optimizer = McoreOptimizerConfig(lr=1e-2, optimizer="sgd", total_training_steps=10, clip_grad=1e9, weight_decay=0.0)
    engine = kind(model, config, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def on_ranks(_rank, num_ranks, folder):
    from megatron_magi.mcore import install

    install()
    torch.compiler.set_stance("force_eager")  # verl compiles its entropy, which may take minutes on a busy machine
    sys.path.append(str(FOLDER))
    engine = engine_of(folder, num_ranks)
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=3, entropy_coeff=0.1, use_dynamic_bsz=False
    )
    rows = []
    engine.module[0].register_forward_pre_hook(
        lambda _model, _x, named: rows.append(named["input_ids"].numel()), with_kwargs=True
    )
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(batch_of(True), functools.partial(ppo_loss, config))
        norm = engine.optimizer_step()
    parameters = {name: p.detach().clone() for name, p in engine.bridge.export_hf_weights(engine.module)}
    found = out["model_output"]
    numbers = torch.cat([x[:-1] for name in ("log_probs", "entropy") for x in found[name].unbind()])
    return numbers, out["loss"], norm, parameters, rows


def of_fsdp(_rank, _num_ranks, folder):
    """The same update by verl's FSDP engine, rollout by rollout and padded."""
    on_cpus()
    from verl.workers.engine import FSDPEngineWithLMHead

    said = {"override_config": {"attn_implementation": "eager"}}
    return update(folder, said, 1, False, FSDPEngineWithLMHead)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("verl"))
    make_model("llama", "eager").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return run_ranks(of_fsdp, 1, folder)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_actor_update_over_trees_is_that_of_padded_rows_and_computes_prompts_once(num_ranks, folder, expected):
    results = run_ranks(on_ranks, num_ranks, folder)
    assert sum(torch.tensor(result[4]) for result in results).tolist() == [23, 23] or num_ranks > 1
    for result in results:
        check(result, expected)
