"""Stock Megatron under context parallelism with its own zigzag batches; only the core attention is another.

    torchrun --nproc-per-node 2 examples/megatron/drop_in.py

Nothing of Megatron is patched and no data path changes: tokens, labels and rotary positions are sharded as Megatron
does it (`get_batch_on_this_cp_rank`), and attention takes them where they are. Under Megatron's hybrid context
parallelism `PackedSeqParams` has the group of each microbatch, of 1, 2, 4 or more ranks.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed as dist

from megatron_magi import cpu_device
from megatron_magi.api import calc_attn, magi_attn_flex_key

if not torch.cuda.is_available():
    cpu_device.install()  # lets Megatron run on CPUs; before it is imported

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

VOCABULARY, SEQLEN = 64, 32


@functools.lru_cache(maxsize=8)
def key_of(starts: tuple[int, ...], lengths: tuple[int, ...], group: dist.ProcessGroup | None):
    """Causal documents of ``lengths`` tokens, each padded up to the next of ``starts``, zigzag in each document."""
    ranges = [[start, start + length] for start, length in zip(starts, lengths, strict=False)]
    return magi_attn_flex_key(
        ranges, ranges, "causal", starts[-1], starts[-1],
        cp_group_or_mesh=group, layout="zigzag_documents", layout_cu_seqlens=starts,
    )  # fmt: skip


class ZigzagAttention(torch.nn.Module):
    """Core attention in place of Transformer Engine's: ``[seqlen, batch, heads, dim]``, or packed ``[tokens, ...]``."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_options):
        super().__init__()
        self.softmax_scale = softmax_scale
        self.group = parallel_state.get_context_parallel_group()

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params=None, **_options):
        """Attention of this rank's tokens over the tokens of all ranks."""
        group = self.group
        if packed_seq_params is not None and packed_seq_params.local_cp_size is not None:
            group = packed_seq_params.cp_group  # of this microbatch; None: the sequence is whole on this rank
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            padded = packed_seq_params.cu_seqlens_q_padded
            bounds = packed_seq_params.cu_seqlens_q
            starts = tuple((bounds if padded is None else padded).tolist())
            plan = key_of(starts, tuple(bounds.diff().tolist()), group)
            return calc_attn(query, key, value, plan, softmax_scale=self.softmax_scale)[0].flatten(1)
        seqlen, batch = query.shape[:2]
        total = seqlen * (1 if group is None else group.size())  # each sequence of the batch is a document
        plan = key_of(tuple(range(0, batch * total + 1, total)), (total,) * batch, group)
        rows = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = calc_attn(*rows, plan, softmax_scale=self.softmax_scale)[0]
        return out.view(batch, seqlen, -1).transpose(0, 1)


def build(attention: type[torch.nn.Module] | None, **options) -> GPTModel:
    """A small GPT with the given core attention; with Megatron's own when None. ``options``: of its configuration."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        hidden_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False,
        context_parallel_size=parallel_state.get_context_parallel_world_size(), **options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    model = GPTModel(config, spec, VOCABULARY, SEQLEN, position_embedding_type="rope")
    return model.cuda() if torch.cuda.is_available() else model


def train(model: GPTModel, steps: int, *, lr: float = 0.5) -> list[float]:
    """Losses of a few steps on random tokens."""
    draw, losses, group = torch.Generator().manual_seed(0), [], parallel_state.get_context_parallel_group()
    device = next(model.parameters()).device
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (2, SEQLEN + 1), generator=draw).to(device)
        positions = torch.arange(SEQLEN, device=device).expand(2, -1)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions, "cu_seqlens": None}
        batch = get_batch_on_this_cp_rank(
            {k: v if v is None else v.contiguous() for k, v in batch.items()}, False, group
        )
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).sum() / (2 * SEQLEN)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter -= lr * parameter.grad
            total = loss.detach().clone()
            dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses


def start() -> None:
    """All ranks are context-parallel."""
    parallel_state.initialize_model_parallel(
        context_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


def main() -> None:
    """Trains and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    if torch.cuda.is_available():
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    else:
        dist.init_process_group("gloo")
    start()
    losses = train(build(ZigzagAttention), steps)
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
