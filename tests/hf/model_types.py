"""A tiny model of every type of transformers' causal language models, whose thresholds of length are tiny too."""

import inspect

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.hf.models import VOCABULARY

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_SIZES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    32: "hidden_size d_model n_embd dim_model embedding_size",
    48: "intermediate_size intermediate_size_mlp ffn_dim d_ff n_inner ffn_hidden_size dim_ff encoder_ffn_dim "
    "decoder_ffn_dim",
    16: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size q_lora_rank kv_lora_rank",
    8: "head_dim dim_head global_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim "
    "hidden_size_per_layer_input query_pre_attn_scalar swa_head_dim",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts swa_num_attention_heads",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_key_value_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k swa_num_key_value_heads",
    1: "encoder_layers num_encoder_layers n_group topk_group first_k_dense_replace",
    0: "zero_expert_num attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout dropout activation_dropout "
    "attention_probs_dropout_prob hidden_dropout_prob dropout_p layerdrop decoder_layerdrop classifier_dropout",
}
_FLOATS = ("drop", "pdrop")
_THRESHOLDS = {
    "sliding_window": 7,
    "attention_chunk_size": 9,
    "floor_scale": 8,
    "log_scaling_n_floor": 8,
    "original_max_position_embeddings": 8,
}
_OPTIONS = {"is_decoder": True, "no_rope_layers": [1, 0], "use_cache": False}
_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_OWN = {
    "gemma3n": {**_FOUR_LAYERS, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4": {**_FOUR_LAYERS, "num_kv_shared_layers": 2},
    "gemma4_unified": {**_FOUR_LAYERS, "num_kv_shared_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Options by the beginning of a type's name."""

MOST_PARAMETERS = 3_000_000


def config_of(model_type, **more):
    """The configuration of a type's language model; what it does not know of ``more`` is passed over."""
    kind = type(CONFIG_MAPPING[model_type]().get_text_config())
    options = {name: size for size, names in _SIZES.items() for name in names.split()}
    options = {name: float(x) if "drop" in name else x for name, x in options.items()}
    own = [x for name, x in _OWN.items() if model_type in (name, f"{name}_text")]
    options = {**options, **_THRESHOLDS, **_OPTIONS, **_TOKENS, **(own[0] if own else {}), **more}
    known = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__dataclass_fields__", ()))
    config = kind(**{name: x for name, x in options.items() if name in {*known, *getattr(kind, "attribute_map", ())}})
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(x for x in ropes.values() if isinstance(x, dict))]:
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = 8
    return config


def make_tiny(model_type, attn_implementation, **more):
    """A model in evaluation.

    Raises:
        ValueError: it cannot be made so small.
    """
    with torch.device("meta"):
        sizes = AutoModelForCausalLM.from_config(config_of(model_type, **more)).parameters()
        if (size := sum(parameter.numel() for parameter in sizes)) > MOST_PARAMETERS:
            raise ValueError(f"{model_type}: {size} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **more), attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model.eval()


RETRIES = ({}, {"num_key_value_heads": 4}, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
"""Options of which the first that a type takes are used: MLA has as many heads of keys as of queries."""


NOT_MADE = (
    StrictDataclassError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What configurations and models raise for sizes that do not fit them."""

UNMADE = {
    "bamba",
    "blt",
    "cohere_compass_text",
    "dbrx",
    "dots1",
    "emu3",
    "gemma4_assistant",
    "git",
    "gpt_neo",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "mamba2",
    "mllama",
    "musicgen",
    "musicgen_melody",
    "phi4_multimodal",
    "reformer",
    "roc_bert",
    "xmod",
    "zamba",
    "zamba2",
}
"""Types whose configuration takes other options, or that are made of a language model and more."""
