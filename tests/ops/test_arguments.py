import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_magi.backends import registry
from megatron_magi.backends.sm90 import support as hopper_support
from megatron_magi.mask import AttnMask
from megatron_magi.operands.options import check_bands, make_options
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import resolve_impl, slice_attention_backward, slice_attention_forward
from tests import forced

BANDS = AttnMask([(0, 6, 0, 5, 1)], 6, 5).bands


def qkv(**changes):
    tensors = {"q": torch.zeros(6, 4, 8), "k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 3)}
    return tensors | changes


def test_bands_that_were_checked_are_checked_again_when_they_or_the_tensors_changed():
    frozen = BANDS.copy()
    frozen.setflags(write=False)
    for rows in (6, 7, 6):
        check_bands(frozen, rows, 5)
    with pytest.raises(ValueError, match=r"queries of band 0, \[1, 6\)"):
        check_bands(frozen, 5, 5)
    with pytest.raises(ValueError, match=r"keys of band 0, \[0, 5\)"):
        check_bands(frozen, 6, 4)
    frozen.setflags(write=True)
    frozen[0, 1] = 7
    with pytest.raises(ValueError, match=r"queries of band 0, \[1, 7\)"):
        check_bands(frozen, 6, 5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": torch.zeros(6, 3, 8)}, "^q: .*multiple of num_heads_kv, 2, got 3"),
        ({"q": torch.zeros(6, 8)}, "^q: expected"),
        ({"k": torch.zeros(5, 2, 7)}, "^k: expected the head_dim of q, 8, got 7"),
        ({"v": torch.zeros(4, 2, 3)}, "^v: expected the tokens and heads of k"),
        ({"v": torch.zeros(5, 1, 3)}, "^v: expected the tokens and heads of k"),
        ({"k": torch.zeros(5, 2, 8).double()}, "^k: expected the dtype of q"),
        ({"q": torch.zeros(6, 4, 8, dtype=torch.int64)}, "^q: expected a floating-point dtype"),
        ({"q": torch.zeros(6, 0, 8)}, "^q, k, v: heads"),
        ({"k": torch.zeros(5, 0, 8), "v": torch.zeros(5, 0, 3)}, "^q, k, v: heads"),
        ({"v": torch.zeros(5, 2, 0)}, "^q, k, v: heads"),
        ({"q": torch.zeros(6, 4, 0), "k": torch.zeros(5, 2, 0)}, "^q, k, v: heads"),
        ({"q": torch.zeros(6, 4, 8).double()}, "^k: expected the dtype of q"),
        ({"v": torch.zeros(5, 2, 3, device="meta")}, "^v: expected the device of q, (cpu|cuda:0), got meta"),
        ({"k": torch.zeros(5, 2, 8).to_sparse()}, "^k: expected a dense tensor, got one of layout torch.sparse_coo"),
        ({"v": [[[0.0] * 3] * 2] * 5}, "^v: expected a tensor, got list"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        slice_attention_forward(**qkv(**forced.on_device(changes)), bands=BANDS)


@pytest.mark.parametrize(
    "bands, message",
    [
        (BANDS.astype(np.int32), "^bands: expected dtype int64"),
        (BANDS[0], "^bands: expected an int64 array"),
        (torch.from_numpy(BANDS.copy()), "^bands: expected an int64 array"),
        (np.add(BANDS, [0, 1, 0, 0, 0, 0]), r"^bands: queries of band 0, \[1, 7\)"),
        (np.subtract(BANDS, [0, 0, 1, 0, 0, 0]), r"^bands: keys of band 0, \[-1, 5\)"),
    ],
)
def test_bands_out_of_bounds_are_named(bands, message):
    with pytest.raises(ValueError, match=message):
        slice_attention_forward(**qkv(), bands=bands)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"softcap": -1.0}, "^softcap:"),
        ({"softcap": float("nan")}, "^softcap:"),
        ({"softmax_scale": 0.0}, "^softmax_scale:"),
        ({"sm_margin": -1}, "^sm_margin:"),
        ({"sink": torch.zeros(4)}, "^sink: expected shape"),
        ({"sink": torch.zeros(5, 1, 4)}, "^sink: expected shape"),
        ({"sink": torch.zeros(1, 4, dtype=torch.int32)}, "^sink: expected a floating-point dtype"),
        ({"out": torch.zeros(6, 4, 3)}, "^out, lse: give both"),
        ({"out": torch.zeros(6, 4, 8), "lse": torch.zeros(6, 4)}, "^out: expected shape"),
        ({"out": torch.zeros(6, 4, 3), "lse": torch.zeros(4, 6)}, "^lse: expected shape"),
        ({"out": torch.zeros(6, 4, 3), "lse": torch.zeros(6, 4, device="meta")}, "^lse: expected .*device"),
        ({"sink": torch.zeros(1, 4, device="meta")}, "^sink: expected .*device"),
        ({"sink": [[0.0] * 4]}, "^sink: expected a tensor, got list"),
        ({"out_dtype": torch.int8}, "^out_dtype:"),
        ({"impl": "fast"}, "^impl: 'fast' is not available"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        slice_attention_forward(**qkv(), bands=BANDS, **forced.on_device(options))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dout": torch.zeros(6, 4, 8)}, "^dout: expected shape"),
        ({"lse": torch.zeros(4, 6)}, "^lse: expected shape"),
        ({"delta": torch.zeros(6, 4, 1)}, "^delta: expected shape"),
        ({"dk": torch.zeros(5, 4, 8)}, "^dk: expected shape"),
        ({"dv": torch.zeros(5, 2, 3, dtype=torch.int32)}, "^dv: expected a floating-point dtype"),
        ({"grad_dtype": torch.bool}, "^grad_dtype:"),
    ],
)
def test_arguments_of_the_backward_are_named(changes, message):
    tensors = {"dout": torch.zeros(6, 4, 3), "lse": torch.zeros(6, 4), "delta": torch.zeros(6, 4)}
    with pytest.raises(ValueError, match=message):
        slice_attention_backward(**(qkv() | tensors | forced.on_device(changes)), bands=BANDS)


