"""A loop of one's own over Megatron's GPTModel, without its command line. A script, for one rank or more.

Its first argument is ``magi`` or ``stock``, its second ``dense`` or ``experts``. Losses of all ranks are saved in
``losses.json``.
"""

from __future__ import annotations

import json
import os
import sys

from megatron_magi.mcore import install

KIND, MODEL = sys.argv[1:3]
sys.argv = sys.argv[:1]
install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_magi.mcore.core_models import attend_by_plan, dispatcher_of, with_magi  # noqa: E402

VOCABULARY, LENGTHS = 96, (48, 81, 33, 64)


def microbatch(length: int) -> dict[str, torch.Tensor]:
    """One document of random tokens."""
    whole = torch.randint(0, VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(length))
    position_ids = torch.arange(length).unsqueeze(0)
    loss_mask = (position_ids >= length // 3).float()
    return {"tokens": whole[:, :-1], "labels": whole[:, 1:], "loss_mask": loss_mask, "position_ids": position_ids}


def main() -> None:
    """Trains some steps."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    experts = {"num_moe_experts": 4, "moe_router_topk": 2} if MODEL == "experts" else {}
    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm", use_cpu_initialization=True,
        context_parallel_size=size, add_bias_linear=False, init_method_std=0.1, **experts,
    )  # fmt: skip
    if MODEL == "experts":  # the function that verl's Megatron engine builds with
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config, with_magi(spec) if KIND == "magi" else spec, VOCABULARY, 128, position_embedding_type="rope"
    )
    if KIND == "magi":
        attend_by_plan([model])
        dispatcher = dispatcher_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for length in LENGTHS:
        fields = microbatch(length)
        if KIND == "magi":
            batch = dispatcher.dispatch(fields)
            with model.given(batch):
                losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
            loss_mask, count = batch.loss_mask, batch.params.num_loss_tokens
        else:
            hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            losses = model(fields["tokens"], fields["position_ids"], hidden, labels=fields["labels"])
            loss_mask, count = fields["loss_mask"], fields["loss_mask"].sum()
        loss = (losses * loss_mask).sum() / count
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(float(total))
    if os.environ["RANK"] == "0":
        with open("losses.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
