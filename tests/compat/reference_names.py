"""The public names of MagiAttention v1.1: of its documents, and of the modules that these import from.

Facts typed in from its public documents: v1.1.0, and what v1.1.1 adds. Arguments by position stand before ``*``,
those by name alone after it; for ``None`` none are compared. Several strings: the versions differ.
"""

KEY_HEAD = "num_heads_q num_heads_kv head_dim pad_size"
FLEX = "q_ranges k_ranges attn_mask_type total_seqlen_q total_seqlen_k " + KEY_HEAD
VARLEN = "cu_seqlens_q cu_seqlens_k " + KEY_HEAD
FLEX_END = "dist_attn_config is_same_source is_q_permutable is_k_permutable"
VARLEN_END = "causal window_size dist_attn_config"
SINK = "sink sink_layout inplace"

NAMES = {
    "magi_attention.api": {
        "magi_attn_flex_key": (
            f"{FLEX} chunk_size cp_group_or_mesh {FLEX_END}",
            f"{FLEX} cp_group_or_mesh {FLEX_END} chunk_size",
        ),
        "magi_attn_varlen_key": (
            f"{VARLEN} chunk_size cp_group_or_mesh {VARLEN_END}",
            f"{VARLEN} cp_group_or_mesh {VARLEN_END} chunk_size",
        ),
        "magi_attn_flex_dispatch": "x",
        "magi_attn_varlen_dispatch": "x",
        "make_flex_key_for_new_mask_after_dispatch": (
            "q_ranges k_ranges attn_mask_type key_for_dispatch dist_attn_config",
            "q_ranges k_ranges attn_mask_type key_for_dispatch num_heads_q num_heads_kv head_dim dist_attn_config",
        ),
        "make_varlen_key_for_new_mask_after_dispatch": (
            "cu_seqlens_q cu_seqlens_k key_for_dispatch causal window_size dist_attn_config"
        ),
        "dispatch": "x key pad_value",
        "undispatch": "x key is_partial_grad",
        "roll": "x shift dim key",
        "roll_simple": "x shift dim key",
        "calc_attn": "q k v key sink softmax_scale softcap return_max_logits",
        "get_position_ids": "key",
        "get_most_recent_key": "cp_group",
        "clear_cache": "cp_group",
        "flex_flash_attn_func": "q k v q_ranges k_ranges attn_type_map * sink sink_layout softmax_scale softcap "
        "deterministic sm_margin disable_fwd_atomic_reduction disable_bwd_dkv_atomic_reduction ref_block_size "
        "max_seqlen_q auto_range_merge swap_ab pack_gqa cat_gqa sparse_load swap_bwd_qk_loop return_max_logits",
        "compute_pad_size": "total_seqlen_q cp_size chunk_size",
        "squash_batch_dim": "x",
        "infer_varlen_mask_from_batch": "batch_size seq_len device",
        "infer_attn_mask_from_sliding_window": "q_range k_range window_size",
        "infer_attn_mask_from_cu_seqlens": "cu_seqlens_q cu_seqlens_k causal window_size global_window_size",
        "AttnForwardMeta": "lse max_logits",
        "AttnMaskType": None,
        "AttnOverlapMode": None,
        "AttnRanges": "",
        "DistAttnRuntimeKey": None,
        "GeneralAttnMaskType": None,
        "DistAttnConfig": "dispatch_config overlap_config grpcoll_config",
        "DispatchConfig": ("alg", "chunk_size uneven_shard alg"),
        "OverlapConfig": (
            "enable mode degree dynamic_max_degree min_chunk_size max_num_chunks alg calc_cost_factor comm_cost_factor",
            "mode degree dynamic_max_degree min_chunk_size max_num_chunks alg calc_cost_factor comm_cost_factor",
        ),
        "GrpCollConfig": "num_sms nvl_chunk_size nvl_buffer_size rdma_chunk_size rdma_buffer_size num_nvl_bytes "
        "num_rdma_bytes",
        "DispatchAlg": "",
        "MinHeapDispatchAlg": "",
        "ToppHeapDispatchAlg": "top_p",
        "SequentialDispatchAlg": "",
        "SortedSequentialSelectAlg": "allocation_ratio",
        "LBDispatchAlg": "",
        "DPDispatchAlg": "",
        "BSDispatchAlg": "",
        "OverlapAlg": "",
        "UniformOverlapAlg": "random_costs random_seed",
        "GreedyOverlapAlg": "",
        "DistAttnRuntimeDictManager": None,
        "dist_attn_runtime_dict_mgr": None,
    },
    "magi_attention.api.functools": {
        "pad_at_dim": "x dim pad_size value side",
        "unpad_at_dim": "x dim pad_size",
        "apply_padding": "q_ranges k_ranges attn_mask_type total_seqlen pad_size",
    },
    "magi_attention.common": {
        "AttnRange": "start end",
        "RangeError": None,
        "AttnRectangle": "q_range k_range d_range mask_type",
        "AttnRectangles": "",
        "AttnMask": None,
        "range_op": None,
        "jit": None,
        "USE_CPP_BACKEND": None,
        "is_cpp_backend_enable": "",
    },
    "magi_attention.common.ranges": {
        "is_valid_cu_seqlens": "cu_seqlens seq_len",
        "check_valid_cu_seqlens": "cu_seqlens seq_len",
    },
    "magi_attention.common.enum": {
        "DispatchAlgType": None,
        "OverlapAlgType": None,
        "AttnType": None,
        "AttnRole": None,
        "AttnSinkLayout": None,
        "GroupReduceOp": None,
        "OutMaybeWithLSE": None,
        "DynamicAttnAlgType": None,
        "GrpCollBufferName": None,
        "MagiAttentionKernelBackend": None,
        "MagiAttentionPrecision": None,
    },
    "magi_attention.functional": {
        "correct_attn_lse": "lse1 lse2 inplace",
        "correct_attn_out": "out1 lse1 out2 lse2 lse inplace",
        "correct_attn_out_lse": "out1 lse1 out2 lse2 inplace",
        "correct_attn_lse_with_sink": f"lse {SINK}",
        "correct_attn_out_with_sink": f"out lse {SINK}",
        "correct_attn_out_lse_with_sink": f"out lse {SINK}",
        "dispatch_func": None,
        "undispatch_func": None,
        "roll_func": None,
        "roll_simple_func": None,
        "dist_attn_func": None,
        "ffa_fa4_func": None,
    },
    "magi_attention.functional.utils": dict.fromkeys(
        [
            "safe_subtract",
            "safe_lse",
            "safe_softmax",
            "softmax_bwd",
            "sink_bwd",
            "sink_bwd_compiled",
            "calc_lse_rescale_weight",
            "calc_lse_sink",
            "calc_lse_sink_compiled",
            "correct_attn_lse_compiled",
            "correct_attn_out_compiled",
            "correct_attn_out_lse_with_sink_compiled",
        ]
    ),
    "magi_attention": dict.fromkeys(
        [
            "init_dist_attn_runtime_key",
            "init_dist_attn_runtime_mgr",
            "is_sanity_check_enable",
            "is_flatten_head_groups_enable",
            "is_cuda_device_max_connections_one",
            "dist_attn_runtime_dict_size",
            "comm",
            "functional",
            "env",
            "magi_attn_ext",
            "magi_attn_comm",
            "flexible_flash_attention_utils_cuda",
        ]
    ),
    "magi_attention.dist_attn_runtime_mgr": dict.fromkeys(["DistAttnRuntimeMgr", "DistAttnRuntimeDict"]),
    "magi_attention.comm": dict.fromkeys(
        [
            "primitive",
            "WorkWithPostProcessFn",
            "is_hierarchical_comm_enable",
            "ffa_fwd_sm_margin_save_for_comm",
            "ffa_bwd_sm_margin_save_for_comm",
            "is_qo_comm_enable",
            "is_fwd_high_precision_reduce_enable",
            "is_bwd_high_precision_reduce_enable",
            "is_native_grpcoll_enable",
            "dsink_all_reduce_op",
        ]
    ),
    "magi_attention.meta": dict.fromkeys(
        [
            "container",
            "collection",
            "solver",
            "make_dispatch_meta_from_qk_ranges",
            "make_attn_meta_from_dispatch_meta",
            "make_global_bucket_from_qk_ranges",
            "make_bucket_per_rank_from_qk_ranges",
        ]
    ),
    "magi_attention.meta.solver": dict.fromkeys(
        ["BTPDispatchAlg", "RandomSelectDispatchAlg", "BatchToppHeapDispatchAlg", "DispatchSolver", "OverlapSolver"]
    ),
    "magi_attention.utils": {
        "setup_dist_env": "backend base_seed seed_bias",
        "clearup_dist_env": "",
        "get_calc_cost_factor": "num_heads_q head_dim tflops mfu sec_ratio is_fwd",
        "get_comm_cost_factor": "num_heads_kv head_dim bandwidth bwu corr_factor sec_ratio",
        "get_a2a_corr_factor": "world_size",
        **dict.fromkeys(
            [
                "seqlens2cu_seqlens",
                "cu_seqlens2seqlens",
                "make_attn_mask_from_ffa_args",
                "make_slice_mask_from_ffa_attn_type",
                "set_random_seed",
                "sync_rng",
                "nvtx",
                "debugpy_listen",
                "sparse_utils",
                "metaclass",
            ]
        ),
    },
    "magi_attention.testing": dict.fromkeys(["ref_attn_func", "assert_close", "parameterize", "GroundTruthDispatcher"]),
}

