"""Models of transformers in bf16 on GPUs, by the Hopper kernels: losses and gradients of fp32 on a CPU."""

import copy

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_magi.hf import context_parallel
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import CONFIGS, loss_and_gradients, make_model, packed_batch, padded_batch

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

LENGTHS = (130, 1, 300, 77)
HEAD_DIMS = {"llama": 128, "mistral": 128, "gemma2": 256, "gemma3": 256, "gpt_oss": 64, "qwen3_moe": 128, "llama4": 80}


def wide(name):
    """A model in fp32 whose weights are those of bf16, with heads as wide as in its published sizes.

    All experts are taken: which ones are would hang on the last bit.
    """
    config = copy.deepcopy(CONFIGS[name])
    config.head_dim, config.hidden_size = HEAD_DIMS[name], 64
    for experts in ("num_local_experts", "num_experts"):
        if getattr(config, experts, None) and hasattr(config, "num_experts_per_tok"):
            config.num_experts_per_tok = getattr(config, experts)
    return make_model(config).bfloat16().float()


def in_bf16(name, device):
    return wide(name).bfloat16().to(device)


def on(device, batch):
    return {key: value.to(device) for key, value in batch.items()}


def relative_error(found, expected):
    """The norm of the difference over that of what is expected, of all gradients together, and the loss's error."""
    (loss, gradients), (expected_loss, of) = found, expected
    assert gradients.keys() == of.keys()
    differences = torch.stack([(gradients[n].float().cpu() - of[n]).norm() for n in of]).norm()
    size = torch.stack([of[n].norm() for n in of]).norm()
    return abs(loss.item() - expected_loss.item()) / expected_loss.item(), (differences / size).item()


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_bf16_is_as_near_to_fp32_as_on_a_cpu(name, kind):
    batch = packed_batch(LENGTHS) if kind == "packed" else padded_batch()
    expected = loss_and_gradients(wide(name), batch)
    of_cpu = relative_error(loss_and_gradients(in_bf16(name, "cpu"), batch), expected)
    found = relative_error(loss_and_gradients(in_bf16(name, "cuda"), on("cuda", batch)), expected)
    for error, allowed in zip(found, of_cpu, strict=True):
        assert error <= 2 * allowed + 2e-3, (found, of_cpu)


def on_ranks(rank, num_ranks):
    """Errors of loss and gradients over ranks, by name of model and whether FSDP2 shards it."""
    mesh = init_device_mesh("cuda", (num_ranks,))
    errors = {}
    for name in CONFIGS:
        batch = packed_batch(LENGTHS)
        expected = loss_and_gradients(wide(name), batch)
        of_one = relative_error(loss_and_gradients(in_bf16(name, "cuda"), on("cuda", batch)), expected)
        for fsdp in (False, True):
            model = context_parallel(in_bf16(name, "cuda"), mesh)
            if fsdp:
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            loss, gradients = loss_and_gradients(model, on("cuda", batch))
            for gradient_name, gradient in list(gradients.items()):
                if fsdp:
                    gradients[gradient_name] = gradient.full_tensor()
                else:
                    dist.all_reduce(gradient)
                    gradient /= num_ranks
            errors[name, fsdp] = relative_error((loss, gradients), expected), of_one
    return errors


@pytest.mark.ranks(2)
def test_two_ranks_are_as_near_to_fp32_as_one():
    for errors in run_ranks(on_ranks, 2, backend="nccl", timeout_s=180):
        for case, (found, of_one) in errors.items():
            for error, allowed in zip(found, of_one, strict=True):
                assert error <= 2 * allowed + 2e-3, (case, found, of_one)
