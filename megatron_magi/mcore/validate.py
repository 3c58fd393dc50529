"""What `--attention-backend magi` cannot do, said before anything is built."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_magi import envs
from megatron_magi.checks import int_at_least
from megatron_magi.config import MagiConfig
from megatron_magi.mask.source import MaskSource
from megatron_magi.mcore import hybrid_pattern
from megatron_magi.mcore.argv import FLAG, PACKING_FIELD
from megatron_magi.mcore.sample_packing import MEGATRONS, is_asked_for
from megatron_magi.plan.nodes import nodes_in_use

_ROUTER = "moe_router", "moe_preprocess"
_GRAPH_MODULES = {"local": _ROUTER, "transformer_engine": ("mlp", *_ROUTER)}
"""What graphs of layers may hold. Megatron's own are of a whole layer for each other module that is named."""


def check_argv() -> None:
    """Refuses arguments that the checks would not see.

    Raises:
        ValueError: the process's command line asks for magi and for a YAML file of arguments.
    """
    if FLAG in sys.argv:
        refuse_yaml()


def refuse_yaml() -> None:
    """Raises ValueError if the process's command line names a YAML file of arguments, which no check would see."""
    if any(argument.partition("=")[0] == "--yaml-cfg" for argument in sys.argv):
        raise ValueError("yaml_cfg: not supported; use --config FILE or give the arguments themselves")


def validate_arguments(args: Namespace) -> None:
    """Checks a parsed command line, before Megatron checks it.

    Raises:
        ValueError: an argument or a variable asks for something that is not supported; names it and says what to do.
    """
    _check_own(args)
    _check_later(args)
    envs.check_te_attention()
    _check_attention(args)
    _check_precision(args)
    _check_layers(args)
    _check_schedule(args)


def check_unused(args: Namespace) -> None:
    """Refuses options that another attention backend would ignore.

    Raises:
        ValueError: there is one.
    """
    own = ["magi_mask", "magi_layer_masks", "magi_chunk_size", "magi_overlap_degree", PACKING_FIELD]
    for name in own:
        if getattr(args, name, None) is not None:  # arguments from a YAML file do not have it
            name = MEGATRONS if name == PACKING_FIELD else name
            raise ValueError(f"{name}: needs --attention-backend magi")
    if getattr(args, "magi_layout", "auto") != "auto":
        raise ValueError("magi_layout: needs --attention-backend magi")


def settle_arguments(args: Namespace) -> list[str]:
    """Turns off, in place, optimizations that do not fit dispatched tokens.

    Returns:
        One notice for each option that was changed or has no effect.
    """
    # Masks are made from documents, never as tensors of seqlen^2.
    args.create_attention_mask_in_dataloader = False
    notices = []
    if args.context_parallel_size > 1 and args.cp_comm_type != ["p2p"]:
        notices.append(_cp_comm_type_notice(args))
    if args.context_parallel_size > 1 and hybrid_pattern.has_sparse_layers(args):
        args.cp_comm_type = ["allgather"]  # the one that Megatron takes with sparse attention
    if args.flash_attention_version is not None:
        notices.append("flash_attention_version: no effect with --attention-backend magi, which has its own kernels")
    if args.apply_rope_fusion and args.multi_latent_attention and _is_rotary(args):
        args.apply_rope_fusion = False
        notices.append(
            "apply_rope_fusion: off, the fused kernel cannot rotate dispatched tokens with multi-latent attention"
        )
    return notices


def _cp_comm_type_notice(args: Namespace) -> str:
    """What becomes of ways to communicate; of a2a+p2p the sizes remain, which need not be those of nodes there."""
    notice = "cp_comm_type: no effect with --attention-backend magi, which sends what its plan says"
    sizes = args.hierarchical_context_parallel_sizes
    per_node = nodes_in_use(math.prod(sizes[:-1]), args.context_parallel_size) if sizes else None
    if "a2a+p2p" not in args.cp_comm_type or per_node is None:
        return notice
    return (
        f"{notice}; hierarchical_context_parallel_sizes {' '.join(map(str, sizes))} means {sizes[-1]} nodes of "
        f"{per_node} ranks; drop both options if all context-parallel ranks are on one host"
    )


