"""Arguments that cannot work are refused by name, all others pass."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.training import arguments

from megatron_magi import envs
from megatron_magi.backends.registry import BACKENDS
from megatron_magi.config import AttendConfig, CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import builders
from megatron_magi.mask.source import MaskSource
from megatron_magi.mcore import arguments as mcore_arguments
from megatron_magi.mcore import entry
from megatron_magi.mcore.argv import add_arguments, rewrite_argv
from megatron_magi.mcore.forward_step import attention_shape
from megatron_magi.mcore.hybrid_pattern import attention_layers, check_linear_layers
from megatron_magi.mcore.sample_packing import is_asked_for
from megatron_magi.mcore.settings import layer_masks, magi_config, padded_seq_length, summary, with_nodes
from megatron_magi.mcore.validate import (
    check_layout,
    check_masks,
    check_packing,
    check_unused,
    settle_arguments,
    validate_arguments,
)
from megatron_magi.plan import make_dispatch
from megatron_magi.testing.megatron_launch import tiny_gpt_args

EXPERTS = ["--num-experts", "4", "--micro-batch-size", "2"]
SEQUENCES = "causal inside sequences, or documents where the data set gives their bounds"
SPARSE = ["--experimental-attention-variant", "dsa"]
FULL_ITERATION = ["--cuda-graph-impl", "full_iteration"]


def _parse(monkeypatch: pytest.MonkeyPatch, *extra: str, without: tuple[str, ...] = ()) -> Namespace:
    argv = rewrite_argv(tiny_gpt_args("mock", *extra, context_parallel_size=2))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *(a for a in argv if a not in without)])
    return arguments.parse_args(add_arguments)


def _validate(monkeypatch: pytest.MonkeyPatch, *extra: str) -> None:
    validate_arguments(_parse(monkeypatch, *extra))


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--overlap-moe-expert-parallel-comm"],
        ["--mtp-num-layers", "1"],
        ["--use-rope-scaling", "--rotary-seq-len-interpolation-factor", "2", "--rotary-interleaved"],
        ["--rotary-seq-len-interpolation-factor", "1", "--multi-latent-attention"],
        ["--cuda-graph-impl", "local", "--cuda-graph-modules", "moe_preprocess", "moe_router"],
        ["--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "mlp", "moe_router"],
        FULL_ITERATION,
        ["--moe-router-load-balancing-type", "aux_loss", *EXPERTS],
        ["--bf16", "--qk-clip"],
        ["--fp16", "--log-max-attention-logit"],
        ["--fp8-format", "hybrid"],
    ],
    ids=lambda extra: extra[0] if extra else "plain",
)
def test_supported_arguments_pass(monkeypatch: pytest.MonkeyPatch, extra: list[str]) -> None:
    _validate(monkeypatch, *extra)


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (["--attention-dropout", "0.1"], "attention_dropout"),
        (["--tensor-model-parallel-size", "3"], "num_attention_heads"),
        (["--hierarchical-context-parallel-sizes", "2", "2"], "hierarchical_context_parallel_sizes"),
        (["--mtp-num-layers", "1", "--overlap-moe-expert-parallel-comm"], "overlap_moe_expert_parallel_comm"),
        (["--cuda-graph-impl", "local"], "cuda_graph_modules"),
        (["--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn"], "cuda_graph_modules"),
        (["--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "mlp", "mamba"], "cuda_graph_modules"),
        (["--cuda-graph-impl", "local", "--cuda-graph-modules", "moe_router", "mlp"], "cuda_graph_modules"),
        (["--external-cuda-graph"], "cuda_graph_modules"),
        ([*FULL_ITERATION, "--pipeline-model-parallel-size", "2"], "cuda_graph_impl"),
        ([*FULL_ITERATION, "--qk-clip", "--bf16"], "cuda_graph_impl"),
        ([*FULL_ITERATION, "--mtp-num-layers", "1"], "cuda_graph_impl"),
        ([*FULL_ITERATION, "--hybrid-layer-pattern", "*-*-/*-"], "cuda_graph_impl"),
        ([*FULL_ITERATION, *EXPERTS], "cuda_graph_impl"),
        (["--enable-cuda-graph"], "cuda_graph_modules"),
        ([*SPARSE, "--softmax-type", "learnable"], "softmax_type"),
        ([*SPARSE, "--window-size", "16,0"], "window_size"),
        ([*SPARSE, "--dsa-indexer-topk-freq", "2", "--mtp-num-layers", "1"], "dsa_indexer_topk_freq"),
        ([*SPARSE, "--dsa-kernel-backend", "cudnn"], "dsa_kernel_backend"),
        ([*SPARSE, "--micro-batch-size", "2"], "micro_batch_size"),
        ([*SPARSE, "--tensor-model-parallel-size", "2"], "sequence_parallel"),
        ([*SPARSE, "--log-max-attention-logit", "--bf16"], "log_max_attention_logit"),
        (["--hybrid-layer-pattern", "D-D-", *FULL_ITERATION], "cuda_graph_impl"),
        (["--hybrid-override-pattern", "D-", "--qk-clip", "--bf16"], "qk_clip"),
        (["--hybrid-layer-pattern", "*E", "--overlap-moe-expert-parallel-comm"], "overlap_moe_expert_parallel_comm"),
        (["--hybrid-context-parallel"], "hybrid_context_parallel"),
        (["--moe-router-load-balancing-type", "seq_aux_loss", *EXPERTS], "moe_router_load_balancing_type"),
        (["--qk-clip"], "qk_clip"),
        (["--bf16", "--qk-clip", "--qk-clip-alpha", "1"], "qk_clip_alpha"),
        (["--bf16", "--qk-clip", "--qk-clip-threshold", "0"], "qk_clip_threshold"),
        (["--perform-rl-step"], "perform_rl_step"),
        (["--use-rope-scaling", "--hybrid-layer-pattern", "*-"], "use_rope_scaling"),
        (["--use-rope-scaling", "--hybrid-override-pattern", "*-"], "use_rope_scaling"),
        (["--use-rope-scaling", "--multi-latent-attention"], "use_rope_scaling"),
        (["--use-rope-scaling", "--position-embedding-type", "yarn"], "use_rope_scaling"),
        (
            ["--rotary-seq-len-interpolation-factor", "2", "--multi-latent-attention"],
            "rotary_seq_len_interpolation_factor",
        ),
        (
            ["--rotary-seq-len-interpolation-factor", "2", "--position-embedding-type", "yarn"],
            "rotary_seq_len_interpolation_factor",
        ),
        (["--rotary-interleaved", "--hybrid-layer-pattern", "*-"], "rotary_interleaved"),
        (["--position-embedding-type", "relative"], "position_embedding_type"),
        (["--fake-process-group"], "fake_process_group"),
        (["--logits-load-dir", "teacher"], "logits_load_dir"),
        (["--logits-save-dir", "teacher"], "logits_save_dir"),
        (["--fp4-format", "e2m1"], "fp4"),
        (["--magi-chunk-size", "0"], "magi_chunk_size"),
        (["--magi-overlap-degree", "-1"], "magi_overlap_degree"),
        (["--magi-layout", "zigzag", "--magi-chunk-size", "8"], "magi_chunk_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unsupported_argument_is_named(monkeypatch: pytest.MonkeyPatch, extra: list[str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        _validate(monkeypatch, *extra)


MAMBA = ["--hybrid-layer-pattern", "M*-", "--mamba-head-dim", "16", "--mamba-num-groups", "2"]
DELTA = ["--hybrid-layer-pattern", "*-/G-"]
VARIANT = ["--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "2"]
ONE_RANK = ["--context-parallel-size", "1"]


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ([*MAMBA, *FULL_ITERATION, *ONE_RANK], "cuda_graph_impl"),
        ([*MAMBA, "--disable-mamba-mem-eff-path"], "disable_mamba_mem_eff_path"),
        ([*MAMBA, "--disable-mamba-mem-eff-path", *ONE_RANK], "disable_mamba_mem_eff_path"),
        ([*MAMBA, "--mamba-num-heads", "6", "--context-parallel-size", "4"], "mamba_num_heads"),
        ([*MAMBA, "--mamba-num-groups", "3", "--context-parallel-size", "4"], "mamba_num_groups"),
        ([*MAMBA, "--mamba-num-groups", "1", "--tensor-model-parallel-size", "2"], "mamba_num_groups"),
        ([*DELTA, "--deterministic-mode"], "deterministic_mode"),
        ([*DELTA, "--deterministic-mode", *ONE_RANK], "deterministic_mode"),
        ([*DELTA, "--linear-num-key-heads", "2", "--tensor-model-parallel-size", "2"], "linear_num_key_heads"),
        ([*DELTA, "--linear-num-value-heads", "3"], "linear_num_value_heads"),
        ([*VARIANT, "--linear-num-value-heads", "3"], "linear_num_value_heads"),
        ([*DELTA, "--tensor-model-parallel-size", "2"], "sequence_parallel"),
        ([*VARIANT, "--tensor-model-parallel-size", "2", *ONE_RANK], "sequence_parallel"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_linear_layers_do_not_take_is_named(monkeypatch: pytest.MonkeyPatch, extra: list[str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        check_linear_layers(_parse(monkeypatch, *extra))


@pytest.mark.parametrize(
    "extra",
    [
        [*MAMBA, "--context-parallel-size", "8"],  # 8 heads; ranks share groups
        [*MAMBA, "--mamba-num-groups", "8", "--tensor-model-parallel-size", "4"],
        [*DELTA, "--context-parallel-size", "16"],
        [*DELTA, "--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--hybrid-layer-pattern", "*-", "--deterministic-mode", *FULL_ITERATION],
    ],
)
def test_what_linear_layers_take_passes(monkeypatch: pytest.MonkeyPatch, extra: list[str]) -> None:
    check_linear_layers(_parse(monkeypatch, *extra))


@pytest.mark.parametrize("extra", [[*MAMBA, "--disable-mamba-mem-eff-path"], [*DELTA, "--deterministic-mode"]])
def test_linear_layers_of_one_rank_without_documents_run_as_in_megatron(
    monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    args = _parse(monkeypatch, *extra, *ONE_RANK, "--micro-batch-size", "2", without=("--reset-attention-mask",))
    check_linear_layers(args)
    with pytest.raises(ValueError, match=f"^{extra[-1].strip('-').replace('-', '_')}: "):
        check_linear_layers(args, is_padded=True)
    args.micro_batch_size = 1
    check_linear_layers(args, is_padded=True)


def test_the_norm_that_heads_of_a_gated_delta_net_share_needs_sequence_parallelism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradient would be that of one tensor-parallel rank's heads, without documents and CP too."""
    tensor = ["--tensor-model-parallel-size", "2"]
    without = ("--reset-attention-mask",)
    check_linear_layers(_parse(monkeypatch, *MAMBA, *tensor, *ONE_RANK, without=without))
    with pytest.raises(ValueError, match=r"^sequence_parallel: without it Megatron does not add up the gradients"):
        check_linear_layers(_parse(monkeypatch, *DELTA, *tensor, *ONE_RANK, without=without))


