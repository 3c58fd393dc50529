"""Predicted steps and numbers of stages in C++ (csrc/solver/predict.cpp): equal to `predict` and `degree`, but faster.

Only where `cpp_solver.chosen`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from megatron_magi.backends.costs import DEFAULT, kernel_costs_of
from megatron_magi.config import OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.plan import cpp_solver
from megatron_magi.plan.counts import Counts
from megatron_magi.plan.degree import stage_costs
from megatron_magi.plan.predict import Prediction
from megatron_magi.runtime.cpp_library import address

_Int, _Pointer, _Float, _Pair = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double, ctypes.c_double * 2


class _Model(ctypes.Structure):
    """Rates, costs of kernels and the shape of the attention; the fields are those of `Model` in C++."""

    _fields_ = [
        *((name, _Float) for name in ("forward_tflops", "backward_tflops", "tile_columns", "tile_rows")),
        ("launch_us", _Pair),
        *((name, _Float) for name in ("memory_gbytes_per_s", "collective_us", "gbytes_per_s")),
        *((name, _Float) for name in ("far_collective_us", "far_gbytes_per_s", "hidden")),
        *((name, _Pair) for name in ("host_us", "host_stage_us")),
        *((name, _Float) for name in ("host_one_way_us", "num_sms", "tail")),
        *((name, _Pair) for name in ("tile", "tall_tile")),
        *((name, _Float) for name in ("tall_keys", "key_tile", "query_block", "dq_tile", "dq_block")),
        *((name, _Float) for name in ("most_packed", "short_rows", "most_forward_bytes")),
        *((name, _Float) for name in ("heads", "heads_kv", "dk", "dv", "row_bytes")),
        *((name, _Float) for name in ("stage_tflops", "stage_gbytes_per_s", "stage_latency_us")),
        *((name, _Int) for name in ("given_degree", "max_degree", "at_once")),
        ("num_limits", _Int * 2),
        ("limits", _Pointer * 2),
    ]


@lru_cache(maxsize=64)
def _model(rates: Rates | None, overlap: OverlapConfig) -> _Model:
    rates = rates or DEFAULT
    kernels, cost = kernel_costs_of(rates.device), stage_costs(overlap.cost, rates)
    forward_us, backward_us = (rates.host_us(is_backward) for is_backward in (False, True))
    same = (
        "forward_tflops", "backward_tflops", "tile_columns", "tile_rows", "memory_gbytes_per_s", "collective_us",
        "gbytes_per_s", "far_collective_us", "far_gbytes_per_s", "host_one_way_us",
    )  # fmt: skip
    of_kernels = (
        "num_sms", "tail", "key_tile", "query_block", "dq_tile", "dq_block", "short_rows", "most_forward_bytes",
    )  # fmt: skip
    dk, dv = cost.head_dims
    limits = [
        (_Float * (2 * len(pairs)))(*[number for pair in pairs for number in pair])
        for pairs in (kernels.separate_dq, kernels.separate_dq_packed)
    ]
    model = _Model(
        **{name: getattr(rates, name) for name in same},
        **{name: getattr(kernels, name) for name in of_kernels},
        launch_us=(rates.forward_us, rates.backward_us),
        hidden=0.0 if overlap.degree == 0 else rates.hidden,
        host_us=(forward_us[0], backward_us[0]),
        host_stage_us=(forward_us[1], backward_us[1]),
        tile=kernels.forward_tile,
        tall_tile=kernels.tall_forward_tile,
        tall_keys=kernels.tall_tile_keys[128, 128][1],
        most_packed=math.gcd(max(1, cost.num_heads_q // cost.num_heads_kv), kernels.most_packed_heads),
        heads=cost.num_heads_q,
        heads_kv=cost.num_heads_kv,
        dk=dk,
        dv=dv,
        row_bytes=cost.row_bytes,
        stage_tflops=cost.tflops,
        stage_gbytes_per_s=cost.gbytes_per_s,
        stage_latency_us=cost.stage_latency_us,
        given_degree=-1 if overlap.degree is None else overlap.degree,
        max_degree=overlap.max_degree,
        at_once=overlap.one_launch and overlap.degree != 0 and not overlap.hide_tail_reduce,
        num_limits=tuple(len(pairs) // 2 for pairs in limits),
        limits=tuple(ctypes.addressof(pairs) for pairs in limits),
    )
    model.kept = limits
    return model


@cache
def _library() -> ctypes.CDLL:
    library = cpp_solver.library()
    library.magi_predict.argtypes, library.magi_predict.restype = [*[_Pointer] * 3, _Int, _Int, _Pointer], None
    library.magi_degree.argtypes, library.magi_degree.restype = [*[_Pointer] * 4, _Int], _Int
    return library


def predict_all(counts: Counts, num_rows: Sequence[int], rates: Rates, overlap: OverlapConfig) -> list[Prediction]:
    """`predict.predict_all` without queries that travel."""
    model, table = _model(rates, overlap), np.ascontiguousarray(np.stack(counts.table(), axis=1), dtype=np.int64)
    rows, out = np.array(num_rows, dtype=np.int64), np.empty((len(table), 7))
    _library().magi_predict(
        ctypes.addressof(model), address(table), address(rows), len(table), table.shape[3], address(out)
    )
    return [
        Prediction(step, device, forward, backward, int(degree), host, int(rows))
        for step, device, forward, backward, degree, host, rows in out.tolist()
    ]


def choose_degree(
    local_area: np.ndarray, remote_area: np.ndarray, remote_rows: np.ndarray, config: OverlapConfig, rates: Rates | None
) -> int:
    """`degree.choose_degree`."""
    model = _model(rates, config)
    arrays = [np.ascontiguousarray(x, dtype=np.int64) for x in (local_area, remote_area, remote_rows)]
    return _library().magi_degree(ctypes.addressof(model), *(address(x) for x in arrays), len(arrays[0]))
