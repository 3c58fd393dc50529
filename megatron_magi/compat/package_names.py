"""The public modules of MagiAttention and their public names: of v1.1.1 and of its main branch of 28 May 2026.

Facts of its public interface. Modules that begin with an underscore are left out, as are modules of CUDA sources.
"""

from __future__ import annotations

MODULES: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "magi_attention": (
            "comm config dist_attn_runtime_dict_size env flexible_flash_attention_utils_cuda functional "
            "init_dist_attn_runtime_key init_dist_attn_runtime_mgr is_cuda_device_max_connections_one "
            "is_flatten_head_groups_enable is_sanity_check_enable logger magi_attn_comm magi_attn_ext"
        ),
        "magi_attention.api": (
            "AttnForwardMeta AttnMaskType AttnOverlapMode AttnRanges BSDispatchAlg DPDispatchAlg DispatchAlg "
            "DispatchConfig DistAttnConfig DistAttnRuntimeDictManager DistAttnRuntimeKey GeneralAttnMaskType "
            "GreedyOverlapAlg GrpCollConfig LBDispatchAlg MinHeapDispatchAlg OverlapAlg OverlapConfig "
            "SequentialDispatchAlg SortedSequentialSelectAlg ToppHeapDispatchAlg UniformOverlapAlg calc_attn "
            "clear_cache compute_pad_size dispatch dist_attn_runtime_dict_mgr flex_flash_attn_func "
            "get_most_recent_key get_position_ids infer_attn_mask_from_cu_seqlens "
            "infer_attn_mask_from_sliding_window infer_varlen_mask_from_batch magi_attn_flex_dispatch "
            "magi_attn_flex_key magi_attn_varlen_dispatch magi_attn_varlen_key "
            "make_flex_key_for_new_mask_after_dispatch make_varlen_key_for_new_mask_after_dispatch roll "
            "roll_simple squash_batch_dim undispatch"
        ),
        "magi_attention.api.functools": (
            "apply_padding compute_pad_size infer_attn_mask_from_cu_seqlens "
            "infer_attn_mask_from_sliding_window infer_varlen_mask_from_batch pad_at_dim squash_batch_dim "
            "unpad_at_dim"
        ),
        "magi_attention.api.magi_attn_interface": (
            "DistAttnRuntimeDictManager calc_attn clear_cache dispatch dist_attn_runtime_dict_mgr get_most_recent_key "
            "get_position_ids magi_attn_flex_dispatch magi_attn_flex_key magi_attn_varlen_dispatch "
            "magi_attn_varlen_key make_flex_key_for_new_mask_after_dispatch "
            "make_varlen_key_for_new_mask_after_dispatch roll roll_simple undispatch"
        ),
        "magi_attention.benchmarking": (
            "Benchmark Mark do_bench do_bench_flops do_bench_mem make_img_grid perf_report report_all_from_perf"
        ),
        "magi_attention.benchmarking.bench": (
            "Benchmark Mark MemRecorder do_bench do_bench_flops do_bench_mem maybe_dist_sync nvml_context "
            "perf_report report_all_from_perf"
        ),
        "magi_attention.benchmarking.image_grid": (
            "ToPILImage ToTensor find_closest_factors get_image_num_channels make_grid make_img_grid "
            "to_pil_image to_tensor"
        ),
        "magi_attention.benchmarking.utils": (
            "TimeManager compare_speed get_device_name get_max_diff get_mean_diff get_timestamp info_str "
            "is_allclose time_manager"
        ),
        "magi_attention.comm": (
            "WorkWithPostProcessFn dsink_all_reduce_op ffa_bwd_sm_margin_save_for_comm "
            "ffa_fwd_sm_margin_save_for_comm functional is_bwd_high_precision_reduce_enable "
            "is_fwd_high_precision_reduce_enable is_hierarchical_comm_enable is_native_grpcoll_enable "
            "is_qo_comm_enable primitive"
        ),
        "magi_attention.comm.functional": "all_gather_fwd_scatter_bwd scatter_fwd_all_gather_bwd",
        "magi_attention.comm.primitive": "all2all_v all_gather_v grpcoll scatter_v",
        "magi_attention.comm.primitive.device_a2av": "OnDeviceA2AVMgr on_device_a2av",
        "magi_attention.comm.primitive.device_a2av.interface": "OnDeviceA2AVMgr on_device_a2av",
        "magi_attention.comm.primitive.device_a2av.triton_barrier": (
            "acquire_wait_signal_asm blockwise_barrier put_signal put_signal_asm_template relaxed_put_signal_asm "
            "relaxed_wait_signal_asm release_put_signal_asm sync_threads wait_signal wait_signal_asm_template"
        ),
        "magi_attention.comm.primitive.device_a2av.triton_impl": "on_device_a2av_kernel on_device_a2av_triton_impl",
        "magi_attention.comm.primitive.device_a2av.triton_utils": (
            "get_bid get_flat_bid get_flat_tid get_nbid get_ntid get_tid"
        ),
        "magi_attention.comm.primitive.grpcoll": "group_cast group_reduce",
        "magi_attention.comm.primitive.grpcoll.utils": (
            "NativeGrpcollMetaCalculator are_all_ranks_on_same_host avg_reduce_output "
            "calc_group_cast_a2a_args calc_group_reduce_a2a_args check_nvlink_connections "
            "get_a2av_perm_idxs_from_group_cast_meta get_group_reduce_handle_from_sym_group_cast "
            "get_native_group_cast_meta get_num_rdma_recv_tokens get_pg_backend "
            "group_cast_impl_with_batch_p2p lse_reduce_output sanity_check_for_group_cast_meta_args_per_rank "
            "sanity_check_for_group_reduce_meta_args_per_rank seqlens2curanges sum_reduce_output "
            "transfer_splits_and_dst_idxs_to_t2r_idx unpermute_output unpermute_output_with_lse"
        ),
        "magi_attention.comm.work": "GeneralWork WorkWithPostProcessFn",
        "magi_attention.common": (
            "AttnForwardMeta AttnMask AttnMaskType AttnRange AttnRanges AttnRectangle AttnRectangles "
            "RangeError USE_CPP_BACKEND enum is_cpp_backend_enable jit range_op"
        ),
        "magi_attention.common.enum": (
            "AttnMaskType AttnOverlapMode AttnRole AttnSinkLayout AttnType DispatchAlgType DynamicAttnAlgType "
            "GroupReduceOp GrpCollBufferName MagiAttentionKernelBackend MagiAttentionPrecision "
            "OutMaybeWithLSE OverlapAlgType"
        ),
        "magi_attention.common.forward_meta": "AttnForwardMeta",
        "magi_attention.common.jit": "core cpp_ext env utils",
        "magi_attention.common.jit.core": "JitSpec clear_cache_dir force_jit gen_jit_spec get_tmpdir logger",
        "magi_attention.common.jit.cpp_ext": "generate_ninja_build_for_op join_multiline run_ninja",
        "magi_attention.common.jit.env": (
            "CUTLASS_INCLUDE_DIRS FLEXIBLE_FLASH_ATTENTION_CSRC_DIR MAGI_ATTENTION_AOT_DIR MAGI_ATTENTION_BASE_DIR "
            "MAGI_ATTENTION_CACHE_DIR MAGI_ATTENTION_CSRC_DIR MAGI_ATTENTION_GEN_SRC_DIR MAGI_ATTENTION_INCLUDE_DIR "
            "MAGI_ATTENTION_JIT_DIR MAGI_ATTENTION_WORKSPACE_DIR"
        ),
        "magi_attention.common.jit.utils": "dtype_map filename_safe_dtype_map write_if_different",
        "magi_attention.common.mask": "AttnMask",
        "magi_attention.common.protocols": (
            "AttnMaskTypeProtocol AttnRangeProtocol AttnRangesProtocol AttnRectangleProtocol AttnRectanglesProtocol"
        ),
        "magi_attention.common.range": "AttnRange RangeError",
        "magi_attention.common.range_op": "range_fill_ range_gather range_reduce",
        "magi_attention.common.range_op.utils": "",
        "magi_attention.common.ranges": "AttnRanges check_valid_cu_seqlens is_valid_cu_seqlens",
        "magi_attention.common.rectangle": "AttnRectangle INT_MAX INT_MIN",
        "magi_attention.common.rectangles": "AttnRectangles",
        "magi_attention.config": (
            "BSDispatchAlg DPDispatchAlg DispatchAlg DispatchConfig DistAttnConfig GreedyOverlapAlg "
            "GrpCollConfig LBDispatchAlg MinHeapDispatchAlg OverlapAlg OverlapConfig SequentialDispatchAlg "
            "SortedSequentialSelectAlg UniformOverlapAlg"
        ),
        "magi_attention.dist_attn_runtime_mgr": (
            "DistAttnRuntimeDict DistAttnRuntimeKey DistAttnRuntimeMgr check_flag_comb init_dist_attn_runtime_key "
            "init_dist_attn_runtime_mgr init_grpcoll_buffer_mgr logger"
        ),
        "magi_attention.env": "build comm general",
        "magi_attention.env.build": (
            "is_build_debug is_build_verbose is_force_jit_build is_no_build_cache nvcc_threads workspace_base_dir"
        ),
        "magi_attention.env.comm": (
            "dsink_all_reduce_op ffa_bwd_sm_margin_save_for_comm ffa_fwd_sm_margin_save_for_comm "
            "is_bwd_high_precision_reduce_enable is_fwd_high_precision_reduce_enable "
            "is_hierarchical_comm_enable is_native_grpcoll_enable is_qo_comm_enable"
        ),
        "magi_attention.env.general": (
            "dist_attn_backward_hide_tail_reduce dist_attn_runtime_dict_size is_auto_range_merge_enable "
            "is_cat_gqa_enable is_cpp_backend_enable is_cuda_device_max_connections_one "
            "is_deterministic_mode_enable is_flatten_head_groups_enable is_profile_mode_enable "
            "is_sanity_check_enable kernel_backend log_level min_chunks_per_rank precision"
        ),
        "magi_attention.functional": (
            "correct_attn_lse correct_attn_lse_with_sink correct_attn_out correct_attn_out_lse "
            "correct_attn_out_lse_with_sink correct_attn_out_with_sink dispatch_func dist_attn_func "
            "ffa_fa4_func flex_flash_attn_func roll_func roll_simple_func undispatch_func"
        ),
        "magi_attention.functional.dispatch": "dispatch_func undispatch_func",
        "magi_attention.functional.dist_attn": (
            "DistAttnFunc DistAttnRuntime dist_attn_func is_magi_attn_ext_installed logger"
        ),
        "magi_attention.functional.fa4": "FA4AttnFunc fa4_bwd fa4_fwd ffa_fa4_func is_fa4_installed",
        "magi_attention.functional.fa4_utils": (
            "COMPILED_META_DICT FFA_FA4_CACHE_DIR KERNEL_SYMBOL_NAME current_dir is_fa4_installed "
            "load_precompiled_ffa_fa4 parent_dir precompile_ffa_fa4"
        ),
        "magi_attention.functional.flex_flash_attn": (
            "FlexFlashAttnFunc flex_flash_attn_func is_torch_compile_supported maybe_contiguous maybe_profile_ffa_ctx "
            "merge_ranges profile_mode"
        ),
        "magi_attention.functional.roll": "roll_p2p roll_simple_p2p",
        "magi_attention.functional.sdpa": (
            "sdpa_bwd sdpa_bwd_calc sdpa_bwd_dqdkdv_rearrange sdpa_bwd_postprocess sdpa_bwd_preprocess "
            "sdpa_bwd_qkvodo_lse_rearrange sdpa_bwd_recalc_fwd sdpa_fwd sdpa_fwd_calc sdpa_fwd_out_lse_rearrange "
            "sdpa_fwd_preprocess sdpa_fwd_qkv_rearrange"
        ),
        "magi_attention.functional.sdpa_online": "sdpa_online_bwd sdpa_online_fwd sdpa_online_fwd_calc",
        "magi_attention.functional.utils": (
            "calc_lse_rescale_weight calc_lse_sink calc_lse_sink_compiled correct_attn_lse "
            "correct_attn_lse_compiled correct_attn_lse_with_sink correct_attn_out correct_attn_out_compiled "
            "correct_attn_out_lse correct_attn_out_lse_with_sink correct_attn_out_lse_with_sink_compiled "
            "correct_attn_out_with_sink correct_out_lse_kernel safe_lse safe_softmax safe_subtract sink_bwd "
            "sink_bwd_compiled softmax_bwd"
        ),
        "magi_attention.meta": (
            "collection container make_attn_meta_from_dispatch_meta make_bucket_per_rank_from_qk_ranges "
            "make_dispatch_meta_from_qk_ranges make_global_bucket_from_qk_ranges solver"
        ),
        "magi_attention.meta.algorithms": (
            "BinaryGreedyDynamicAttnAlgorithm BinaryGreedyParallelDynamicAttnAlgorithm DynamicAttnAlgorithm "
            "FastSNFDynamicAttnAlgorithm GRGDynamicAttnAlgorithm NCQDynamicAttnAlgorithm "
            "SNFDynamicAttnAlgorithm"
        ),
        "magi_attention.meta.algorithms.base": "DynamicAttnAlgorithm",
        "magi_attention.meta.algorithms.binary_greedy": "BinaryGreedyDynamicAttnAlgorithm",
        "magi_attention.meta.algorithms.binary_greedy_parallel": "BinaryGreedyParallelDynamicAttnAlgorithm USE_CPP_EXT",
        "magi_attention.meta.algorithms.fast_snf": "FastSNFDynamicAttnAlgorithm",
        "magi_attention.meta.algorithms.grg": "GRGDynamicAttnAlgorithm",
        "magi_attention.meta.algorithms.ncq": "NCQDynamicAttnAlgorithm",
        "magi_attention.meta.algorithms.snf": "SNFDynamicAttnAlgorithm",
        "magi_attention.meta.collection": "CalcMeta CommMeta DispatchMeta",
        "magi_attention.meta.collection.calc_meta": (
            "AttnArg CalcMeta FA4AttnArg is_fa4_installed is_magi_to_hstu_installed"
        ),
        "magi_attention.meta.collection.comm_meta": (
            "A2AVBasedGroupCollectiveArg CommMeta GroupCollectiveArg NativeGroupCollectiveArg"
        ),
        "magi_attention.meta.collection.dispatch_meta": "DispatchMeta",
        "magi_attention.meta.container": (
            "AttnBucket AttnChunk AttnSlice HostRankEntry MultiKAttnSlice RemoteRankEntry"
        ),
        "magi_attention.meta.container.bucket": "AttnBucket",
        "magi_attention.meta.container.chunk": "AttnChunk",
        "magi_attention.meta.container.rank_entry": "HostRankEntry RemoteRankEntry",
        "magi_attention.meta.container.slice": "AttnSlice MultiKAttnSlice",
        "magi_attention.meta.container.transfer_table": (
            "AttnRangeWithRank GroupCastRanges TableEntry TransferInfo TransferTable"
        ),
        "magi_attention.meta.solver": (
            "BTPDispatchAlg BatchToppHeapDispatchAlg DispatchSolver OverlapSolver RandomSelectDispatchAlg "
            "dispatch_solver dist_attn_solver overlap_solver"
        ),
        "magi_attention.meta.solver.dispatch_solver": (
            "BSDispatchAlg BTPDispatchAlg BaseDispatchAffinity BatchToppHeapDispatchAlg DPDispatchAlg "
            "DispatchAlg DispatchConfig DispatchData DispatchJob DispatchSolution DispatchSolver IOUAffinity "
            "LBDispatchAlg MinHeapDispatchAlg RandomSelectDispatchAlg SampleIDAffinity SequentialDispatchAlg "
            "SortedSequentialSelectAlg ToppHeapDispatchAlg"
        ),
        "magi_attention.meta.solver.dist_attn_solver": "BaseDistAttnSolver DistAttnSolver USE_CPP_EXT logger",
        "magi_attention.meta.solver.dynamic_attn_solver": "DynamicAttnSolver USE_CPP_EXT",
        "magi_attention.meta.solver.dynamic_solver_vis": "visualize_buckets",
        "magi_attention.meta.solver.overlap_solver": (
            "GreedyOverlapAlg OverlapAlg OverlapConfig OverlapSolution OverlapSolver OverlapStageCost UniformOverlapAlg"
        ),
        "magi_attention.meta.solver.slice_maker": "HostAttnSliceMaker RemoteAttnSliceMaker",
        "magi_attention.testing": "GroundTruthDispatcher assert_close dist_common parameterize ref_attn_func utils",
        "magi_attention.testing.dist_common": (
            "DEVICE_TYPE DistTestBase INTERFACE NAME NUM_DEVICES PG_DEFAULT_BACKEND PROFILE_ONLY RUN_IN_MP "
            "SKIP_WORLD_SIZE TEST_ATTN_CONFIG TEST_WORLD_SIZE TestFunc should_run_attn_config should_run_test_case "
            "should_run_world_size skip_if_world_size_filtered with_comms with_run_in_mp"
        ),
        "magi_attention.testing.flag_generator": "FlagCombGenerator",
        "magi_attention.testing.gt_dispatcher": "GroundTruthDispatcher",
        "magi_attention.testing.precision": (
            "EPSILON H100_MATMUL_MFU H100_NVLINK_A2A_BWU H100_NVLINK_BANDWIDTH H100_TFLOPS_16 H800_NVLINK_A2A_BWU "
            "H800_NVLINK_BANDWIDTH H800_TFLOPS_16 IB_BANDWIDTH assert_close calc_inf_norm extract_mismatch_info "
            "extract_mismatch_threshold"
        ),
        "magi_attention.testing.ref_attn": "RefAttnTorchImplMainProcessOnline ref_attn_func",
        "magi_attention.testing.utils": (
            "switch_deterministic_mode_context switch_deterministic_mode_decorator switch_envvar_context "
            "switch_envvar_decorator switch_envvars switch_ffa_verbose_jit_build_context "
            "switch_ffa_verbose_jit_build_decorator switch_kernel_backend_context switch_kernel_backend_decorator "
            "switch_sdpa_backend_context switch_sdpa_backend_decorator"
        ),
        "magi_attention.utils": (
            "argmax argmin argsort ceil_div clearup_dist_env cu_seqlens2seqlens debugpy_listen "
            "find_factors_in_range flatten_nested_list format_dict_field format_list_field fp_dtype_bits "
            "get_a2a_corr_factor get_calc_cost_factor get_comm_cost_factor get_factors get_num_sms is_ampere "
            "is_blackwell is_fp_dtype_at_least is_hopper is_list_type_all is_list_value_all is_list_value_any "
            "is_same_device_mesh is_same_process_group make_attn_mask_from_ffa_args "
            "make_slice_mask_from_ffa_attn_type max_fp_dtype metaclass missing_dependency nvtx "
            "pad_and_pack_tensors perm_idxs2unperm_idxs repr_matrix rprint_rank seqlens2cu_seqlens "
            "set_random_seed setup_dist_env sparse_utils str2seed sync_rng to_higher_fp_dtype to_triton_dtype "
            "transpose_matrix vis_attn_mask vis_cute_layout vis_matrix wrap_to_list write_rank"
        ),
        "magi_attention.utils.debug": "debugpy_listen",
        "magi_attention.utils.metaclass": "SingletonMeta",
        "magi_attention.utils.nvtx": "add_nvtx_event instrument_nvtx nvtx_range_pop nvtx_range_push switch_profile",
        "magi_attention.utils.sparse_utils": (
            "block_mask_to_qk_ranges_kernel build_index_attn_indices choose_ref_block "
            "deprecated_slow_get_sdpa_mask_from_block_sparse_mask flatten_block_mask "
            "flatten_block_mask_to_kv_shape generate_block_sparse_pattern generate_ranges_from_block_mask "
            "generate_ranges_from_block_mask_triton generate_ranges_from_topk_indices "
            "generate_ranges_from_topk_indices_triton generate_ranges_from_var_block_mask "
            "generate_variable_block_sparse_pattern get_sdpa_mask_from_block_sparse_mask "
            "get_sdpa_mask_from_index_attn_indices get_sdpa_mask_from_topk_indices "
            "get_sdpa_mask_from_var_block_mask topk_indices_to_qk_ranges_kernel"
        ),
        "magi_attn_extensions": (
            "dsa_attn_func fa2_func_with_sink fa2_kvpacked_func_with_sink fa2_qkvpacked_func_with_sink "
            "fa2_varlen_func_with_sink fa2_varlen_kvpacked_func_with_sink fa2_varlen_qkvpacked_func_with_sink "
            "fa3_func_with_sink fa3_qkvpacked_func_with_sink fa3_varlen_func_with_sink fa4_func_with_sink "
            "fa4_varlen_func_with_sink"
        ),
        "magi_attn_extensions.dsa_interface": (
            "dsa_attn_func fa_per_token_sparse_ffa_index_attn_fwd fa_per_token_sparse_ffa_sparse_load_fwd "
            "fa_per_token_sparse_flex_fwd fa_per_token_sparse_sdpa_fwd flex_attn_func"
        ),
        "magi_attn_extensions.fa2_interface_with_sink": (
            "FA2FuncWithSink FA2KVPackedFuncWithSink FA2QKVPackedFuncWithSink FA2VarlenFuncWithSink "
            "FA2VarlenKVPackedFuncWithSink FA2VarlenQKVPackedFuncWithSink fa2_func_with_sink "
            "fa2_kvpacked_func_with_sink fa2_qkvpacked_func_with_sink fa2_varlen_func_with_sink "
            "fa2_varlen_kvpacked_func_with_sink fa2_varlen_qkvpacked_func_with_sink"
        ),
        "magi_attn_extensions.fa3_interface_with_sink": (
            "FA3FuncWithSink FA3QKVPackedFuncWithSink FA3VarlenFuncWithSink fa3_func_with_sink "
            "fa3_qkvpacked_func_with_sink fa3_varlen_func_with_sink"
        ),
        "magi_attn_extensions.fa4_interface_with_sink": (
            "FA4FuncWithSink FA4VarlenFuncWithSink fa4_func_with_sink fa4_varlen_func_with_sink is_fa4_installed"
        ),
    }.items()
}
"""Names of each module; submodules, which are keys of their own, may be among them."""
