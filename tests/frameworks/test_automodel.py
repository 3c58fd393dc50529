"""NeMo Automodel's own MagiAttention module, unmodified, over this package: two ranks as one.

Its dependencies are not installed: what this needs of it does not import them.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")

import megatron_magi
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import VOCABULARY, make_model

pytest.importorskip("nemo_automodel", reason="nemo-automodel is not on the path: make test-frameworks")
TOKENS = 1024  # whole chunks of two ranks: Automodel has chunks of 512 tokens


def step(rank, num_ranks, name):
    """Loss, gradients and gathered log-probabilities of a batch that Automodel's sharder divides."""
    megatron_magi.as_magi_attention()
    from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
    from nemo_automodel.components.distributed.context_parallel.magi import setup_magi
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))

    class Settings(dict):
        def get(self, name, default=None):
            return "magi" if name == "model.attn_implementation" else default

    assert setup_magi(Settings(), mesh).hf_dispatch
    model = make_model(name, "eager").float()
    model.set_attn_implementation("magi")
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=draw)
    batch = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
    sharder = ContextParallelSharder(model, mesh, batch)
    context, local = sharder.shard(batch)
    labels = local.pop("labels")
    with context():
        logits = model(**local, use_cache=False).logits.float()
    log_probs = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    loss = -log_probs.sum() / TOKENS
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(gradients)
    whole = sharder.gather_token_tensor(log_probs.detach(), trim=False)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total, gradients, whole[:, :TOKENS], local["input_ids"].shape[1]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_two_ranks_train_as_one_and_log_probabilities_come_back_in_order(name):
    ((loss, gradients, log_probs, _),) = run_ranks(step, 1, name)
    for got in run_ranks(step, 2, name):
        assert got[3] == TOKENS // 2
        torch.testing.assert_close(got[0], loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(got[1], gradients, rtol=0, atol=2e-3 * gradients.abs().max().item())
        torch.testing.assert_close(got[2], log_probs, rtol=0, atol=2e-3)