# Methods with their arguments, properties and attributes as None.
METHODS = {
    "AttnRange": {
        "start": None,
        "end": None,
        "seqlen": None,
        "to_naive_range": "",
        "from_range": "attn_range check",
        "clone": "",
        "offset": "offset",
        "truncate": "start end",
        "intersect": "other",
        "intersect_size": "other",
        "union": "other",
        "union_size": "other",
        "diff_by": "other",
        "is_subrange_of": "other",
        "is_overlap_with": "other",
        "is_empty": "",
        "is_valid_close": "start end",
        "is_valid_open": "start end",
        "check_valid": "start end",
    },
    "AttnRanges": {
        "is_valid": "",
        "check_valid": "",
        "append": "attn_range check",
        "insert": "idx attn_range check",
        "extend": "attn_ranges check",
        "pop": "idx",
        "clear_empty": "",
        "sort": "",
        "merge": "",
        "merge_with_split_alignment": "split_alignment",
        "chunk": "chunk_size check",
        "truncate": "start end",
        "is_sorted": "",
        "is_merged": "",
        "is_non_overlap": "",
        "is_cu_seqlens": "seqlen",
        "to_cu_seqlens": "seq_len",
        "make_range_local": "other_attn_range is_self_merged prefix_offset",
        "make_ranges_local": "other_attn_ranges is_self_merged",
        "find_hole_ranges": "other_attn_ranges is_self_merged is_other_merged",
        "find_overlap_ranges": "other_attn_ranges is_self_merged is_other_merged",
        "to_tensor": "device",
        "from_cu_seqlens": "cu_seqlens seq_len",
        "clone": "",
        "from_ranges": "ranges check",
        "to_naive_ranges": "",
        "intersect_size": "",
        "intersect_size_with": "other",
        "union_size": "",
        "union_size_with": "other",
        "total_seqlen": None,
        "max_seqlen": None,
        "start": None,
        "end": None,
        "size": None,
        "points": None,
        "is_empty": "",
    },
    "AttnRectangle": {
        "q_range": None,
        "k_range": None,
        "d_range": None,
        "is_valid": "q_range k_range d_range",
        "check_valid": "q_range k_range d_range",
        "get_valid_or_none": "",
        "shrink_d_range": "",
        "shrink_q_range": "",
        "shrink_k_range": "",
        "clone": "",
        "cut_q": "cut_pos",
        "cut_k": "cut_pos",
        "get_rect_within_q_segment": "q_start q_end",
        "get_rect_within_k_segment": "k_start k_end",
        "intersection_q_id_on_left_boundary": "",
        "intersection_q_id_on_right_boundary": "",
        "is_full": "",
        "is_causal": "",
        "is_inv_causal": "",
        "is_bi_causal": "",
        "to_qk_range_mask_type": "",
        "area": "",
        "count_areas": "lq rq lk rk ld rd",
    },
    "AttnRectangles": {
        "is_valid": "",
        "check_valid": "",
        "append": "attn_rect check",
        "extend": "attn_rects check",
        "from_ranges": "q_ranges k_ranges mask_types check",
        "get_qo_ranges_union": "",
        "get_kv_ranges_union": "",
        "total_seqlen_qo": "",
        "total_seqlen_kv": "",
        "cut_q": "cut_pos",
        "cut_k": "cut_pos",
        "get_rects_within_q_segment": "q_start q_end",
        "get_rects_within_k_segment": "k_start k_end",
        "area": "",
        "size": None,
        "is_empty": "",
    },
    "AttnMaskType": {"from_int_type": "int_type", "to_int_type": ""},
    "DispatchAlg": dict.fromkeys(
        ["is_optimal", "is_partitions_returned", "is_equal_num_workloads", "is_affinity_considered"]
    ),
    "DistAttnRuntimeKey": dict.fromkeys(
        [
            "q_ranges",
            "k_ranges",
            "attn_mask_type",
            "total_seqlen_q",
            "total_seqlen_k",
            "num_heads_q",
            "num_heads_kv",
            "head_dim",
            "pad_size",
            "chunk_size",
            "cp_group",
            "cp_mesh",
            "dist_attn_config",
            "uneven_shard",
            "is_deterministic_mode_enable",
            "is_hierarchical_comm_enable",
            "is_qo_comm_enable",
            "is_native_grpcoll_enable",
            "is_flatten_head_groups_enable",
            "is_sdpa_backend_enable",
            "is_fa4_backend_enable",
            "kernel_backend",
            "precision",
            "is_auto_range_merge_enable",
        ]
    ),
    "GrpCollConfig": dict.fromkeys(
        [
            "to_kernel_config",
            "to_buffer_args",
            "get_default_group_cast_config",
            "get_default_group_reduce_config",
            "get_min_num_bytes_intranode",
            "get_min_num_bytes_internode",
        ]
    ),
}

MEMBERS = {
    "AttnMaskType": {"FULL": "full", "CAUSAL": "causal", "BICAUSAL": "bi_causal", "INVCAUSAL": "inv_causal"},
    "AttnOverlapMode": {"STATIC": "static", "DYNAMIC": "dynamic"},
    "OverlapAlgType": {"UNIFORM": "uniform", "GREEDY": "greedy"},
    "DispatchAlgType": {
        "LOWER_BOUND": "lower_bound",
        "DYNAMIC_PROGRAMMING": "dynamic_programming",
        "BINARY_SEARCH": "binary_search",
        "MIN_HEAP": "min_heap",
        "TOPP_HEAP": "topp_heap",
        "SEQUENTIAL_SELECT": "sequential_select",
        "SORTED_SEQUENTIAL_SELECT": "sorted_sequential_select",
    },
}

_FA2 = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
_FA3 = "q_descale k_descale v_descale window_size attention_chunk softcap"
_FA4 = "softmax_scale causal softcap num_splits pack_gqa deterministic return_attn_probs"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
EXTENSIONS = {
    "fa2_func_with_sink": f"q k v sink sink_layout {_FA2}",
    "fa2_qkvpacked_func_with_sink": "qkv sink sink_layout",
    "fa2_kvpacked_func_with_sink": "q kv sink sink_layout",
    "fa2_varlen_func_with_sink": f"q k v {_LENGTHS} sink sink_layout {_FA2} block_table",
    "fa2_varlen_qkvpacked_func_with_sink": "qkv cu_seqlens max_seqlen sink sink_layout",
    "fa2_varlen_kvpacked_func_with_sink": f"q kv {_LENGTHS} sink sink_layout",
    "fa3_func_with_sink": f"q k v sink sink_layout softmax_scale causal qv {_FA3} num_splits pack_gqa deterministic "
    "sm_margin return_attn_probs",
    "fa3_varlen_func_with_sink": f"q k v {_LENGTHS} sink sink_layout seqused_q seqused_k softmax_scale causal qv "
    f"{_FA3} num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "fa3_qkvpacked_func_with_sink": f"qkv sink sink_layout softmax_scale causal {_FA3} deterministic num_heads_q "
    "sm_margin return_attn_probs",
    "fa4_func_with_sink": f"q k v sink sink_layout {_FA4}",
    "fa4_varlen_func_with_sink": f"q k v {_LENGTHS} sink sink_layout {_FA4}",
    "dsa_attn_func": "q k v index_map softmax_scale backend",
}
"""Of the package magi_attn_extensions 1.1.0. What packed variants take behind the layout they pass on as it comes."""

