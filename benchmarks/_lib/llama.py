"""The models that are trained, as Megatron's command line has them: Llamas, and one with experts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

NUM_LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCABULARY = 16, 2048, 8192, 16, 4, 128, 32000
WINDOW = 1024


@dataclass(frozen=True)
class Model:
    """A Llama with heads of `HEAD_DIM`, or a model like it with experts.

    Attributes:
        layers: number of layers.
        hidden: width.
        ffn: width inside a feed-forward block, or inside one expert.
        heads: query heads.
        kv_heads: key/value heads; TE's a2a needs a multiple of CP.
        args: further arguments of Megatron.
        experts: of a layer, spread over all ranks; 0 for one feed-forward block.
        experts_a_token: of these, that each token goes through.
    """

    layers: int = NUM_LAYERS
    hidden: int = HIDDEN
    ffn: int = FFN
    heads: int = HEADS
    kv_heads: int = GROUPS
    args: tuple[str, ...] = ()
    experts: int = 0
    experts_a_token: int = 1

    @property
    def parameters(self) -> int:
        """Of the matrix products that a token goes through; the embedding is none."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * HEAD_DIM
        forward = self.hidden * (3 * self.ffn * self.experts_a_token + self.experts)
        return self.layers * (attention + forward) + self.hidden * VOCABULARY

    def expert_args(self) -> list[str]:
        """Megatron's arguments of the experts; tokens go to random ones, so that all ranks have the same work."""
        if not self.experts:
            return []
        args = ["--num-experts", str(self.experts), "--moe-router-topk", str(self.experts_a_token)]
        args += ["--moe-ffn-hidden-size", str(self.ffn), "--expert-model-parallel-size", str(world_size())]
        args += ["--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "none"]
        # Megatron asks the GPU whether it can multiply in groups.
        grouped = ["--moe-grouped-gemm"] if torch.cuda.is_available() else []
        return [*args, "--moe-router-force-load-balancing", *grouped]


RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


MODELS = {
    "llama_1b": Model(),
    "llama_1b_8_kv_heads": Model(kv_heads=8),
    "llama_8b": Model(32, 4096, 14336, 32, 8, RECOMPUTED),
    "llama_8b_2_layers": Model(2, 4096, 14336, 32, 8, RECOMPUTED),
    "qwen3_30b_a3b_2_layers": Model(2, 2048, 768, 32, 4, (*RECOMPUTED, "--qk-layernorm"), 128, 8),
}
"""The last two are slices for two GPUs: the real widths in fewer layers, with this vocabulary."""


def model_args(seq_length: int, data: Path, steps: int, model: Model = MODELS["llama_1b"]) -> list[str]:
    """Megatron's command line for the model and one sequence a step."""
    named = {
        "--num-layers": model.layers, "--hidden-size": model.hidden, "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads, "--num-query-groups": model.kv_heads,
        "--kv-channels": HEAD_DIM, "--seq-length": seq_length, "--max-position-embeddings": seq_length,
        "--micro-batch-size": 1, "--global-batch-size": 1,
        "--train-iters": steps, "--lr": 1e-4, "--lr-decay-iters": 1000, "--seed": 1234, "--eval-iters": 0,
        "--eval-interval": 1000, "--num-workers": 2, "--logging-level": 40, "--distributed-timeout-minutes": 3,
        "--log-interval": 1, "--attention-dropout": 0, "--hidden-dropout": 0, "--normalization": "RMSNorm",
        "--position-embedding-type": "rope", "--vocab-size": VOCABULARY, "--make-vocab-size-divisible-by": 1,
        "--null-tokenizer-eod-id": VOCABULARY - 1, "--tokenizer-type": "NullTokenizer", "--data-path": data,
        "--split": "1,0,0", "--transformer-impl": "transformer_engine", "--context-parallel-size": world_size(),
    }  # fmt: skip
    flags = ["--group-query-attention", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    flags += ["--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    flags += ["--no-create-attention-mask-in-dataloader", "--cross-entropy-loss-fusion"]
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        flags.append("--no-gradient-accumulation-fusion")
    return [*(str(item) for pair in named.items() for item in pair), *flags, *model.expert_args(), *model.args]


def world_size() -> int:
    """Ranks of this launch."""
    return int(os.environ.get("WORLD_SIZE", "2"))
