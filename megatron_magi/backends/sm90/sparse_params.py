"""Parameters of the sparse Hopper kernels: the structs of ``csrc/attention/sm90/sparse_*``, field by field.

The padding at the end is what C adds to a struct whose first member is aligned to 64 bytes.
"""

import ctypes


class SparseTiles(ctypes.Structure):
    _fields_ = [
        ("entries", ctypes.c_void_p), ("offsets", ctypes.c_void_p), ("counts", ctypes.c_void_p),
        ("head_step", ctypes.c_int64), ("list_step", ctypes.c_int64), ("counter", ctypes.c_void_p),
        ("width", ctypes.c_int32), ("num_items", ctypes.c_int32), ("query_blocks", ctypes.c_int32),
        ("block_tiles", ctypes.c_int32), ("packs", ctypes.c_int32), ("heads_kv", ctypes.c_int32),
        ("list_heads", ctypes.c_int32),
        ("query_block", ctypes.c_int32), ("key_block", ctypes.c_int32), ("key_blocks", ctypes.c_int32),
        ("num_rows", ctypes.c_int32), ("num_keys", ctypes.c_int32), ("reach", ctypes.c_int32),
        ("log2_heads", ctypes.c_int32), ("long_list", ctypes.c_int32), ("num_entries", ctypes.c_int32),
    ]  # fmt: skip


class SparseForwardParams(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_char * 128), ("k", ctypes.c_char * 128), ("v", ctypes.c_char * 128),
        ("tiles", SparseTiles),
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("out", ctypes.c_void_p), ("lse", ctypes.c_void_p),
        ("max_logits", ctypes.c_void_p), ("sink_lse", ctypes.c_void_p),
        ("k_row", ctypes.c_int32), ("v_row", ctypes.c_int32), ("k_head", ctypes.c_int64), ("v_head", ctypes.c_int64),
        ("out_row", ctypes.c_int64), ("out_head", ctypes.c_int64),
        ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64),
        ("sink_row", ctypes.c_int64), ("sink_head", ctypes.c_int64),
        ("scale_log2", ctypes.c_float), ("logit_scale", ctypes.c_float), ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class SparseBackwardParams(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_char * 128), ("k", ctypes.c_char * 128), ("v", ctypes.c_char * 128),
        ("dout", ctypes.c_char * 128), ("tiles", SparseTiles),
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("dq", ctypes.c_void_p), ("dk_sums", ctypes.c_void_p), ("dv_sums", ctypes.c_void_p),
        ("fixed_scales", ctypes.c_void_p),
        ("k_row", ctypes.c_int32), ("v_row", ctypes.c_int32), ("k_head", ctypes.c_int64), ("v_head", ctypes.c_int64),
        ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64),
        ("delta_row", ctypes.c_int64), ("delta_head", ctypes.c_int64),
        ("dq_row", ctypes.c_int64), ("dq_head", ctypes.c_int64), ("sum_rows", ctypes.c_int64),
        ("scale", ctypes.c_float), ("scale_log2", ctypes.c_float), ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class SparseKeysParams(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_char * 128), ("k", ctypes.c_char * 128), ("v", ctypes.c_char * 128),
        ("dout", ctypes.c_char * 128), ("tiles", SparseTiles),
        ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p), ("dq_sums", ctypes.c_void_p),
        ("dk", ctypes.c_void_p), ("dv", ctypes.c_void_p),
        ("dk_row", ctypes.c_int64), ("dk_head", ctypes.c_int64),
        ("dv_row", ctypes.c_int64), ("dv_head", ctypes.c_int64), ("stats_rows", ctypes.c_int64),
        ("part_sums", ctypes.c_void_p), ("parts_done", ctypes.c_void_p),
        ("parts", ctypes.c_int32), ("window", ctypes.c_int32), ("least_steps", ctypes.c_int32),
        ("sum_heads", ctypes.c_int32), ("stats_block", ctypes.c_int32),
        ("units", ctypes.c_int32), ("block_units", ctypes.c_int32),
        ("scale", ctypes.c_float), ("scale_log2", ctypes.c_float),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class SparseFinishParams(ctypes.Structure):
    _fields_ = [
        ("dk_sums", ctypes.c_void_p), ("dv_sums", ctypes.c_void_p), ("fixed_scales", ctypes.c_void_p),
        ("dk", ctypes.c_void_p), ("dv", ctypes.c_void_p),
        ("dk_row", ctypes.c_int64), ("dk_head", ctypes.c_int64),
        ("dv_row", ctypes.c_int64), ("dv_head", ctypes.c_int64), ("sum_rows", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("heads", ctypes.c_int32), ("scale", ctypes.c_float),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class SparseListsParams(ctypes.Structure):
    _fields_ = [
        ("mask", ctypes.c_void_p), ("entries", ctypes.c_void_p), ("counts", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64), ("row_stride", ctypes.c_int64), ("column_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("num_columns", ctypes.c_int32), ("num_lists", ctypes.c_int32),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class SparseTurnParams(ctypes.Structure):
    _fields_ = [
        ("entries", ctypes.c_void_p), ("offsets", ctypes.c_void_p),
        ("head_step", ctypes.c_int64), ("list_step", ctypes.c_int64),
        ("counts", ctypes.c_void_p), ("starts", ctypes.c_void_p), ("rows", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("width", ctypes.c_int32), ("num_lists", ctypes.c_int32), ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32), ("chunks", ctypes.c_int32), ("chunk_rows", ctypes.c_int32),
        ("num_entries", ctypes.c_int32), ("num_places", ctypes.c_int32),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class SparseStatsParams(ctypes.Structure):
    _fields_ = [
        ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("lse_out", ctypes.c_void_p), ("delta_out", ctypes.c_void_p), ("sums", ctypes.c_void_p),
        ("num_sums", ctypes.c_int64), ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64),
        ("delta_row", ctypes.c_int64), ("delta_head", ctypes.c_int64), ("count", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("rows", ctypes.c_int32), ("query_block", ctypes.c_int32),
        ("stats_block", ctypes.c_int32), ("log2_heads", ctypes.c_int32), ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class SparseFinishDqParams(ctypes.Structure):
    _fields_ = [
        ("sums", ctypes.c_void_p), ("dq", ctypes.c_void_p), ("dq_row", ctypes.c_int64), ("dq_head", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("units", ctypes.c_int32), ("block_units", ctypes.c_int32),
        ("query_block", ctypes.c_int32), ("log2_heads", ctypes.c_int32), ("scale", ctypes.c_float),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip
