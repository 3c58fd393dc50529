"""Where this package holds on to Megatron and Transformer Engine: one table, checked when training starts.

A version of megatron-core is rows, not branches: `SEAMS` says from and until which release a row holds, `PARAMETERS`
and `OPTIONS` what other releases call otherwise or do not have. To port the package to another version, correct what
`check` names. Whatever is put into Megatron goes through `put`, which takes targets of the table only. Everything else
of Megatron is used by its public names and arguments.

How a target is touched:

- ``replaced``: another function is put in its place;
- ``wrapped``: another function is put in its place and calls it;
- ``repaired``: wrapped, because the wheel's own is defective (`wheel_repairs`);
- ``subclassed``: a class of this package derives from it and overrides what is named;
- ``relied on``: called, or called by Megatron, with exactly these arguments;
- ``exchanged in specs``: the class is taken out of layer specs, and ours put in.

Refused, whatever the version says (`validate`): attention in FP8, FP4, CUDA graphs of layers with attention,
`--yaml-cfg`, `--hybrid-context-parallel` and the rest of docs/megatron_refused.md.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from megatron_magi.mcore.versions import KNOWN_VERSIONS, found_version, release


@dataclass(frozen=True)
class Seam:
    """One place of Megatron that the adapter changes or relies on.

    Attributes:
        target: ``module:name`` or ``module:Class.name``, without ``megatron.`` in front.
        how: as above.
        parameters: that it must have, in this order; others may stand between and behind.
        by: module of this package.
        why: in few words.
        fragment: text that its source must have.
        needs: ``te`` where the target exists with Transformer Engine only, ``no te`` where it matters without TE and
            Apex only, ``cpu`` where it is touched on machines without GPUs only.
        since: first release that it holds for, such as ``0.19``; empty for all before.
        until: first release that it holds for no longer; empty for all after.
        mended: text that its source has where Megatron has mended itself what is repaired; the repair is then left out.
    """

    target: str
    how: str
    parameters: tuple[str, ...]
    by: str
    why: str
    fragment: str = ""
    needs: str = ""
    since: str = ""
    until: str = ""
    mended: str = ""


_TRAINING, _ARGUMENTS = "training.training", "training.arguments"
_GPT, _BUILDER = "core.models.gpt.gpt_model:GPTModel", "training.models.gpt"
_OPTIMIZER = "core.optimizer.distrib_optimizer:DistributedOptimizer"
_BLENDED = "core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder"
_HYBRID = "core.models.hybrid"
_EMBEDDINGS = "core.models.common.embeddings"
_LATENT = "core.transformer.multi_latent_attention"
_MTP = "core.transformer.multi_token_prediction"
_SPARSE = "core.transformer.experimental_attention_variant"
_CORE_ARGUMENTS = ("config", "layer_number", "attn_mask_type", "attention_type", "softmax_scale", "cp_comm_type",
                   "pg_collection")  # fmt: skip
_CORE_CALL = ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params")

SEAMS = (
    # Command line
    Seam(f"{_ARGUMENTS}:add_megatron_arguments", "wrapped", ("parser",), "arguments", "options of this package"),
    Seam(f"{_ARGUMENTS}:validate_args", "wrapped", ("args", "defaults"), "arguments", "checks before and after it"),
    Seam("training.argument_utils:gpt_config_from_args", "repaired", ("args",), "wheel_repairs",
         "takes the factor of scaled rotary angles", fragment='kwargs["rope_scaling"] = args.use_rope_scaling',
         since="0.19", mended="rope_scaling_factor"),
    # Trainer
    Seam("training:pretrain", "wrapped", ("cfg_container", "forward_step_func"), "user_step", "another name of it"),
    Seam(f"{_TRAINING}:pretrain", "wrapped", ("cfg_container", "train_valid_test_dataset_provider", "model_type",
         "forward_step_func"), "user_step", "dispatches what a user's forward step reads", since="0.19"),
    Seam(f"{_TRAINING}:pretrain", "wrapped", ("cfg_container", "train_valid_test_dataset_provider", "model_provider",
         "model_type", "forward_step_func"), "user_step", "likewise, with a function that builds chunks", until="0.19"),
    Seam("core.rerun_state_machine:RerunDataIterator.__next__", "relied on", ("self",), "loader",
         "copies what it keeps for replays", fragment="copy.copy(n)", since="0.19"),
    Seam("core.rerun_state_machine:RerunDataIterator.__next__", "repaired", ("self",), "wheel_repairs",
         "keeps a copy for replays", fragment="self.saved_microbatches.append(n)", until="0.19"),
    Seam(f"{_TRAINING}:get_forward_backward_func", "wrapped", (), "trainer", "schedules get the padded length"),
    Seam(f"{_TRAINING}:FullCudaGraphWrapper", "wrapped", ("forward_backward_func", "cuda_graph_warmup_steps",
         "use_single_mempool"), "cuda_graph", "captured iterations with plans that stay"),
    Seam(f"{_TRAINING}:dummy_train_step", "replaced", ("data_iterator",), "trainer", "every rank reads the data"),
    Seam(f"{_TRAINING}:training_log", "wrapped", ("loss_dict", "iteration", "skipped_iter", "grad_norm",
         "max_attention_logit"), "loss_log", "exact losses"),
    Seam(f"{_TRAINING}:evaluate", "relied on", ("forward_step_func", "data_iterator", "model"), "loss",
         "with --sft, means of ranks' means", fragment="val = val[:, 0] / val[:, 1].clamp(min=1)"),
    # Data
    Seam(f"{_TRAINING}:build_pretraining_data_loader", "wrapped", ("dataset", "consumed_samples"), "loader",
         "workers plan what they load"),
    Seam(f"{_BLENDED}.__init__", "wrapped", ("cls", "sizes", "is_built_on_rank", "config"), "user_step",
         "every rank reads the data"),
    Seam("core.utils:get_batch_on_this_tp_rank", "wrapped", ("batch", "has_cu_seqlens",
         "create_attention_mask_in_dataloader", "seq_length"), "user_step", "a shard has its own length",
         since="0.19"),
    Seam("core.utils:get_batch_on_this_tp_rank", "wrapped", ("batch", "is_sft",
         "create_attention_mask_in_dataloader", "seq_length"), "user_step", "likewise", until="0.19"),
    Seam("core.utils:get_batch_on_this_cp_rank", "wrapped", ("batch",), "user_step", "a shard is cut already"),
    # Model
    Seam(f"{_BUILDER}:GPTModel", "wrapped", ("config", "transformer_layer_spec", "vocab_size", "mtp_block_spec"),
         "model", "the builder names its class as a global", since="0.19"),
    Seam("core.models.gpt:GPTModel", "wrapped", ("config", "transformer_layer_spec", "vocab_size", "mtp_block_spec"),
         "model", "the builder, which is not in the wheel, imports it from here", until="0.19"),
    Seam(f"{_GPT}.__init__", "subclassed", ("config", "transformer_layer_spec", "vocab_size", "mtp_block_spec"),
         "model", "attention by plan"),
    Seam(f"{_GPT}.forward", "subclassed", ("input_ids", "position_ids", "attention_mask", "packed_seq_params",
         "padding_mask"), "model", "the carrier enters here"),
    Seam(f"{_GPT}.build_schedule_plan", "subclassed", ("input_ids", "position_ids", "attention_mask",
         "packed_seq_params", "padding_mask"), "model", "the carrier enters here"),
    Seam(f"{_GPT}._preprocess", "subclassed", ("input_ids", "position_ids", "packed_seq_params", "padding_mask"),
         "model", "angles and padding of a shard"),
    Seam("core.packed_seq_params:PackedSeqParams", "subclassed", ("qkv_format", "max_seqlen_q", "max_seqlen_kv"),
         "carrier", "carries the plans to every layer"),
    Seam(f"{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.forward", "wrapped", ("max_seq_len", "offset",
         "packed_seq", "cp_group"), "rotary", "angles of all positions (on instances)"),
    Seam(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward", "wrapped", ("max_seq_len", "offset",
         "packed_seq", "cp_group"), "rotary", "likewise"),
    Seam("core.transformer.attention:apply_rotary_pos_emb", "wrapped", ("t", "freqs", "config", "cu_seqlens", "mscale",
         "cp_group"), "rotary", "the fused kernel takes one row of angles a place"),
    Seam(f"{_LATENT}:MultiLatentAttention.forward", "relied on", ("hidden_states",
         "packed_seq_params"), "rotary", "a hook takes the carrier from its arguments"),
    Seam(f"{_MTP}:roll_tensor", "replaced", ("tensor", "shifts", "dims", "cp_group",
         "packed_seq_params"), "mtp", "successors in dispatched order"),
    Seam("core.models.gpt.gpt_model:process_mtp_loss", "wrapped", ("loss_mask", "config", "cp_group",
         "packed_seq_params"), "mtp", "losses are means over the tokens of all ranks"),
    Seam(f"{_MTP}:MTPLossLoggingHelper.save_metrics_to_tracker", "relied on", ("layer_number", "num_layers"),
         "logged_losses", "sums of losses under this name", fragment='tracker["loss_values"][layer_number] +=',
         since="0.19"),
    Seam(f"{_MTP}:MTPLossLoggingHelper.save_loss_to_tracker", "relied on", ("layer_number", "num_layers"),
         "logged_losses", "likewise", fragment='tracker["values"][layer_number] +=', until="0.19"),
    Seam("core.transformer.moe.router:get_tokens_per_expert_and_token_count", "repaired", ("routing_map",
         "reduce_group", "topk", "with_padding_mask"), "experts", "counts padded tokens"),
    Seam("core.transformer.moe.router:TopKRouter._apply_expert_bias", "repaired", ("self", "routing_map",
         "padding_mask"), "experts", "likewise", fragment="routing_map & (~padding_mask)",
         mended="(~padding_mask).unsqueeze(-1)"),
    Seam("core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss", "repaired", ("self", "activation",
         "valid_token_count"), "experts", "weighs by this rank's tokens alone", fragment="aux_loss * num_tokens)",
         until="0.19"),
    Seam("core.transformer.moe.router:TopKRouter.apply_z_loss", "repaired", ("self", "logits", "padding_mask"),
         "experts", "likewise", fragment="z_loss / moe_z_loss_coeff,"),
    Seam(f"{_GPT}.compute_language_model_loss", "subclassed", ("self", "labels", "logits"), "model",
         "takes gathered logits for a part of the vocabulary"),
    Seam("training.models.hybrid:HybridModel", "wrapped", ("config", "hybrid_stack_spec", "vocab_size",
         "hybrid_layer_pattern"), "hybrid", "the builder names its class as a global"),
    Seam(f"{_HYBRID}.hybrid_model:HybridModel.__init__", "subclassed", ("config", "hybrid_stack_spec", "vocab_size",
         "hybrid_layer_pattern"), "hybrid", "attention by plan"),
    Seam(f"{_HYBRID}.hybrid_model:HybridModel.forward", "subclassed", ("input_ids", "position_ids", "attention_mask",
         "packed_seq_params", "padding_mask"), "hybrid", "the carrier enters here"),
    Seam(f"{_HYBRID}.hybrid_model:process_mtp_loss", "wrapped", ("loss_mask", "config", "cp_group",
         "packed_seq_params"), "hybrid", "another name of GPT's"),
    Seam(f"{_MTP}:MultiTokenPredictionBlock.forward", "relied on", ("padding_mask",),
         "hybrid", "a hook adds the mask of padding"),
    Seam(f"{_HYBRID}.hybrid_block:TENorm", "replaced", ("config", "hidden_size", "eps"), "hybrid",
         "the last norm of a stack, without Transformer Engine"),
    # Attention
    Seam("core.transformer.dot_product_attention:DotProductAttention.__init__", "exchanged in specs", _CORE_ARGUMENTS,
         "layer_spec", "constructed with these"),
    Seam("core.transformer.dot_product_attention:DotProductAttention.forward", "exchanged in specs", _CORE_CALL,
         "layer_spec", "called with these"),
    Seam("core.extensions.transformer_engine:TEDotProductAttention.__init__", "exchanged in specs", _CORE_ARGUMENTS,
         "layer_spec", "constructed with these", needs="te"),
    Seam("core.extensions.transformer_engine:TEDotProductAttention.forward", "exchanged in specs", _CORE_CALL,
         "layer_spec", "called with these", needs="te"),
    Seam("core.transformer.utils:make_sharded_tensors_for_checkpoint", "relied on", ("state_dict", "prefix",
         "tensor_parallel_layers_axis_map", "sharded_offsets", "tp_group", "dp_cp_group"), "core_attention",
         "sinks under Megatron's keys"),
    # Sparse attention
    Seam(f"{_SPARSE}.dsa:DSAttention.__init__", "exchanged in specs", ("config", "submodules", "layer_number",
         "attn_mask_type", "attention_type", "softmax_scale", "k_channels", "v_channels", "cp_comm_type",
         "pg_collection"), "sparse_attention", "constructed with these", since="0.19"),
    Seam(f"{_SPARSE}.dsa:DSAttention.forward", "exchanged in specs", ("query", "key", "value", "attention_mask", "x",
         "qr", "packed_seq_params", "up_v_weight"), "sparse_attention", "called with these",
         fragment="self.indexer.forward_before_topk(x, qr, packed_seq_params)", since="0.19"),
    Seam(f"{_SPARSE}.dsa:DSAIndexer.forward_before_topk", "relied on", ("x", "qr", "packed_seq_params"),
         "sparse_attention", "queries, keys and weights of the indexer", fragment="return q, k, weights", since="0.19"),
    Seam(f"{_SPARSE}.absorbed_mla:AbsorbedMLASelfAttention.forward", "relied on", ("hidden_states",
         "packed_seq_params"), "rotary", "a hook takes the carrier from its arguments", since="0.19"),
    Seam(f"{_SPARSE}.dsa:DSAIndexerLossLoggingHelper.save_loss_to_tracker", "relied on", ("loss", "layer_number",
         "num_layers", "reduce_group"), "sparse_attention", "sums parts of the loss over ranks", since="0.19"),
    Seam("core.pipeline_parallel.schedules:forward_step_calc_loss", "relied on", ("config", "cp_group_size"),
         "sparse_attention", "the indexer's loss of a rank weighs as many times as there are ranks",
         fragment="loss_scale * cp_size_for_scaling / num_microbatches", since="0.19"),
    # Linear layers
    Seam("core.ssm.mamba_mixer:MambaMixer.forward", "exchanged in specs", ("hidden_states", "inference_context",
         "packed_seq_params"), "linear_layers", "called with these"),
    Seam("core.ssm.mamba_mixer:MambaMixer._ssm_training", "relied on", ("zxBCdt", "packed_seq_params"), "linear_layers",
         "begins a new state for each document", fragment="seq_idx = packed_seq_params.seq_idx"),
    Seam("core.ssm.mamba_context_parallel:_undo_attention_load_balancing", "wrapped", ("input_", "cp_size",
         "packed_seq_params"), "linear_layers", "any layout into the order of the sequence"),
    Seam("core.ssm.mamba_context_parallel:_redo_attention_load_balancing", "wrapped", ("input_", "cp_size",
         "packed_seq_params"), "linear_layers", "and back"),
    Seam("core.ssm.gated_delta_net.gdn:GatedDeltaNet.forward", "exchanged in specs", ("hidden_states",
         "attention_mask", "packed_seq_params"), "linear_layers", "called with these",
         fragment="cu_seqlens=cu_seqlens_q", since="0.19"),
    Seam("core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens", "subclassed", ("cu_seqlens_padded",
         "cu_seqlens_actual"), "linear_layers", "documents of any length", since="0.19"),
    Seam("core.ssm.gated_delta_net.gdn:_build_thd_cp_a2a_perm", "wrapped", ("cu_seqlens", "cp_size", "t_global"),
         "linear_layers", "any layout into the order of the sequence, and back", since="0.19", until="0.20"),
    Seam("core.ssm.gated_delta_net.common:_build_thd_cp_a2a_perm", "wrapped", ("cu_seqlens", "cp_size", "t_global"),
         "linear_layers", "likewise", since="0.20"),
    # Defects of the wheel
    Seam("core.datasets.utils:compile_helpers", "repaired", (), "wheel_repairs", "the wheel has no Makefile",
         fragment='["make", "-C"'),
    Seam("core.transformer.torch_norm:WrappedTorchNorm.__new__", "repaired", ("cls", "config"), "wheel_repairs",
         "norms of torch under sequence parallelism", fragment="assert not config.sequence_parallel"),
    Seam("core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_submodules", "repaired",
         ("num_experts", "moe_grouped_gemm", "use_te_op_fuser"), "wheel_repairs", "says that TE is missing",
         fragment="backend = TESpecProvider()"),
    Seam(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache", "repaired", ("self",
         "seq_len", "offset", "dtype", "packed_seq"), "wheel_repairs", "any number of context-parallel ranks",
         fragment="self.forward(seq_len, offset, packed_seq)", until="0.20"),
    Seam(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache", "repaired", ("self",
         "seq_len", "offset", "dtype", "packed_seq", "cp_group"), "wheel_repairs", "likewise",
         fragment="self.forward(seq_len, offset, packed_seq=packed_seq, cp_group=cp_group)", since="0.20"),
    Seam(f"{_MTP}:is_inference_column_parallel_linear", "repaired", ("module",),
         "wheel_repairs", "without Transformer Engine its classes are no classes", needs="no te", since="0.20"),
    Seam(f"{_LATENT}:MLASelfAttention._qkv_down_projection", "repaired", ("self", "hidden_states"), "wheel_repairs",
         "gradients of the rotary key from all heads",
         fragment="kv_combined, _ = self.linear_kv_down_proj(hidden_states)"),
    Seam(f"{_LATENT}:FusedMLASelfAttention._qkv_down_projection", "repaired", ("self", "hidden_states"),
         "wheel_repairs", "likewise", fragment="return q_compressed, kv_combined"),
    Seam(f"{_LATENT}:MLASelfAttention.__init__", "repaired", ("self", "config"), "wheel_repairs",
         "gradients of the queries' norm counted once", fragment="self.q_layernorm = "),
    Seam(f"{_LATENT}:FusedMLASelfAttention.__init__", "repaired", ("self", "config"), "wheel_repairs", "likewise",
         fragment="self.q_layernorm = "),
    Seam(f"{_SPARSE}.absorbed_mla:AbsorbedMLASelfAttention.__init__", "repaired", ("self", "config"), "wheel_repairs",
         "gradients of the rotary key from all heads", fragment="self.linear_kv_down_proj = ", since="0.19"),
    Seam("core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads", "relied on", ("model",
         "config"), "wheel_repairs", "norms of queries and keys by their names",
         fragment='config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)'),
    Seam(f"{_OPTIMIZER}.state_dict", "repaired", ("self",), "wheel_repairs", "steps of torch's AdamW",
         'steps = list(set([s["step"].item() for s in inner_state_dict["state"].values()]))', "no te"),
    Seam(f"{_OPTIMIZER}.load_state_dict", "repaired", ("self", "state_dict"), "wheel_repairs", "likewise",
         's["step"] = step', "no te"),
    Seam(f"{_OPTIMIZER}._set_main_param_and_optimizer_states", "repaired", ("self", "model_param", "tensors"),
         "wheel_repairs", "likewise", "if not isinstance(tensors[key], torch.Tensor):", "no te"),
    # Machines without GPUs
    Seam("training.initialize:_warmup_jit_function", "replaced", (), "without_gpu",
         "its draws would make weights depend on the parallelism", needs="cpu"),
    Seam("core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu", "replaced", ("tensor", "as_numpy",
         "record_stream"), "without_gpu", "a tensor that is on the CPU becomes an array too", needs="cpu"),
)  # fmt: skip
"""For `KNOWN_VERSIONS` and main, with or without Transformer Engine, of which nothing itself is touched."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that some releases do not have.

    Attributes:
        target: the function or data class.
        name: as this package says it.
        older: what older releases call it; empty where they have nothing like it.
        default: without such a parameter, the one value that means what the release does; ``...`` for any.
    """

    target: str
    name: str
    older: str = ""
    default: Any = None


PARAMETERS = (
    Parameter("core.utils:get_batch_on_this_tp_rank", "has_cu_seqlens", older="is_sft"),
    Parameter("core.utils:get_batch_on_this_cp_rank", "use_per_sequence_balancing", default=False),
    Parameter("core.datasets.gpt_dataset:GPTDatasetConfig", "inter_document_masking", default=False),
    # Sequences of a length are told apart by it where documents are packed, which these releases' loaders do not do.
    Parameter("core.packed_seq_params:PackedSeqParams", "tokens_per_sample", default=...),
    Parameter(f"{_TRAINING}:pretrain", "model_provider", default=...),
    # Latent attention in hybrid models, for which these releases' patterns have no letter.
    Parameter(f"{_HYBRID}.hybrid_block:HybridStackSubmodules", "mla_layer", default=...),
)

OPTIONS: dict[str, Any] = {
    "dataloader_inter_document_masking": False,
    "flash_attention_version": None,
    "logits_load_dir": None,
    "logits_save_dir": None,
}
"""Options of Megatron's command line that this package reads and some releases do not have, with their values there."""

