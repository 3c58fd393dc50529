"""Launches, parameter by parameter: they depend on layouts and masks, not on where memory lies or what was kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90.program import LaunchProgram, new_makers
from megatron_magi.mask import bands as bd
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from tests.backends.sm90.launch_records import Record, recorded

CAUSAL = np.array([[0, 300, 0, 400, -bd.NO_DIAGONAL, 101]], dtype=np.int64)
DOCUMENTS = np.array([[0, 130, 0, 150, -bd.NO_DIAGONAL, 21], [130, 300, 150, 400, -64, 64]], dtype=np.int64)


def _tensors(dims: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    q, k, v = (
        torch.zeros(n, h, d, dtype=dtype) for n, h, d in ((300, 4, dims[0]), (400, 2, dims[0]), (400, 2, dims[1]))
    )
    out, lse = torch.zeros(300, 4, dims[1], dtype=dtype), torch.zeros(300, 4)
    grads = {f"d{name}": torch.zeros_like(t) for name, t in (("q", q), ("k", k), ("v", v))}
    more = {"dout": torch.zeros_like(out), "delta": torch.zeros_like(lse)}
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse, **more, **grads}


def _launches(monkeypatch, bands, dims, dtype, options: AttnOptions, accumulate: bool) -> list[list[Record]]:
    """Launches of two forwards and backwards of one layout, at other addresses, the second with what the first left."""
    program, found = LaunchProgram(bands, 400, new_makers()), []
    with recorded(monkeypatch) as (records, memory):
        for _ in range(2):
            t = _tensors(dims, dtype)
            memory.name(t)
            output = ForwardOutput(t["out"], t["lse"])
            hopper.forward(ForwardInputs(t["q"], t["k"], t["v"]), bands, options, output, program=program)
            inputs = BackwardInputs(*(t[name] for name in ("q", "k", "v", "dout", "lse", "delta")))
            grads = Gradients(t["dq"], t["dk"], t["dv"], accumulate, accumulate)
            hopper.backward(inputs, bands, options, grads, program=program)
            found.append(list(records))
            records.clear()
    return found


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "options", [AttnOptions(0.1), AttnOptions(0.1, softcap=20.0), AttnOptions(0.1, deterministic=True)]
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize(("bands", "dtype"), [(CAUSAL, torch.bfloat16), (DOCUMENTS, torch.float16)])
def test_launches_do_not_depend_on_addresses_or_on_earlier_calls(monkeypatch, bands, dtype, dims, options, accumulate):
    first, again = _launches(monkeypatch, bands, dims, dtype, options, accumulate)
    afresh, _ = _launches(monkeypatch, bands, dims, dtype, options, accumulate)
    assert {"forward", "preprocess"} <= {record.kernel for record in first}
    assert first == again == afresh
    places = [place for record in first for _, place in record.params]
    assert "elsewhere" not in [place[1] if isinstance(place, tuple) else place for place in places]
    assert {"out", "lse", "delta"} <= {place[0] for place in places if isinstance(place, tuple)}