AUTOMODEL = {
    "AttnMaskSpec": "q_ranges k_ranges mask_types total_seqlen",
    "MagiState": "enabled custom cp_group cp_size",
    "build_flex_key": "spec num_heads_q num_heads_kv head_dim cp_group",
    "get_active_attn_spec": None,
    "get_active_cp_group": None,
    "get_cp_group": "device_mesh",
    "is_magi_available": "",
    "magi_prepare_batch": "model batch cp_group chunk_size",
    "magi_prepare_packed_cp": "model batch cp_group",
    "magi_prepare_vlm": "model batch cp_group",
    "make_magi_attn_func": "softmax_scale",
    "register_magi_attention": "",
    "set_active_attn_spec": None,
    "set_active_cp_group": None,
    "setup_magi": "cfg device_mesh * label domain",
    "DEFAULT_CHUNK_SIZE": None,
}
"""Public names of nemo_automodel.components.distributed.magi_attn_utils."""

AUTOMODEL_METHODS = {
    "AttnMaskSpec": {
        "causal": "seqlen",
        "varlen": "seqlens causal",
        "prefix_tree": "node_lengths sample_paths",
        "fingerprint": "",
    },
    "MagiState": {
        "hf_dispatch": None,
        "prepare_llm_batch": "model batch * device_mesh is_thd pad_id num_chunks",
        "prepare_vlm_batch": "model batch",
        "make_cp_batch": "cp_mesh batch * padding_token_id num_chunks is_thd model return_local_indices",
    },
}
