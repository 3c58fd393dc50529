"""verl's own Megatron engine on CPUs, over Megatron Bridge, with rollouts as trees: as its FSDP engine on padded rows.

Transformer Engine, which Bridge imports and no layer uses here, is names alone. The engine computes losses and
gradients without Megatron's DDP and optimizer, whose configuration in Bridge needs packages that are not installed.
"""

import functools
import sys

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("verl", reason="verl is not on the path: make test-frameworks")

from megatron_magi.testing.spawn import run_ranks
from tests.frameworks import te_names
from tests.frameworks.test_verl import FOLDER, batch_of, on_cpus, update
from tests.hf.models import make_model

LOCAL = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
}
"""Megatron's options for layers of its own, without kernels for GPUs."""


def engine_of(folder, num_ranks):
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron_engine import MagiMegatronEngine
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    engine = McoreEngineConfig(
        vanilla_mbridge=False,
        forward_only=True,
        context_parallel_size=num_ranks,
        use_distributed_optimizer=False,
        override_transformer_config={**LOCAL, "transformer_layer_spec": local_layer_spec},
    )
    object.__setattr__(engine, "dtype", "float32")  # it has 16 bits alone
    model = HFModelConfig(path=folder, load_tokenizer=False, enable_gradient_checkpointing=False)
    made = MagiMegatronEngine(model, engine, McoreOptimizerConfig(lr=1e-2), CheckpointConfig())
    made.initialize()
    return made


def losses_and_norm(folder, num_ranks):
    """Log-probabilities and entropies, losses of microbatches, and the norm of gradients."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=3, entropy_coeff=0.1, use_dynamic_bsz=False
    )
    engine, data = engine_of(folder, num_ranks), batch_of(True)
    out = engine.forward_backward_batch(data, functools.partial(ppo_loss, config))
    gradients = [p.grad for module in engine.module for p in module.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
        # What Megatron's DDP and its end of a step do: sums over tokens with Bridge's context parallelism, else means.
        gradient /= engine._routed_num_tokens(data) if engine.tf_config.calculate_per_token_loss else num_ranks
    norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt().item()
    found = out["model_output"]
    numbers = torch.cat([x[:-1] for name in ("log_probs", "entropy") for x in found[name].unbind()])
    return numbers, out["loss"], norm


def stock(_rank, _num_ranks, folder):
    on_cpus()
    from verl.workers.engine import FSDPEngineWithLMHead

    said = {"override_config": {"attn_implementation": "eager"}}
    return update(folder, said, 1, False, FSDPEngineWithLMHead)[:3]


def on_ranks(_rank, num_ranks, folder):
    from megatron_magi.mcore import install

    install()
    te_names.provide()
    on_cpus()
    sys.path.insert(0, str(FOLDER))
    return losses_and_norm(folder, num_ranks)


@pytest.mark.ranks(2)
def test_trees_in_verls_megatron_engine_are_its_padded_rows_on_one_rank_and_on_two(tmp_path):
    make_model("llama", "eager").save_pretrained(tmp_path)
    (expected,) = run_ranks(stock, 1, str(tmp_path), timeout_s=200)
    found = [run_ranks(on_ranks, n, str(tmp_path), timeout_s=200) for n in (1, 2)]
    for got in (*found[0], *found[1]):
        for ours, other in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(other), rtol=1e-4, atol=1e-5)
