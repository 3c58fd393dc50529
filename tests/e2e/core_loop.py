"""A loop of one's own over Megatron's GPTModel, without its command line. A script, for one rank or more.

Its first argument is ``magi`` or ``stock``, its second ``dense``, ``experts``, ``predicting`` (more
tokens) or ``averaged`` (these two, and gradients are averaged over ranks). Losses of all ranks are saved in
``losses.json``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

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
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler  # noqa: E402
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
    options: dict[str, Any] = {}
    if MODEL in ("experts", "averaged"):
        options |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.1}
    if MODEL in ("predicting", "averaged"):
        options |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0}
    weight = size if MODEL == "averaged" else 1
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        scaler.set_loss_scale(torch.tensor(float(weight)))
    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm", use_cpu_initialization=True,
        context_parallel_size=size, add_bias_linear=False, init_method_std=0.1, **options,
    )  # fmt: skip
    if config.num_moe_experts:  # the function that verl's Megatron engine builds with
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if KIND == "magi":
        spec = with_magi(spec)
    predicting = None
    if config.mtp_num_layers:
        predicting = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(config, spec, VOCABULARY, 128, position_embedding_type="rope", mtp_block_spec=predicting)
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
                losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels, loss_mask=batch.loss_mask)
            loss_mask, count = batch.loss_mask, batch.params.num_loss_tokens
        else:
            hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            loss_mask, count = fields["loss_mask"], fields["loss_mask"].sum()
            named = {"labels": fields["labels"], "loss_mask": loss_mask}
            losses = model(fields["tokens"], fields["position_ids"], hidden, **named)
        loss = (losses * loss_mask).sum() / count
        optimizer.zero_grad()
        (loss * weight).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= weight
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(float(total))
    if os.environ["RANK"] == "0":
        with open("losses.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