def test_multi_token_prediction_in_a_later_chunk_of_the_first_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradient norms are wrong there, with every attention backend."""
    predicts = ["--mtp-num-layers", "1", "--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout"]
    for layout in ("Ettttm|L", "Ett|t|t|mL"):
        check_layout(_parse(monkeypatch, *predicts, layout))
    with pytest.raises(ValueError, match=r"^pipeline_model_parallel_layout: Ett\|t\|tm\|L has .*another stage"):
        check_layout(_parse(monkeypatch, *predicts, "Ett|t|tm|L"))
    check_layout(_parse(monkeypatch, *predicts[2:], "Ett|t|t|L"))


PACKING = ["--sequence-packing-scheduler", "dp_balanced", "--calculate-per-token-loss"]


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (["--micro-batch-size", "2"], "sequence_packing_scheduler: reads sample by sample"),
        (["--reset-attention-mask"], "sequence_packing_scheduler: samples are documents"),
        (FULL_ITERATION, "sequence_packing_scheduler: CUDA graphs"),
        (["--tp-comm-overlap"], "tp_comm_overlap"),
        (["--num-experts", "4"], "moe_token_dispatcher_type: allgather"),
        (["--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--moe-expert-capacity-factor", "1"],
         "moe_expert_capacity_factor"),
        (["--num-experts", "4", "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"],
         "moe_flex_dispatcher_backend: hybridep"),
        (["--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type",
          "seq_aux_loss"], "moe_router_load_balancing_type: seq_aux_loss"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_packed_samples_is_named(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], name: str
) -> None:
    without = ("--reset-attention-mask",)
    check_packing(_parse(monkeypatch, *PACKING, without=without))
    with pytest.raises(ValueError, match=f"^{name}"):
        check_packing(_parse(monkeypatch, *PACKING, *extra, without=() if extra == [*without] else without))
    with pytest.raises(ValueError, match=r"^sequence_packing_scheduler: .* give --calculate-per-token-loss"):
        check_packing(_parse(monkeypatch, *PACKING[:2], without=without))


def test_the_data_set_of_later_versions_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parse(monkeypatch, "--use-varlen-dataset")
    assert "unrecognized arguments: --use-varlen-dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_varlen_dataset", True), ("varlen_sbhd_validation", True),
        ("linear_cp_layout", "contiguous"), ("attention_cp_layout", "contiguous"),
    ],
)  # fmt: skip
def test_options_of_later_versions_are_refused_where_they_would_have_no_effect_or_move_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    args = _parse(monkeypatch)
    args.linear_cp_layout, args.attention_cp_layout = "zigzag", None
    args.use_varlen_dataset = False
    validate_arguments(args)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"^{name}: "):
        validate_arguments(args)


def test_a_megatron_that_packs_itself_leaves_it_to_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer packs before schedules are called if the arguments, or a configuration made of them, say so."""
    args = _parse(monkeypatch, "--calculate-per-token-loss", without=("--reset-attention-mask",))
    assert not is_asked_for(args)
    args.sequence_packing_scheduler = "dp_balanced"  # as such a release parses it
    seen = []

    def stock(args: Namespace, _: Any) -> None:
        seen.append(args.sequence_packing_scheduler)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_arguments._validate_for_magi(stock, args, {})
    assert seen == [None] and args.sequence_packing_scheduler is None and is_asked_for(args)
    check_packing(args)


