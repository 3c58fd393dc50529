"""Tiny models with random weights, and batches for them."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=7),
    "gemma2": Gemma2Config(**SIZES, **WINDOWS, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOWS, query_pre_attn_scalar=8),
    "gpt_oss": GptOssConfig(**SIZES, **WINDOWS, **EXPERTS, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=16),
    "llama4": Llama4TextConfig(
        **SIZES,
        attention_chunk_size=9,
        floor_scale=8,
        num_local_experts=2,
        intermediate_size_mlp=48,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
}


GEMMA4 = {
    **SIZES,
    **WINDOWS,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": WINDOWS["layer_types"] * 2}
"""The last two layers have the keys of the two before them."""
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
ON_CPUS = {
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, **NO_DROPOUT),
    "gemma4": Gemma4TextConfig(**GEMMA4),
    "gemma4_shared": Gemma4TextConfig(**{**GEMMA4, **SHARED}),
    "gemma3n_shared": Gemma3nTextConfig(
        **{**SIZES, **WINDOWS, **SHARED},
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    ),
}
"""Whose heads cannot be made wider, for kernels, or differ between layers."""


def make_model(name, attn_implementation="magi", seed=0):
    """A causal language model in fp32, of a name in `CONFIGS` or `ON_CPUS`, or a configuration.

    Weights are large enough for the mask to matter, and so are sinks.
    """
    torch.manual_seed(seed)
    config = {**CONFIGS, **ON_CPUS}[name] if isinstance(name, str) else name
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
            elif parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    return model


def packed_batch(lengths=(17, 1, 24, 11), seed=1):
    """One row of documents, as the flattening collator of transformers makes it."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=draw)
    labels = tokens.clone()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    labels[0, bounds[:-1]] = -100
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def padded_batch(seed=2):
    """Two rows, one with padding before it and one with padding after it."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, 26), generator=draw)
    attention_mask = torch.ones(2, 26, dtype=torch.int64)
    attention_mask[0, :4], attention_mask[1, 19:] = 0, 0
    labels = tokens.masked_fill(attention_mask == 0, -100)
    labels[0, 4] = -100  # what is before it is padding, of which eager attention makes something else
    return {"input_ids": tokens, "labels": labels, "attention_mask": attention_mask}


def loss_and_gradients(model, batch):
    """The loss, and the gradients by name."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients
