"""Learnable attention sinks for other kernels: FlashAttention 2, 3 and 4, and torch's own attention; and attention
over lists of keys.

The names and arguments of ``magi_attn_extensions``. A kernel is imported when its function is first called. `sink` has
the arithmetic.
"""

from megatron_magi.extensions.dsa import dsa_attn_func
from megatron_magi.extensions.flash_attention_2 import (
    fa2_func_with_sink,
    fa2_kvpacked_func_with_sink,
    fa2_qkvpacked_func_with_sink,
    fa2_varlen_func_with_sink,
    fa2_varlen_kvpacked_func_with_sink,
    fa2_varlen_qkvpacked_func_with_sink,
)
from megatron_magi.extensions.flash_attention_3 import (
    fa3_func_with_sink,
    fa3_qkvpacked_func_with_sink,
    fa3_varlen_func_with_sink,
)
from megatron_magi.extensions.flash_attention_4 import fa4_func_with_sink, fa4_varlen_func_with_sink
from megatron_magi.extensions.sdpa import sdpa_func_with_sink
from megatron_magi.extensions.sink import Kernel, attention_with_sink

__all__ = [
    "Kernel",
    "attention_with_sink",
    "dsa_attn_func",
    "fa2_func_with_sink",
    "fa2_kvpacked_func_with_sink",
    "fa2_qkvpacked_func_with_sink",
    "fa2_varlen_func_with_sink",
    "fa2_varlen_kvpacked_func_with_sink",
    "fa2_varlen_qkvpacked_func_with_sink",
    "fa3_func_with_sink",
    "fa3_qkvpacked_func_with_sink",
    "fa3_varlen_func_with_sink",
    "fa4_func_with_sink",
    "fa4_varlen_func_with_sink",
    "sdpa_func_with_sink",
]