def test_a_script_of_this_package_does_not_ignore_packing_that_stock_attention_asks_for() -> None:
    for name, value in (("sequence_packing_scheduler", "dp_balanced"), ("use_varlen_dataset", True)):
        with pytest.raises(ValueError, match=f"^{name}: "):
            entry._stock_parts(Namespace(magi_loss_log=None, **{name: value}), None)


@pytest.mark.parametrize("mask", ["causal", "prefix_tree"])
def test_masks_that_know_no_bounds_of_packed_samples_are_refused(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    args = _parse(monkeypatch, *PACKING)
    check_masks(args, MaskSource("documents"), [], [None])
    with pytest.raises(ValueError, match=f"^magi_mask: {mask} knows no bounds"):
        check_masks(args, MaskSource("documents"), [MaskSource(mask)], [None])


def test_dropout_of_a_checkpoint_cannot_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _parse(monkeypatch, "--use-checkpoint-args")
    validate_arguments(args)
    args.attention_dropout = 0.1  # as Megatron reads it from the checkpoint, whatever the command line says
    with pytest.raises(ValueError, match=r"^attention_dropout: .* leave out --use-checkpoint-args"):
        validate_arguments(args)


@pytest.mark.parametrize("name", ["NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"])
def test_choice_of_another_attention_kernel_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    _validate(monkeypatch)
    monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match=f"^{name}: '0' chooses .* unset it"):
        _validate(monkeypatch)