def test_a_mask_over_other_lengths_is_refused():
    with pytest.raises(ValueError, match="mask_or_bands: the mask is over 6 x 6 tokens, q and k have 6 and 5"):
        slice_attention(**qkv(), mask_or_bands=AttnMask([], 6))


def test_every_implementation_of_the_registry_can_be_asked_for_by_name():
    for name, backend in registry.BACKENDS.items():
        assert resolve_impl(name, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)) is backend and backend.name == name
        assert callable(backend.forward) and callable(backend.backward)


@forced.free_choice
@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (36, torch.bfloat16, r"multiples of 8 up to 256, got 36 \(q, k\) and 36 \(v\)"),
        (128, torch.float32, "bf16 and fp16, got torch.float32"),
    ],
)
def test_auto_says_once_why_a_gpu_takes_the_slower_implementation(monkeypatch, caplog, dim, dtype, reason):
    monkeypatch.setattr(hopper_support, "_is_hopper", lambda _device: True)
    monkeypatch.setattr(registry, "_FASTEST", ("ffa",))
    registry._said.clear()
    t = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(5, 2, dim))
    for _ in range(2):
        assert resolve_impl("auto", t, t).name == "torch"
    (record,) = caplog.records
    assert re.search(f"falls back .*{reason}", record.getMessage())


@forced.free_choice
def test_auto_says_nothing_where_the_kernels_compute_or_there_is_no_gpu(monkeypatch, caplog):
    monkeypatch.setattr(hopper_support, "_is_hopper", lambda device: device.type == "cuda")
    t = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(5, 2, 128))
    assert resolve_impl("auto", t, t).name == "ffa"
    t.device = torch.device("cpu")
    assert resolve_impl("auto", t, t).name == "torch"
    assert not caplog.records


def test_algorithms_of_torch_that_must_be_deterministic_make_attention_so():
    q = torch.zeros(1, 1, 4)
    assert not make_options(q, None, 0.0, False, 0).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert make_options(q, None, 0.0, False, 0).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