_CHANGING = ("replaced", "wrapped", "repaired")
_ORIGINAL = "_megatron_magi_original"


def check(*, on_cpu: bool = False) -> None:
    """Finds every target and compares it with the table.

    What `put` has put is seen through.

    Args:
        on_cpu: also what is touched on machines without GPUs.

    Raises:
        ValueError: targets are missing or not as expected; names all of them.
    """
    wanted = [seam for seam in SEAMS if seam.needs not in _absent(on_cpu) and _is_for(seam, found_version())]
    problems = [f"  {seam.target}: {problem}" for seam in wanted if (problem := _problem(seam))]
    if problems:
        raise ValueError(
            f"megatron-core: version {found_version()} is not as megatron_magi knows it "
            f"({', '.join(KNOWN_VERSIONS)}); see megatron_magi/mcore/seams.py\n" + "\n".join(problems)
        )


def _absent(on_cpu: bool) -> set[str]:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    found = {"no te"} if HAVE_APEX_OR_TE else set()
    return found | ({"te"} if not HAVE_TE else set()) | ({"cpu"} if not on_cpu else set())


def _is_for(seam: Seam, version: str) -> bool:
    """Does a row hold for a release?"""
    found = release(version)
    return (not seam.since or found >= release(seam.since)) and (not seam.until or found < release(seam.until))


