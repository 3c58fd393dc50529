"""Parameters of the Hopper kernels: the structs of ``csrc/attention/sm90``, field by field.

The padding at the end is what C adds to a struct whose first member is aligned to 64 bytes.
"""

import ctypes

from megatron_magi.cuda.arriving import GateParams

_MAPS = [("q", ctypes.c_char * 128), ("k", ctypes.c_char * 128), ("v", ctypes.c_char * 128)]
_REMOTE_MAPS = [("k_remote", ctypes.c_char * 128), ("v_remote", ctypes.c_char * 128)]
_FORWARD_REST = [
        ("out_map", ctypes.c_char * 128),
        ("tiles", ctypes.c_void_p), ("segments", ctypes.c_void_p), ("bounds", ctypes.c_void_p),
        ("step", ctypes.c_int64),
        ("out", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("max_logits", ctypes.c_void_p),
        ("sink_lse", ctypes.c_void_p), ("counter", ctypes.c_void_p),
        ("out_row", ctypes.c_int64), ("out_head", ctypes.c_int64),
        ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64),
        ("sink_row", ctypes.c_int64), ("sink_head", ctypes.c_int64),
        ("num_tiles", ctypes.c_int32), ("num_heads", ctypes.c_int32),
        ("group", ctypes.c_int32), ("head_section", ctypes.c_int32),
        ("scale_log2", ctypes.c_float), ("softcap_factor", ctypes.c_float), ("logit_scale", ctypes.c_float),
        ("accumulate", ctypes.c_int32), ("out_fp32", ctypes.c_int32),
        ("log2_packed", ctypes.c_int32), ("long_blocks", ctypes.c_int32),
    ]  # fmt: skip
_PAD = ("pad", ctypes.c_char * 64)


_NUMBERS = ("numbers", ctypes.c_void_p)


def _with_numbers(fields: list[tuple]) -> list[tuple]:
    """Fields of a kernel that reads a mask's numbers from memory: their address ends its TilePlan, or the struct."""
    names = [name for name, _ in fields]
    at = names.index("step") + 1 if "step" in names else len(fields)
    return [*fields[:at], _NUMBERS, *fields[at:]]


class ForwardParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_FORWARD_REST, _PAD]


class CapturedForwardParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_with_numbers(_FORWARD_REST), _PAD]


class GatedForwardParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_REMOTE_MAPS, *_FORWARD_REST, ("arrival_barrier", GateParams), _PAD]


_BACKWARD_REST = [
        ("dout", ctypes.c_char * 128),
        ("tiles", ctypes.c_void_p), ("segments", ctypes.c_void_p), ("bounds", ctypes.c_void_p),
        ("step", ctypes.c_int64),
        ("items", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("dq", ctypes.c_void_p), ("key_sums", ctypes.c_void_p), ("dk", ctypes.c_void_p), ("dv", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("dk_row", ctypes.c_int64), ("dk_head", ctypes.c_int64), ("dv_row", ctypes.c_int64),
        ("dv_head", ctypes.c_int64),
        ("num_items", ctypes.c_int32), ("group", ctypes.c_int32), ("heads_kv", ctypes.c_int32),
        ("heads_inner", ctypes.c_int32), ("stats_row", ctypes.c_int32), ("units", ctypes.c_int32),
        ("store", ctypes.c_int32),
        ("scale", ctypes.c_float), ("scale_log2", ctypes.c_float), ("softcap_factor", ctypes.c_float),
        ("log2_packed", ctypes.c_int32),
    ]  # fmt: skip
_OF_REMOTE = [
    ("store_remote", ctypes.c_int32), ("dk_remote", ctypes.c_void_p), ("dv_remote", ctypes.c_void_p),
    ("arrival_barrier", GateParams),
]  # fmt: skip


class BackwardParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_BACKWARD_REST, _PAD]


class CapturedBackwardParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_with_numbers(_BACKWARD_REST), _PAD]


class GatedBackwardParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_REMOTE_MAPS, *_BACKWARD_REST, *_OF_REMOTE, _PAD]


