"""What the ranks of a launch are made to do before they run the training script."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

SINK_SIZE = 3.0


def split_head_dims(workdir: Path) -> None:
    """Lets stock local attention take MLA's own head dimensions, so that there is something to compare with."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.__init__

    @functools.wraps(original)
    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = init


def large_sinks(workdir: Path) -> None:
    """Sinks of +3 and -3, alternating, and each layer's gradient of the first iteration in ``sink_grads<rank>.pt``."""
    _add_model_hook(functools.partial(_set_sinks, workdir=workdir))


def sinks_alone(workdir: Path) -> None:
    """As `large_sinks`, and nothing else is trained, so the gradient norm is that of the sinks."""
    large_sinks(workdir)
    _add_model_hook(_freeze_all_but_sinks)


def _freeze_all_but_sinks(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(name.endswith("softmax_offset"))
    return chunks


def _set_sinks(chunks: list[torch.nn.Module], workdir: Path) -> list[torch.nn.Module]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.training import training

    offsets = {n: p for chunk in chunks for n, p in chunk.named_parameters() if n.endswith("softmax_offset")}
    for name, offset in offsets.items():
        first_head = parallel_state.get_tensor_model_parallel_rank() * len(offset)
        layer = int(name.split("layers.")[1].split(".")[0])
        sign = 1 - 2 * ((torch.arange(len(offset)) + first_head + layer) % 2)
        offset.data.copy_(SINK_SIZE * sign)
    log = training.training_log

    def training_log(loss_dict: dict, total: dict, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        if iteration == 1:
            grads = {name: offset.main_grad.clone() for name, offset in offsets.items()}
            torch.save(grads, workdir / f"sink_grads{dist.get_rank()}.pt")
        return log(loss_dict, total, rate, iteration, *args, **kwargs)

    training.training_log = training_log
    return chunks


def linear_kernels(workdir: Path) -> None:
    """Megatron's linear layers run on CPUs, with definitions of their kernels in torch."""
    from tests.mcore import linear_kernels

    linear_kernels.install()


def tune_less(workdir: Path) -> None:
    """Kernels of linear layers are compiled for one configuration each."""
    from tests.mcore import linear_kernels

    linear_kernels.tune_less()


def local_gated_delta_nets(workdir: Path) -> None:
    """As `linear_kernels`, and GPTs with gated delta nets get local layers; Megatron makes them of TE's alone."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.training.models import gpt

    from megatron_magi.mcore.hybrid_spec import local_stack_spec

    linear_kernels(workdir)

    def block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        net = local_stack_spec(config).submodules.gdn_layer.submodules.self_attention
        layers = [get_gpt_layer_local_submodules(normalization="RMSNorm") for _ in range(config.num_layers)]
        for layer, is_linear in zip(layers, config.linear_attention_freq, strict=True):
            if is_linear:
                layer.self_attention, layer.sharded_state_dict_keys_map = net, {}
        return TransformerBlockSubmodules(
            layer_specs=[ModuleSpec(module=TransformerLayer, submodules=layer) for layer in layers],
            layer_norm=layers[0].input_layernorm,
        )

    gpt.get_transformer_block_with_experimental_attention_variant_spec = block_spec


def local_sparse_layers(workdir: Path) -> None:
    """GPTs with DeepSeek's sparse attention get local layers; Megatron makes them of Transformer Engine's alone."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.training.models import gpt

    from megatron_magi.mcore.hybrid_spec import local_stack_spec

    def block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        layers = [get_gpt_layer_local_submodules(normalization="RMSNorm") for _ in range(config.num_layers)]
        for layer in layers:
            layer.self_attention = local_stack_spec(config).submodules.dsa_layer.submodules.self_attention
            layer.sharded_state_dict_keys_map = {}
        return TransformerBlockSubmodules(
            layer_specs=[ModuleSpec(module=TransformerLayer, submodules=layer) for layer in layers],
            layer_norm=layers[0].input_layernorm,
        )

    gpt.get_transformer_block_with_experimental_attention_variant_spec = block_spec


def fused_rope(workdir: Path) -> None:
    """RoPE's fused kernel in torch, which like Transformer Engine's takes one row of angles for a place of all."""
    from megatron.core.models.common.embeddings import rope_utils

    def kernel(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        assert freqs.shape[:3] == (len(t), 1, 1), f"tokens {t.shape}, angles {freqs.shape}"
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

    rope_utils.fused_apply_rotary_pos_emb = kernel


def no_streams(workdir: Path) -> None:
    """Lets the schedule that overlaps experts' communication run on the CPU, where tensors belong to no stream."""
    if not torch.cuda.is_available():
        torch.Tensor.record_stream = lambda self, stream: None


def count_operations(workdir: Path) -> None:
    """Each iteration's tokens and squared lengths, as Megatron counts operations, in ``operations.jsonl``."""
    from megatron.training import training

    stock = training.consume_seqlen_stats_in_iteration

    def consume() -> tuple[float | None, float | None]:
        found = stock()
        if training.get_args().rank == 0:
            with (workdir / "operations.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
        return found

    training.consume_seqlen_stats_in_iteration = consume


def few_loss_tokens(workdir: Path) -> None:
    """Losses count as in fine-tuning: at one token of a sample, at none, or at a short run."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    def getitem(self: GPTDataset, index: int | None) -> dict[str, torch.Tensor]:
        sample = original(self, index)
        mask = torch.zeros_like(sample["loss_mask"])
        kind, start = (index or 0) % 3, 5 + 31 * (index or 0) % (len(mask) - 25)
        mask[start : start + (1, 0, 20)[kind]] = 1.0
        return {**sample, "loss_mask": mask}

    GPTDataset.__getitem__ = getitem


def few_loss_tokens_of_conversations(workdir: Path) -> None:
    """As `few_loss_tokens`, also with ``--sft``, without files of conversations."""
    from megatron_magi.mcore import data

    few_loss_tokens(workdir)
    original = data._dataset_class
    data._dataset_class = lambda args: original(Namespace(**{**vars(args), "sft": False}))


def weighted_loss_tokens(workdir: Path) -> None:
    """Losses count by weights, of which few ranks hold whole numbers: 0, 0.1 and so on to 0.6."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    def getitem(self: GPTDataset, index: int | None) -> dict[str, torch.Tensor]:
        sample = original(self, index)
        return {**sample, "loss_mask": sample["tokens"] % 7 / 10}

    GPTDataset.__getitem__ = getitem


def teacher_without_files(workdir: Path) -> None:
    """A distillation loss of the student's logits alone, so that no teacher has to be saved."""
    from megatron.training.distillation import cached_logits_loss

    def loss(self: Any, student_logits: torch.Tensor) -> torch.Tensor:
        return student_logits.float().logsumexp(-1).transpose(0, 1).contiguous()

    cached_logits_loss.CachedLogitsKDLoss.__call__ = loss


def different_data(workdir: Path) -> None:
    """The last rank reads other documents than the rest."""
    import os

    from megatron_magi.mcore.planner import Planner

    if os.environ["RANK"] != str(int(os.environ["WORLD_SIZE"]) - 1):
        return
    original = Planner.attempt

    def attempt(self: Planner, fields: dict, **options: Any) -> Any:
        return original(self, {**fields, "tokens": fields["tokens"].flip(1)}, **options)

    Planner.attempt = attempt


def bad_boundaries(workdir: Path) -> None:
    """The second sample of the third iteration has documents that decrease, on the last rank."""
    import os

    from megatron.core.datasets.gpt_dataset import GPTDataset

    original, is_last = GPTDataset.__getitem__, os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def getitem(self: GPTDataset, index: int | None) -> dict[str, torch.Tensor]:
        bounds = [0, 90, 50, 128] if is_last and index == 9 else [0, 50, 90, 128]
        return {**original(self, index), "cu_seqlens": torch.tensor(bounds)}

    GPTDataset.__getitem__ = getitem


def worker_dies(workdir: Path) -> None:
    """The worker that loads the second sample of the third iteration is killed, on the last rank."""
    import os
    import signal

    from megatron.core.datasets.gpt_dataset import GPTDataset
    from torch.utils.data import get_worker_info

    original, is_last = GPTDataset.__getitem__, os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def getitem(self: GPTDataset, index: int | None) -> dict[str, torch.Tensor]:
        if is_last and index == 9 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, index)

    GPTDataset.__getitem__ = getitem


def count_planning(workdir: Path) -> None:
    """What this process plans and hashes inside of its training steps, by name, in ``planning<rank>.jsonl``."""
    import hashlib
    import os
    import zlib
    from collections import Counter

    from megatron.training import training

    from megatron_magi.plan import plan

    inside, counts, stock = [], Counter(), training.train_step

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += bool(inside)
            return original(*args, **kwargs)

        setattr(owner, name, call)

    hashes = (hashlib, ("sha256", "blake2b")), (zlib, ("crc32",))
    for owner, names in ((plan, ("assign_chunks", "split_stages")), *hashes):
        for name in names:
            counted(owner, name)

    def train_step(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        result = stock(*args, **kwargs)
        inside.pop()
        with (workdir / f"planning{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(counts) + "\n")
        counts.clear()
        return result

    training.train_step = train_step


def packed_params_made_anew(workdir: Path) -> None:
    """Stacks of hybrid models and multi-token prediction get new parameters, made of the fields that Megatron knows."""
    from dataclasses import fields

    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    def make_anew(owner: type) -> None:
        stock = owner.forward

        @functools.wraps(stock)
        def forward(self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
            if packed_seq_params is not None:
                known = {f.name: getattr(packed_seq_params, f.name) for f in fields(PackedSeqParams)}
                packed_seq_params = PackedSeqParams(**known)
            return stock(self, *args, packed_seq_params=packed_seq_params, **kwargs)

        owner.forward = forward

    for owner in (HybridStack, MultiTokenPredictionBlock):
        make_anew(owner)


def plain_models(workdir: Path) -> None:
    """Megatron's builder builds its own GPT models, whatever is asked for."""
    from megatron_magi.mcore import model

    model.install = lambda: None


def loss_of_two(workdir: Path) -> None:
    """A loss function that returns a mean and a report, as Megatron took it once."""
    from megatron_magi.mcore import user_step

    stock = user_step._microbatch_mean
    user_step._microbatch_mean = lambda loss, *rest: stock(lambda out: loss(out)[::2], *rest)


def _add_model_hook(hook: Any) -> None:
    from megatron_magi.mcore import entry

    hooks = getattr(entry.main, "keywords", {}).get("pre_wrap_hooks", [])
    entry.main = functools.partial(entry.main, pre_wrap_hooks=[*hooks, hook])