def _is_mended(seam: Seam) -> bool:
    return bool(seam.mended) and seam.mended in inspect.getsource(original(seam.target))


def needed(target: str) -> bool:
    """Is there something to put at a target of this release of Megatron, which has not mended it itself?"""
    rows = [seam for seam in SEAMS if seam.target == target and _is_for(seam, found_version())]
    return any(seam.how in _CHANGING and not _is_mended(seam) for seam in rows)


def named(target: str, **arguments: Any) -> dict[str, Any]:
    """Keyword arguments of a function, or fields of a data class, as this release of Megatron names them.

    Args:
        target: of rows of `PARAMETERS`.
        **arguments: as this package names them.

    Raises:
        ValueError: the release has no such parameter, and does not do what the argument says.
    """
    known = inspect.signature(original(target)).parameters
    for row in PARAMETERS:
        if row.target != target or row.name not in arguments or row.name in known:
            continue
        value = arguments.pop(row.name)
        if row.older:
            arguments[row.older] = value
        elif row.default is not ... and value != row.default:
            raise ValueError(f"{row.name}: megatron-core {found_version()} has nothing like it, got {value!r}")
    return arguments


def _problem(seam: Seam) -> str:
    """The reason why a target is not as expected; empty if it is."""
    try:
        found = original(seam.target)
    except (ImportError, AttributeError) as error:
        return f"not found ({error})"
    names = iter(inspect.signature(found).parameters)
    if missing := [name for name in seam.parameters if name not in names]:
        return f"has no parameter {missing[0]!r} where one is expected, its signature is {inspect.signature(found)}"
    if seam.fragment and seam.fragment not in inspect.getsource(found) and not _is_mended(seam):
        return f"its source has no {seam.fragment!r}"
    return ""


def find(target: str) -> Any:
    """The object that is at a target now."""
    owner, name = _owner(target)
    return getattr(owner, name)


def _owner(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(f"megatron.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def original(target: str) -> Any:
    """The object that was at a target before `put` was first called for it."""
    found = find(target)
    return getattr(found, _ORIGINAL, found)


def put(target: str, substitute: Any) -> None:
    """Puts ``substitute`` into Megatron; again is allowed and replaces what was put.

    Args:
        target: of a row of `SEAMS` that changes something.
        substitute: a function.
    """
    assert any(seam.target == target and seam.how in _CHANGING for seam in SEAMS), f"{target} is not in the table"
    owner, name = _owner(target)
    before = original(target)
    if substitute is not before:
        setattr(substitute, _ORIGINAL, before)
    # Set on a class after its creation, `__new__` is not made a static method by itself.
    setattr(owner, name, staticmethod(substitute) if name == "__new__" else substitute)
