"""torchrun --nproc-per-node N megatron_bridge.py llama: Megatron Bridge's tiny Llama or qwen3_moe, over N ranks."""

import os
import sys

from megatron_magi.mcore import install

install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from megatron_magi.mcore.core_models import attend_by_plan, dispatcher_of, with_magi  # noqa: E402

CLASSES = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}


def train(name, **options):  # options: of Bridge's provider
    bridge = AutoBridge.from_hf_config(AutoConfig.for_model(name, architectures=[CLASSES[name]], **SIZES))
    provider = bridge.to_megatron_provider(load_weights=False)
    for option, value in {"context_parallel_size": int(os.environ["WORLD_SIZE"]), **options}.items():
        setattr(provider, option, value)
    provider.transformer_layer_spec = with_magi(provider.transformer_layer_spec)
    provider.register_pre_wrap_hook(attend_by_plan)
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    dispatcher = dispatcher_of(provider)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for length in (48, 81, 33, 64):  # tokens of a microbatch
        tokens = torch.randint(96, (1, length + 1), generator=torch.Generator().manual_seed(length))
        fields = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": torch.arange(length)[None]}
        fields["loss_mask"] = fields["position_ids"] >= 9
        batch = dispatcher.dispatch(fields)
        with model.given(batch):
            losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
        loss = (losses * batch.loss_mask).sum() / batch.params.num_loss_tokens
        optimizer.zero_grad()
        loss.backward()
        for reduced in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(reduced)
        optimizer.step()
        print(f"{length} tokens: loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    train(sys.argv.pop())