_PARTS_REST = [
        ("dout", ctypes.c_char * 128), ("dq_map", ctypes.c_char * 128),
        ("tiles", ctypes.c_void_p), ("segments", ctypes.c_void_p), ("bounds", ctypes.c_void_p),
        ("step", ctypes.c_int64),
        ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("dq", ctypes.c_void_p), ("dk", ctypes.c_void_p), ("dv", ctypes.c_void_p), ("counter", ctypes.c_void_p),
        ("dq_row", ctypes.c_int64), ("dq_head", ctypes.c_int64),
        ("dk_row", ctypes.c_int64), ("dk_head", ctypes.c_int64),
        ("dv_row", ctypes.c_int64), ("dv_head", ctypes.c_int64),
        ("num_tiles", ctypes.c_int32), ("num_heads", ctypes.c_int32), ("group", ctypes.c_int32),
        ("stats_row", ctypes.c_int32), ("store", ctypes.c_int32), ("splits", ctypes.c_int32),
        ("heads_inner", ctypes.c_int32), ("head_section", ctypes.c_int32),
        ("scale", ctypes.c_float), ("scale_log2", ctypes.c_float), ("softcap_factor", ctypes.c_float),
        ("log2_packed", ctypes.c_int32), ("long_blocks", ctypes.c_int32),
    ]  # fmt: skip


class BackwardPartParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_PARTS_REST, _PAD]


class CapturedBackwardPartParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_with_numbers(_PARTS_REST), _PAD]


class GatedBackwardPartParams(ctypes.Structure):
    _fields_ = [*_MAPS, *_REMOTE_MAPS, *_PARTS_REST, ("arrival_barrier", GateParams), _PAD]


_PREPARE = [
        ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("lse_out", ctypes.c_void_p), ("delta_out", ctypes.c_void_p),
        ("sums", ctypes.c_void_p), ("key_sums", ctypes.c_void_p),
        ("num_sums", ctypes.c_int64), ("num_key_sums", ctypes.c_int64),
        ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64),
        ("delta_row", ctypes.c_int64), ("delta_head", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("num_heads", ctypes.c_int32), ("stats_row", ctypes.c_int32),
        ("log2_packed", ctypes.c_int32), ("split", ctypes.c_float), ("concurrent", ctypes.c_int32),
    ]  # fmt: skip


class PrepareParams(ctypes.Structure):
    _fields_ = [*_PREPARE, _PAD]


class PrepareDeltaParams(ctypes.Structure):
    _fields_ = [
        *_PREPARE, ("dout", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("dout_row", ctypes.c_int64), ("dout_head", ctypes.c_int64),
        ("out_row", ctypes.c_int64), ("out_head", ctypes.c_int64), _PAD,
    ]  # fmt: skip


class CapturedPrepareParams(ctypes.Structure):
    _fields_ = [*_with_numbers(_PREPARE), _PAD]


class FinishParams(ctypes.Structure):
    _fields_ = [
        ("sums", ctypes.c_void_p), ("dq", ctypes.c_void_p), ("dq_row", ctypes.c_int64), ("dq_head", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("blocks", ctypes.c_int32), ("units", ctypes.c_int32),
        ("store", ctypes.c_int32), ("scale", ctypes.c_float),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


_FINISH_KEYS = [
        ("sums", ctypes.c_void_p), ("tiles", ctypes.c_void_p), ("dk", ctypes.c_void_p), ("dv", ctypes.c_void_p),
        ("dk_row", ctypes.c_int64), ("dk_head", ctypes.c_int64),
        ("dv_row", ctypes.c_int64), ("dv_head", ctypes.c_int64),
        ("heads_kv", ctypes.c_int32), ("store", ctypes.c_int32), ("scale", ctypes.c_float),
    ]  # fmt: skip


class FinishKeysParams(ctypes.Structure):
    _fields_ = [*_FINISH_KEYS, _PAD]


class CapturedFinishKeysParams(ctypes.Structure):
    _fields_ = [*_with_numbers(_FINISH_KEYS), _PAD]


class GatedFinishKeysParams(ctypes.Structure):
    _fields_ = [*_FINISH_KEYS, *_OF_REMOTE, _PAD]


class RowDeltaParams(ctypes.Structure):
    _fields_ = [
        ("dout", ctypes.c_void_p), ("out", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("dout_row", ctypes.c_int64), ("dout_head", ctypes.c_int64),
        ("out_row", ctypes.c_int64), ("out_head", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("num_heads", ctypes.c_int32), ("pad", ctypes.c_char * 64),
    ]  # fmt: skip