@pytest.mark.parametrize("one_launch", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_captured_attention_of_several_ranks_has_one_stage_and_one_launch_where_that_is_set(
    monkeypatch: pytest.MonkeyPatch, cp_size: int, one_launch: bool
) -> None:
    default = MagiConfig(overlap=OverlapConfig(degree=3, one_launch=one_launch))
    args = _parse(monkeypatch, *FULL_ITERATION, "--context-parallel-size", str(cp_size))
    args.params_dtype, args.kv_channels = torch.bfloat16, 16
    overlap = magi_config(args, default).overlap
    assert (overlap.degree, overlap.one_launch) == (1 if cp_size > 1 else 3, one_launch)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_captured_queries_do_not_travel(monkeypatch: pytest.MonkeyPatch, cp_size: int) -> None:
    travel = MagiConfig(dispatch=DispatchConfig(queries="travel"))
    for extra, queries in ((FULL_ITERATION, "home"), ((), "auto")):
        args = _parse(monkeypatch, *extra, "--context-parallel-size", str(cp_size))
        args.params_dtype, args.kv_channels = torch.bfloat16, 16
        assert magi_config(args, MagiConfig()).dispatch.queries == queries
        if extra and cp_size > 1:
            with pytest.raises(ValueError, match=r"^dispatch.queries: 'travel' .* captured iterations"):
                magi_config(args, travel)
        else:
            assert magi_config(args, travel).dispatch.queries == "travel"


@pytest.mark.parametrize("flag", ["--log-max-attention-logit", None])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_groups_of_heads_do_not_go_with_largest_logits(monkeypatch: pytest.MonkeyPatch, cp_size: int, flag) -> None:
    flatten = MagiConfig(dispatch=DispatchConfig(flatten_head_groups=True))
    args = _parse(monkeypatch, *([flag] if flag else []), "--context-parallel-size", str(cp_size))
    args.params_dtype, args.kv_channels = torch.bfloat16, 16
    if flag and cp_size > 1:
        with pytest.raises(ValueError, match=r"^dispatch.flatten_head_groups: True .* largest logit of each head"):
            magi_config(args, flatten)
    else:
        assert magi_config(args, flatten).dispatch.flatten_head_groups


MLA = ["--multi-latent-attention", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12"]


@pytest.mark.parametrize(
    ("extra", "without", "shape"),
    [
        ([], (), (4, 2, 16, None)),
        (["--tensor-model-parallel-size", "2"], (), (2, 1, 16, None)),
        (["--tensor-model-parallel-size", "4"], (), (1, 1, 16, None)),  # two ranks have the same keys
        ([], ("--group-query-attention",), (4, 4, 16, None)),
        (MLA, (), (4, 4, 24, 12)),
        ([*MLA, "--tensor-model-parallel-size", "2"], ("--group-query-attention",), (2, 2, 24, 12)),
    ],
)
def test_plans_are_for_the_heads_of_one_tensor_parallel_rank(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], without: tuple[str, ...], shape: tuple
) -> None:
    args = _parse(monkeypatch, *extra, without=without)
    args.params_dtype, args.kv_channels = torch.bfloat16, 16
    cost = magi_config(args, MagiConfig()).overlap.cost
    assert (cost.num_heads_q, cost.num_heads_kv, cost.head_dim, cost.head_dim_v) == shape
    assert cost.element_bytes == 2


WINDOW = ["--window-size", "8,0"]


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (["--magi-mask", "causal", *WINDOW], "window_size"),
        (["--window-size", "8,8"], "window_size"),
        (["--window-size=-1,-1"], "window_size"),
        (["--magi-layer-masks", f"{__name__}:first_layer_in_blocks", *WINDOW], "window_size"),
        (["--magi-mask", "nothing"], "magi_mask"),
        (["--magi-mask", ""], "magi_mask"),
        (["--magi-mask", "documents:causal=no"], "magi_mask"),
        (["--magi-mask", "sliding_window:left=-3"], "magi_mask"),
        (["--magi-layer-masks", "os:getcwd"], "magi_layer_masks"),
        (["--magi-layer-masks", f"{__name__}:blocks_of_no_size"], "magi_layer_masks"),
        (["--magi-layer-masks", "nothing"], "magi_layer_masks"),
        (["--magi-layer-masks", f"{__name__}:no_text"], "magi_layer_masks"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_masks_that_cannot_be_are_named(monkeypatch: pytest.MonkeyPatch, extra: list[str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        layer_masks(_parse(monkeypatch, *extra))


def test_a_prefix_tree_needs_more_than_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_masks(_parse(monkeypatch, "--magi-mask", "prefix_tree"))
    with pytest.raises(ValueError, match=r"^magi_mask: in a prefix_tree .* linear layers \(M, G\) have one state"):
        layer_masks(_parse(monkeypatch, "--magi-mask", "prefix_tree", *MAMBA))


@pytest.mark.parametrize(
    ("extra", "layers"),
    [([], [1, 2, 3, 4, 5]), (VARIANT, [2, 4]), ([*VARIANT, "--linear-attention-freq", "[1,0,0,1,0]"], [2, 3, 5])],
)
def test_layers_of_a_gpt_with_gated_delta_nets_that_have_attention(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], layers: list[int]
) -> None:
    assert attention_layers(_parse(monkeypatch, "--num-layers", "5", *extra)) == layers


def first_layer_in_blocks(layer_number: int) -> str | None:
    """For `--magi-layer-masks`."""
    return "block_causal:block_size=4" if layer_number == 1 else None


def blocks_of_no_size(layer_number: int) -> str:
    """What the mask of a layer refuses."""
    return "block_causal:block_size=none"


def test_a_chunk_longer_than_a_shard_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _parse(monkeypatch, "--magi-chunk-size", "100000")
    args.params_dtype, args.kv_channels = torch.bfloat16, 16
    with pytest.raises(ValueError, match=r"^magi_chunk_size: expected at most 65536 for 128 tokens over 2 rank"):
        padded_seq_length(args, magi_config(args, MagiConfig()).dispatch)


def no_text(layer_number: int) -> int:
    """Not what `--magi-layer-masks` wants."""
    return layer_number


def test_masks_are_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = layer_masks(_parse(monkeypatch, "--magi-layer-masks", f"{__name__}:first_layer_in_blocks"))
    assert [source.text for source in masks.sources] == ["documents", "block_causal:block_size=4"]
    assert masks.of(1).text == "block_causal:block_size=4"
    windows = layer_masks(_parse(monkeypatch, *WINDOW, "--window-attn-skip-freq", "2"))
    assert [source.text for source in windows.sources] == ["documents", "sliding_window:left=8,right=0"]
    every = layer_masks(_parse(monkeypatch, *WINDOW, "--magi-mask", "documents"))
    assert every.primary.text == "sliding_window:left=8,right=0"


@pytest.mark.parametrize(
    "name", ["magi_mask", "magi_layer_masks", "magi_chunk_size", "magi_overlap_degree", "magi_layout"]
)
def test_options_need_this_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    args = _parse(monkeypatch)
    check_unused(args)
    setattr(args, name, "causal")
    with pytest.raises(ValueError, match=f"^{name}: needs --attention-backend magi"):
        check_unused(args)


@pytest.mark.parametrize(
    ("extra", "is_kept"),
    [([], True), (["--micro-batch-size", "2"], True), (["--multi-latent-attention"], False)],
    ids=["one_sequence", "two_sequences", "mla"],
)
def test_rope_fusion_is_given_up_with_a_notice_where_it_cannot_work(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], is_kept: bool
) -> None:
    args = _parse(monkeypatch, *extra, without=("--no-rope-fusion",))
    notices = settle_arguments(args)
    assert args.apply_rope_fusion == is_kept
    assert bool(notices) != is_kept
    assert all(notice.startswith("apply_rope_fusion: off") for notice in notices)


@pytest.mark.parametrize(
    ("extra", "name"),
    [(["--cp-comm-type", "a2a"], "cp_comm_type"), (["--flash-attention-version", "3"], "flash_attention_version")],
)
def test_an_option_without_effect_is_said(monkeypatch: pytest.MonkeyPatch, extra: list[str], name: str) -> None:
    (notice,) = settle_arguments(_parse(monkeypatch, *extra))
    assert notice.startswith(f"{name}: no effect")
    assert settle_arguments(_parse(monkeypatch)) == []


@pytest.mark.parametrize(("sizes", "nodes"), [("2 2", 2), ("2 1 2", 2), ("4 1", None), ("1 4", None)])
def test_sizes_of_a2a_and_p2p_are_said_to_be_nodes(
    monkeypatch: pytest.MonkeyPatch, sizes: str, nodes: int | None
) -> None:
    line = ["--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", *sizes.split()]
    args = _parse(monkeypatch, *line, "--context-parallel-size", "4")
    validate_arguments(args)
    (notice,) = settle_arguments(args)
    assert notice.startswith("cp_comm_type: no effect")
    said = f"hierarchical_context_parallel_sizes {sizes} means {nodes} nodes of {4 // (nodes or 1)} ranks"
    assert (said in notice) == (nodes is not None)
    assert ("hierarchical" in notice) == (nodes is not None)


def test_megatrons_deterministic_mode_is_attentions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ((), ("--deterministic-mode",)):
        args = _parse(monkeypatch, *extra)
        args.params_dtype, args.kv_channels = torch.bfloat16, 16
        assert magi_config(args, MagiConfig()).attend.deterministic == bool(extra)


@pytest.mark.parametrize("positions", ["yarn", "learned_absolute"])
def test_rope_fusion_that_megatron_gives_up_by_itself_gets_no_notice(
    monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    extra = ["--micro-batch-size", "2", "--position-embedding-type", positions]
    assert settle_arguments(_parse(monkeypatch, *extra, without=("--no-rope-fusion",))) == []


def test_gradients_of_sinks_are_not_summed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MagiConfig(comm=CommConfig(dsink_all_reduce="sum"))
    for extra in ((), ("--softmax-type", "learnable")):
        args = _parse(monkeypatch, *extra)
        args.params_dtype, args.kv_channels = torch.bfloat16, 16
        if not extra:
            magi_config(args, config)
            continue
        magi_config(args, MagiConfig(comm=CommConfig(dsink_all_reduce="avg")))
        with pytest.raises(ValueError, match=r"^dsink_all_reduce: .*MAGI_ATTENTION_DSINK_ALL_REDUCE_OP"):
            magi_config(args, config)
        args.context_parallel_size = 1
        magi_config(args, config)


@pytest.mark.parametrize(
    ("extra", "unit"),
    [
        ([], 2),
        (["--fp8-format", "hybrid"], 2 * 16),
        (["--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"], 2 * 32),
        (["--fp8-format", "hybrid", "--tensor-model-parallel-size", "2", "--sequence-parallel"], 2 * 2 * 16),
    ],
    ids=["bf16", "fp8", "mxfp8", "fp8_tp2_sp"],
)
def test_any_length_is_padded_to_what_matrix_products_take(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], unit: int
) -> None:
    args = _parse(monkeypatch, *extra, "--seq-length", "65")
    args.params_dtype, args.kv_channels = torch.bfloat16, 16
    length = padded_seq_length(args, magi_config(args, MagiConfig()).dispatch)
    assert length % unit == 0
    assert 65 <= length < 65 + unit


@pytest.mark.parametrize("algorithm", ["auto", "affinity", "min_heap", "zigzag"])
@pytest.mark.parametrize("seq_length", [125, 1000, 4099])
def test_the_padded_length_is_that_of_every_dispatch(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seq_length: int
) -> None:
    args = _parse(monkeypatch, "--seq-length", str(seq_length))
    args.params_dtype, args.kv_channels = torch.bfloat16, 16
    config = magi_config(args, MagiConfig(dispatch=DispatchConfig(algorithm=algorithm))).dispatch
    for mask in (builders.causal(seq_length), builders.varlen(doc_lengths=[seq_length - 60, 60])):
        dispatched = make_dispatch(mask, config, args.context_parallel_size)
        assert dispatched.padded_seqlen == padded_seq_length(args, config)


@pytest.mark.parametrize(
    ("sizes", "variable", "nodes"), [([], "", None), (["1", "2"], "", 1), (["2", "1"], "1", 2), (["2", "1"], "0", None)]
)
def test_nodes_are_those_of_the_command_line_unless_the_environment_refuses(monkeypatch, sizes, variable, nodes):
    extra = ["--hierarchical-context-parallel-sizes", *sizes] if sizes else []
    environment = envs.load({"MAGI_ATTENTION_HIERARCHICAL_COMM": variable})
    assert with_nodes(_parse(monkeypatch, *extra), MagiConfig(), environment).comm.ranks_per_node == nodes


def test_two_levels_that_only_the_environment_asks_for_are_an_error(monkeypatch):
    environment = envs.load({"MAGI_ATTENTION_HIERARCHICAL_COMM": "1"})
    with pytest.raises(ValueError, match="HIERARCHICAL_COMM: needs --hierarchical-context-parallel-sizes"):
        with_nodes(_parse(monkeypatch), MagiConfig(), environment)


def test_kernels_that_are_asked_for_and_do_not_exist_are_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in the first step, after a line of the log that says torch computes attention."""
    args = _parse(monkeypatch)
    args.kv_channels, args.params_dtype = 16, torch.float32
    assert attention_shape(args, magi_config(args, MagiConfig())).num_sms is None
    config = magi_config(args, MagiConfig(attend=AttendConfig(impl="ffa")))
    with pytest.raises(ValueError, match=r"MAGI_ATTENTION_KERNEL_BACKEND: .*'ffa' .*; use sdpa_ol, or unset it"):
        attention_shape(args, config)


@pytest.mark.parametrize(
    ("extra", "without", "mask"),
    [
        ([], (), "causal inside documents, which end at EOD tokens"),
        ([], ("--reset-attention-mask",), SEQUENCES),
        (["--magi-mask", "block_causal:block_size=16"], (), "block_causal:block_size=16"),
        (
            ["--window-size", "8,0", "--window-attn-skip-freq", "2", "--num-layers", "3"],
            (),
            "causal inside documents, which end at EOD tokens; in 2 of 3 layers the window 8,0",
        ),
        (
            ["--magi-mask", "causal", "--magi-layer-masks", "my_masks.py:of_layer"],
            (),
            "causal; layers as my_masks.py:of_layer says",
        ),
    ],
)
def test_the_log_says_what_attends_and_to_what(
    extra: list[str], without: tuple[str, ...], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _parse(monkeypatch, *extra, without=without)
    assert summary(args, by=None).endswith(f"torch (correct, but slow), context parallelism 2, mask: {mask}")
    assert f": {BACKENDS['cudnn'].title}, context" in summary(args, by=BACKENDS["cudnn"].title)


def test_the_log_names_the_layout_and_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    said = summary(_parse(monkeypatch, "--magi-layout", "zigzag", *MAMBA), by=None)
    assert "context parallelism 2, layout zigzag, mask: causal inside documents" in said
    assert said.endswith("; linear layers run through documents")
