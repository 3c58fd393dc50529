"""Rank 0 of runs as their command lines describe them, in one process without GPUs: run as a program.

    python -m tests.configs.fake_world '[[WORLD_SIZE, ["ARGUMENT", ...]], ...]'

Parses and validates as the training script does, builds the model of rank 0 on the meta device (with torch's
layers, for Transformer Engine need not be there), plans a packed batch, and prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_magi import cpu_device, envs
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan

TORCH_LAYERS = ["--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm"]
TORCH_LAYERS += ["--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion", "--moe-grouped-gemm=false"]
META = ["--use-cpu-initialization", "--no-initialization"]


def parse(argv: Sequence[str], world_size: int) -> Namespace:
    """A validated command line, for rank 0 of ``world_size``."""
    from megatron.training import arguments

    from megatron_magi.mcore import entry

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(world_size), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    # A Hopper GPU, and no tokenizer, which would be downloaded.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    arguments.set_global_variables = lambda args: None
    sys.argv = [sys.argv[0], *argv]
    return entry._parse()


def build(args: Namespace) -> torch.nn.Module:
    """The model of rank 0, without memory for its parameters."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import global_vars
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        create_gloo_process_groups=False,
    )
    global_vars._GLOBAL_ARGS = args
    config = gpt_config_from_args(args)
    # What a tokenizer would have said.
    config.vocab_size = config.vocab_size or args.vocab_size
    try:
        with torch.device("meta"):
            return GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups(), True, True)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Parameters of this rank: in routed experts, cut over tensor-parallel ranks, and held by all."""
    counts = {"experts": 0, "cut": 0, "whole": 0}
    for name, parameter in model.named_parameters():
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        kind = "experts" if ".local_experts." in name else "cut" if is_cut else "whole"
        counts[kind] += parameter.numel()
    return counts


def plan(args: Namespace) -> dict[str, Any]:
    """Plans of a microbatch of packed documents, for full layers and for window layers if there are any."""
    from megatron_magi.mcore.settings import layer_masks, magi_config

    config = magi_config(args, envs.load().default_config())
    # Of which the balance is bounded, whatever dispatch is predicted to be the fastest.
    config = replace(config, dispatch=replace(config.dispatch, algorithm="affinity"))
    lengths = packed_lengths(args.seq_length * args.micro_batch_size)
    full = builders.varlen(doc_lengths=lengths, causal=True)
    made = make_plan(full, config, cp_size=args.context_parallel_size)
    found = {"full": _figures(made), "primary": layer_masks(args).primary.text}
    if args.window_size is not None:
        left, right = args.window_size
        window = builders.sliding_window(left=left, right=right, doc_lengths=lengths)
        found["window"] = _figures(make_plan(window, config, args.context_parallel_size, made.dispatch))
    return found


def num_samples(args: Namespace) -> list[int]:
    """Sequences for training, validation and test that Megatron's trainer asks the data for."""
    from megatron.training import global_vars, training

    global_vars._GLOBAL_ARGS = args
    return list(training.get_train_valid_test_num_samples())


def packed_lengths(total: int) -> list[int]:
    """Documents of very uneven lengths, ``total`` tokens in all."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while (rest := total - sum(lengths)) > 0:
        lengths.append(int(min(rest, 1 + rng.pareto(0.9) * total / 64)))
    return lengths


def _figures(made: Any) -> dict[str, Any]:
    stats = made.stats()
    ranks = [made.for_rank(rank).num_rows for rank in range(len(stats.areas))]
    return {"balance": stats.balance, "rows": ranks, "received_rows": list(stats.received_rows)}


def describe(argv: Sequence[str], world_size: int) -> dict[str, Any]:
    """All that the tests ask of a configuration."""
    args = parse(argv, world_size)
    names = [
        "train_iters",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "data_parallel_size",
        "num_layers",
        "hidden_size",
    ]
    names += ["tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "world_size"]
    names += ["num_attention_heads", "num_query_groups", "kv_channels", "padded_vocab_size", "vocab_size"]
    names += ["ffn_hidden_size", "moe_ffn_hidden_size", "moe_router_topk"]
    names += ["recompute_modules", "max_position_embeddings", "num_experts"]
    found: dict[str, Any] = {name: getattr(args, name) for name in names}
    found |= {"magi": args.magi_attention, "plan": plan(args), "num_samples": num_samples(args)}
    model = build(parse([*argv, *TORCH_LAYERS, *META], world_size))
    return found | {"parameters": count_parameters(model)}


def main() -> None:
    """Prints a list of descriptions, one a command line."""
    runs = json.loads(sys.argv[1])
    cpu_device.install(force=True)
    with contextlib.redirect_stdout(sys.stderr):
        found = [describe(argv, world_size) for world_size, argv in runs]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