def chunk_notices(args: Namespace, padded: int) -> list[str]:
    """A notice if a chunk is longer than a rank's share of a microbatch, which padding then fills up.

    Args:
        args: a validated command line.
        padded: tokens a sequence with its padding.
    """
    share = -(-args.seq_length * args.micro_batch_size // args.context_parallel_size)
    if args.context_parallel_size == 1 or (args.magi_chunk_size or 0) <= share:
        return []
    return [
        f"magi_chunk_size: {args.magi_chunk_size} tokens are more than a rank's share of {share}, so sequences of "
        f"{args.seq_length} tokens are padded to {padded}"
    ]


def check_full_validation(args: Namespace, padded: int, padded_alone: int) -> None:
    """Refuses validation on whole sets where its microbatches, of one sequence each in Megatron, have another length.

    Args:
        args: a validated command line.
        padded: tokens a sequence with its padding, in training.
        padded_alone: likewise, of a sequence that is a microbatch by itself.

    Raises:
        ValueError: they do not have the length of training, or a pipeline expects as many sequences as in training, or
            there are several sets and interleaved stages.
    """
    if args.multiple_validation_sets and args.virtual_pipeline_model_parallel_size is not None:
        raise ValueError(
            "multiple_validation_sets: Megatron takes the sets for data of interleaved stages' chunks; "
            "leave out the interleaving"
        )
    if args.micro_batch_size == 1:
        return
    if args.pipeline_model_parallel_size > 1:
        found = f"pipeline stages expect micro_batch_size={args.micro_batch_size}"
    elif padded != padded_alone:
        found = f"which is padded from {args.seq_length} to {padded_alone} tokens, in training to {padded}"
    else:
        return
    raise ValueError(
        f"full_validation: Megatron takes one sequence a microbatch there, {found}; give --micro-batch-size 1"
    )


def check_evaluation(args: Namespace) -> None:
    """Refuses evaluations with another number of sequences a microbatch.

    Args:
        args: a command line that Megatron has validated.

    Raises:
        ValueError: they have another.
    """
    if getattr(args, "eval_micro_batch_size", args.micro_batch_size) != args.micro_batch_size:
        raise ValueError(
            f"eval_micro_batch_size: must be micro_batch_size={args.micro_batch_size}, got {args.eval_micro_batch_size}"
        )


def check_padding(args: Namespace, seq_length: int) -> None:
    """Refuses padding where Megatron sizes further buffers by ``args.seq_length``, or counts it.

    Args:
        args: a validated command line.
        seq_length: tokens a sequence in Megatron's tensors, all context-parallel ranks together.

    Raises:
        ValueError: an option has buffers or means of its own and the length is padded.
    """
    if seq_length == args.seq_length:
        return
    advice = f"this sequence length is padded from {args.seq_length} to {seq_length}; give --seq-length {seq_length}"
    if args.tp_comm_overlap:
        raise ValueError(f"tp_comm_overlap: its buffers do not know that {advice}")
    if args.cuda_graph_impl == "transformer_engine":
        raise ValueError(f"cuda_graph_impl: transformer_engine captures without knowing that {advice}")
    if args.num_experts:
        check_padded_experts(args, advice)


def check_packing(args: Namespace) -> None:
    """Refuses what does not go with microbatches of packed samples, which differ in number and length.

    Args:
        args: a validated command line that asks for them.

    Raises:
        ValueError: there is something.
    """
    name, scheduler = MEGATRONS, getattr(args, PACKING_FIELD)
    if scheduler != "dp_balanced":
        raise ValueError(f"{name}: only dp_balanced is supported, got {scheduler}")
    if args.micro_batch_size != 1:
        raise ValueError(f"{name}: reads sample by sample; give --micro-batch-size 1")
    if not args.calculate_per_token_loss:
        raise ValueError(f"{name}: microbatches have different numbers of tokens; give --calculate-per-token-loss")
    if args.reset_attention_mask:
        raise ValueError(f"{name}: samples are documents, or have bounds of theirs; drop --reset-attention-mask")
    if args.cuda_graph_impl != "none":
        raise ValueError(f"{name}: CUDA graphs have microbatches of one length; drop --cuda-graph-impl")
    if args.tp_comm_overlap:
        raise ValueError("tp_comm_overlap: its buffers are of one length, packed microbatches are not")
    if args.num_experts:
        if args.moe_token_dispatcher_type == "allgather":
            raise ValueError(f"moe_token_dispatcher_type: allgather expects one length, {name} has many; give alltoall")
        is_flex = args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend == "hybridep"
        if is_flex and not getattr(args, "moe_hybridep_pad_uneven_dispatch_inputs", False):
            raise ValueError(
                f"moe_flex_dispatcher_backend: hybridep expects one length on all ranks, {name} has many; give "
                "--moe-hybridep-pad-uneven-dispatch-inputs where Megatron has it, or another dispatcher"
            )
        check_router_sequences(args, f"--{name.replace('_', '-')} makes one of several samples; drop it")
        check_padded_experts(args, f"microbatches of --{name.replace('_', '-')} are padded")


def check_layout(args: Namespace) -> None:
    """Refuses multi-token prediction in a later model chunk of the first pipeline stage.

    Megatron means to, but looks at the other chunks (pipeline_parallel_layer_layout.py:131), and then leaves the
    gradients of that chunk's copy of the embedding out.

    Args:
        args: a command line that Megatron has validated.

    Raises:
        ValueError: the layout has it there.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = args.pipeline_model_parallel_layout
    if layout is None or not args.mtp_num_layers:
        return
    _, *later = PipelineParallelLayerLayout(layout, args.pipeline_model_parallel_size).layout[0]
    if any(LayerType.mtp in chunk for chunk in later):
        raise ValueError(
            f"pipeline_model_parallel_layout: {layout} has multi-token prediction in a later chunk of the first "
            "pipeline stage, where Megatron does not add up the gradients of the embedding; move it to another stage"
        )


def check_config(args: Namespace, default: MagiConfig) -> None:
    """Refuses a configuration, as the environment gives it, that does not go with Megatron.

    Args:
        args: a validated command line.
        default: what holds where the command line says nothing.

    Raises:
        ValueError: it asks for uneven shards, for sums of gradients that are summed already, for queries that travel in
            captured iterations, or for groups of heads where the largest logits are wanted.
    """
    if default.comm.dsink_all_reduce == "sum" and args.softmax_type == "learnable" and args.context_parallel_size > 1:
        raise ValueError(
            "dsink_all_reduce: 'sum' adds up gradients of sinks that Megatron adds up again; give 'none' "
            "(MAGI_ATTENTION_DSINK_ALL_REDUCE_OP)"
        )
    if default.dispatch.uneven_shard:
        raise ValueError("uneven_shard: Megatron's pipeline stages exchange tensors of one shape; drop it")
    is_captured = args.context_parallel_size > 1 and getattr(args, "cuda_graph_impl", "none") == "full_iteration"
    if is_captured and default.dispatch.queries == "travel":
        raise ValueError("dispatch.queries: 'travel' (MAGI_ATTENTION_QO_COMM=1) does not go with captured iterations")
    wants_logits = args.qk_clip or args.log_max_attention_logit
    if default.dispatch.flatten_head_groups and args.context_parallel_size > 1 and wants_logits:
        raise ValueError(
            "dispatch.flatten_head_groups: True (MAGI_ATTENTION_FLATTEN_HEAD_GROUPS=1) does not go with --qk-clip or "
            "--log-max-attention-logit, which want the largest logit of each head"
        )


def check_masks(
    args: Namespace, default: MaskSource, layers: Sequence[MaskSource], windows: Sequence[tuple[int, int] | None]
) -> None:
    """Refuses masks that do not fit each other or the other arguments.

    Args:
        args: a validated command line.
        default: the mask of ``--magi-mask``, or what holds without.
        layers: masks of layers that have their own.
        windows: of all layers.

    Raises:
        ValueError: there is one.
    """
    has_window = any(window is not None for window in windows)
    if has_window and (layers or default != MaskSource("documents")):
        raise ValueError(
            "window_size: its layers have windows inside documents and not the mask of --magi-mask; drop it and name "
            "sliding_window for these layers by --magi-layer-masks"
        )
    if has_window and args.window_size[1] != 0:
        raise ValueError(
            f"window_size: a causal window ends at the query, got {args.window_size[0]},{args.window_size[1]}; give "
            f"{args.window_size[0]},0, or name sliding_window with its right side by --magi-layer-masks"
        )
    names = {source.text for source in (default, *layers)}
    if is_asked_for(args) and (found := names & {"causal", "prefix_tree"}):
        raise ValueError(
            f"magi_mask: {found.pop()} knows no bounds of samples that --sequence-packing-scheduler packs; name a mask "
            "inside documents"
        )
    if hybrid_pattern.linear_layers(args) and "prefix_tree" in names:
        raise ValueError(
            "magi_mask: in a prefix_tree the samples branch off a shared prefix, and linear layers (M, G) have one "
            "state, which runs from each sample into the next; give each sample its own prefix, as a document"
        )


def check_model(args: Namespace, model: str = "gpt") -> None:
    """Refuses models that Megatron would build otherwise than the command line says.

    Args:
        args: a command line that Megatron has validated.
        model: what the script builds, ``gpt`` or ``hybrid``.

    Raises:
        ValueError: one is asked for.
    """
    if model == "gpt" and args.hybrid_layer_pattern is not None:
        raise ValueError(
            "hybrid_layer_pattern: this script trains GPTs, which have attention and an MLP in every layer; "
            "pretrain_scripts/pretrain_hybrid.py trains hybrid models"
        )
    if model == "hybrid" and args.hybrid_layer_pattern is None:
        raise ValueError("hybrid_layer_pattern: hybrid models need it; *-*- is two layers of a GPT")
    check_angles(args)
    if args.position_embedding_type == "mrope":
        raise ValueError(
            "position_embedding_type: mrope needs three position ids a token, this script's data sets have one; "
            "give rope, which is the same for text"
        )


def check_angles(args: Namespace) -> None:
    """Refuses positions that Megatron would leave out, or mistake, without a word.

    Raises:
        ValueError: such are asked for.
    """
    is_hybrid, is_latent = hybrid_pattern.is_hybrid(args), args.multi_latent_attention
    if args.use_rope_scaling and (is_hybrid or is_latent or not _is_rotary(args)):
        raise ValueError(
            "use_rope_scaling: Megatron scales the angles of rope in GPTs, not those of hybrid models, of latent "
            "attention or of other position_embedding_type; drop it"
        )
    is_read = _is_rotary(args) or args.position_embedding_type == "mrope"
    if args.rotary_seq_len_interpolation_factor not in (None, 1) and (is_latent or not is_read):
        raise ValueError(
            "rotary_seq_len_interpolation_factor: Megatron interpolates positions of rope, not those of latent "
            "attention or of other position_embedding_type; drop it"
        )
    if args.rotary_interleaved and is_hybrid:
        raise ValueError(
            "rotary_interleaved: Megatron's hybrid models would rotate the two dimensions of a pair by different "
            "angles; drop it, or train a GPT"
        )
    if args.position_embedding_type == "relative":
        raise ValueError(
            "position_embedding_type: relative biases are T5's, these models would have no positions; give rope, or "
            "none if that is meant"
        )


def _is_rotary(args: Namespace) -> bool:
    """Megatron gives up the fusion by itself for other embeddings of positions."""
    return args.use_rotary_position_embeddings or args.position_embedding_type == "rope"


def _check_own(args: Namespace) -> None:
    for name, least in (("magi_chunk_size", 1), ("magi_overlap_degree", 0)):
        value = getattr(args, name)
        if value is not None:
            int_at_least(value, name, least)
    if args.magi_layout in ("zigzag", "contiguous") and args.magi_chunk_size is not None:
        raise ValueError(f"magi_chunk_size: the layout {args.magi_layout} has no chunks; drop it or --magi-layout")


def _check_later(args: Namespace) -> None:
    """Options of releases that are still to come."""
    check_data_sets(args)
    for name in ("linear_cp_layout", "attention_cp_layout"):
        if (layout := getattr(args, name, None)) not in (None, "zigzag"):
            raise ValueError(f"{name}: layers would move tokens between layouts, got {layout}; --magi-layout says it")


def check_data_sets(args: Namespace) -> None:
    """Refuses data sets of later releases, which Megatron's own scripts choose and none of this package knows.

    Raises:
        ValueError: there is one.
    """
    for name in ("use_varlen_dataset", "varlen_sbhd_validation"):
        if getattr(args, name, False):
            raise ValueError(f"{name}: not supported here; samples of any length may come from a data set of your own")


def _check_attention(args: Namespace) -> None:
    if args.attention_dropout:
        advice = "give --attention-dropout 0"
        if args.use_checkpoint_args:
            advice += " and leave out --use-checkpoint-args, which takes the checkpoint's"
        raise ValueError(f"attention_dropout: must be 0, got {args.attention_dropout}; {advice}")
    tp_size = args.tensor_model_parallel_size
    if args.num_attention_heads and args.num_attention_heads % tp_size:
        raise ValueError(
            f"num_attention_heads: {args.num_attention_heads} heads cannot be split over "
            f"tensor_model_parallel_size={tp_size} ranks"
        )
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(args, name) and not (args.bf16 or args.fp16):
            raise ValueError(f"{name}: Megatron looks for logits in models of 16 bits only; give --bf16 or drop it")
    if args.qk_clip:  # Megatron's own checks are passed over with that for Transformer Engine
        if not 0.0 < args.qk_clip_alpha < 1.0:
            raise ValueError(f"qk_clip_alpha: expected a number between 0 and 1, got {args.qk_clip_alpha}")
        if not args.qk_clip_threshold > 0:
            raise ValueError(f"qk_clip_threshold: expected a positive number, got {args.qk_clip_threshold}")


def _check_precision(args: Namespace) -> None:
    # Attention in FP8 has no argument; core attention refuses it in a configuration.
    if args.fp4 is not None:
        raise ValueError("fp4: needs Blackwell GPUs, for which there are no attention kernels yet; drop --fp4-format")


def _check_layers(args: Namespace) -> None:
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern"):
        hybrid_pattern.check(getattr(args, name, None), name)
    hybrid_pattern.check_variant(getattr(args, "experimental_attention_variant", None))
    hybrid_pattern.check_sparse_layers(args)
    check_angles(args)
    if args.num_experts and (args.micro_batch_size or 1) > 1:
        check_router_sequences(args, "the sequences of a microbatch are dispatched together; give --micro-batch-size 1")


def check_router_sequences(options: Any, why: str) -> None:
    """Refuses a loss of the router that is one of each sequence, where a microbatch has several.

    Args:
        options: a command line, or a ``TransformerConfig``.
        why: ends the message.

    Raises:
        ValueError: it is asked for.
    """
    if "seq_aux_loss" in _balancing(options):
        raise ValueError(
            f"moe_router_load_balancing_type: seq_aux_loss is a loss a sequence, but {why} or use aux_loss"
        )


def _balancing(options: Any) -> list[str]:
    kinds = options.moe_router_load_balancing_type
    return kinds if isinstance(kinds, list) else [kinds]


def _check_schedule(args: Namespace) -> None:
    if args.overlap_moe_expert_parallel_comm and hybrid_pattern.is_hybrid(args):
        raise ValueError("overlap_moe_expert_parallel_comm: Megatron's hybrid models have no such schedule; drop it")
    if args.mtp_num_layers and args.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "overlap_moe_expert_parallel_comm: Megatron runs multi-token prediction without the plan of the "
            "microbatch there; drop it or --mtp-num-layers"
        )
    sizes, cp_size = args.hierarchical_context_parallel_sizes, args.context_parallel_size
    if sizes and math.prod(sizes) != cp_size:
        raise ValueError(
            f"hierarchical_context_parallel_sizes: expected sizes whose product is context_parallel_size={cp_size}, "
            f"got {' '.join(map(str, sizes))}"
        )
    if args.hybrid_context_parallel:
        raise ValueError("hybrid_context_parallel: dispatch balances every microbatch already; drop it")
    for name in ("perform_rl_step", "fake_process_group"):
        if getattr(args, name):
            raise ValueError(f"{name}: not supported with --attention-backend magi")
    for name in ("logits_load_dir", "logits_save_dir"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"{name}: saved logits are in the order of Megatron's own context parallelism, "
                "dispatched tokens are not; use another --attention-backend"
            )
    _check_cuda_graphs(args)


def _check_cuda_graphs(args: Namespace) -> None:
    impl = args.cuda_graph_impl
    if getattr(args, "enable_cuda_graph", False):
        impl = "local"
    if getattr(args, "external_cuda_graph", False):
        impl = "transformer_engine"
    if impl == "none":
        return
    if impl == "full_iteration":
        _check_full_iteration(args)
        return
    modules = [str(getattr(m, "name", m)) for m in (args.cuda_graph_modules or [])]
    modules = [name for entry in modules for name in entry.split(",")]
    allowed = _GRAPH_MODULES[impl]
    if not modules or not set(modules) <= set(allowed):
        raise ValueError(
            f"cuda_graph_modules: graphs of layers take no packed sequences, as which plans travel; with "
            f"--cuda-graph-impl {impl} these have no attention in them: {' '.join(allowed)}; got "
            f"{' '.join(modules) or 'none, which means whole layers'}; or give --cuda-graph-impl full_iteration"
        )


def _check_full_iteration(args: Namespace) -> None:
    unfit = {
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size > 1,
        "num_experts": args.num_experts,
        "mtp_num_layers": args.mtp_num_layers or hybrid_pattern.predicts(args),
        "qk_clip": args.qk_clip,
        "log_max_attention_logit": args.log_max_attention_logit,
        "check_for_spiky_loss": args.check_for_spiky_loss,
        "hierarchical_context_parallel_sizes": args.hierarchical_context_parallel_sizes,
    }
    for name, is_given in unfit.items():
        if is_given:
            raise ValueError(f"cuda_graph_impl: full_iteration does not work with {name} and --attention-backend magi")


def check_padded_experts(options: Any, advice: str, *, is_training: bool = True) -> None:
    """Refuses what takes padding for tokens in layers of experts, where there is padding.

    Args:
        options: a command line, or a ``TransformerConfig``.
        advice: ends the message.
        is_training: numbers of tokens enter losses and biases of the router, which evaluations have not.

    Raises:
        ValueError: there is something.
    """
    # Of a layer in chunks, and of one whose communication is overlapped, the router is not given the mask of padding.
    unmasked = {
        "overlap_moe_expert_parallel_comm": options.overlap_moe_expert_parallel_comm,
        "mlp_chunks_for_training": getattr(options, "mlp_chunks_for_training", 1) > 1,
    }
    for name, is_given in unmasked.items():
        if is_given and is_training and _router_counts_tokens(options):
            raise ValueError(f"{name}: Megatron's router takes padding for tokens there; {advice}")
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in _balancing(options):
            raise ValueError(f"moe_router_load_balancing_type: {kind} takes padding for tokens; {advice}")
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if getattr(options, name, None) is not None:
            raise ValueError(f"{name}: padding would take the place of tokens; {advice}")


def check_dispatched_experts(
    config: Any, num_sequences: int, num_tokens: int, num_rows: int, *, is_masked: bool, is_training: bool
) -> None:
    """Refuses a microbatch that layers of experts would not take as stock Megatron does on one rank.

    For models that no command line was checked for.

    Args:
        config: Megatron's ``TransformerConfig``, of a model with experts.
        num_sequences: of the microbatch.
        num_tokens: of all of them.
        num_rows: likewise, with padding.
        is_masked: the model was given the mask of padding.
        is_training: losses and biases of the router count; in evaluations they do not.

    Raises:
        ValueError: the router has a loss a sequence, and there are several; or it would count padding.
    """
    kinds, coefficients = _balancing(config), _coefficients(config)
    each = coefficients if len(coefficients) == len(kinds) else coefficients * len(kinds)
    counts_sequences = any(kind == "seq_aux_loss" and factor for kind, factor in zip(kinds, each, strict=True))
    if is_training and num_sequences > 1 and counts_sequences:
        check_router_sequences(config, "the sequences of a microbatch are dispatched together; give it one sequence")
    if num_rows == num_tokens:
        return
    if is_training and not is_masked and _router_counts_tokens(config):
        raise ValueError(
            "padding_mask: none was given, and the router of experts would count padding; call the model inside "
            "given(batch), or give it the batch's"
        )
    check_padded_experts(
        config,
        f"this microbatch of {num_tokens} tokens is padded to {num_rows}; give one that needs no padding",
        is_training=is_training,
    )


def _router_counts_tokens(options: Any) -> bool:
    """Whether the numbers of tokens of experts enter a loss or a bias, and not only the order of their work."""
    return bool(any(_coefficients(options)) or options.moe_z_loss_coeff or options.moe_router_enable_expert_bias)


def _coefficients(options: Any) -> list[float]:
    """Of the balancing losses of the router."""
    found = options.moe_aux_loss_coeff
    return found if isinstance(found, list) else [found]
