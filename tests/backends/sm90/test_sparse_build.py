"""The sparse Hopper kernels compile without a GPU, fit an SM, and their parameters have the size that C gives them."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.backends.sm90 import sparse_kernels
from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.cuda import build
from tests.cuda.cubins import resources

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")

MOST_SHARED_BYTES = 232448
MOST_SPILLED_BYTES = 32  # by producers that gather rows, once an item
CPU = torch.device("cpu")

KERNELS = {
    "sparse_forward": (sparse_kernels.forward_kernel, (2, False)),
    "sparse_forward, single keys": (sparse_kernels.forward_kernel, (2, True)),
    "sparse_forward, few places": (sparse_kernels.forward_kernel, (1, False)),
    "sparse_forward, few places, single keys": (sparse_kernels.forward_kernel, (1, True)),
    "sparse_backward, single keys, added": (sparse_kernels.backward_kernel, (False,)),
    "sparse_backward, single keys, stored": (sparse_kernels.backward_kernel, (True,)),
    "sparse_backward_queries": (sparse_kernels.backward_queries_kernel, ()),
    "sparse_backward_keys, 64": (sparse_kernels.backward_keys_kernel, (64, False)),
    "sparse_backward_keys, 128": (sparse_kernels.backward_keys_kernel, (128, False)),
    "sparse_backward_keys, dq": (sparse_kernels.backward_keys_kernel, (128, True)),
}


@pytest.mark.parametrize("name", list(KERNELS))
def test_sparse_kernels_fit_shared_memory_and_compile_without_serialised_products_or_large_spills(monkeypatch, name):
    make, options = KERNELS[name]
    asked = []
    monkeypatch.setattr(sparse_kernels, "_load", lambda *args: asked.append(args))
    make(CPU, torch.bfloat16, 128, *options)
    taken = _checked(monkeypatch, asked)
    assert max(taken.spilled_bytes, taken.frame_bytes) <= MOST_SPILLED_BYTES, taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "options", "most"),
    [
        (sparse_kernels.latent_kernel, (), 0),
        (sparse_kernels.latent_backward_kernel, (False,), MOST_SPILLED_BYTES),
        (sparse_kernels.latent_backward_kernel, (True,), 0),
    ],
)
def test_kernels_of_latent_keys_fit_shared_memory_and_spill_nothing_in_their_loops(
    monkeypatch, make, options, most, dtype
):
    asked = []
    monkeypatch.setattr(sparse_kernels, "_load", lambda *args: asked.append(args))
    make(CPU, dtype, *options)
    taken = _checked(monkeypatch, asked)
    assert max(taken.spilled_bytes, taken.frame_bytes) <= most, taken


def _checked(monkeypatch, asked):
    """What the only kernel that was asked for takes; its struct of parameters is as large in C."""
    ((_, source, defines, threads, shared_bytes),) = asked
    assert shared_bytes <= MOST_SHARED_BYTES // (2 if threads == 256 else 1)
    params = params_of(source)
    name_in_c, source = params.__name__, f"attention/sm90/{source}.cu"
    used = -(-params.pad.offset // 64) * 64  # tensor maps are aligned so, and with them the struct
    checked = f"static_assert(sizeof({name_in_c}) == {used});\n"
    checked += f"static_assert(sizeof(Shared) <= {shared_bytes});\n"
    text = build.flatten_source(build.source_root() / source)
    monkeypatch.setattr(build, "flatten_source", lambda _path: text + checked)
    return resources(build.compile_kernel(source, defines)[0])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("sparse_lists", 0),
        ("sparse_postprocess", 0),
        *(("sparse_places", i) for i in range(2)),
        ("sparse_preprocess", 0),
        ("sparse_postprocess_dq", 0),
        *(("sparse_transpose", i) for i in range(3)),
    ],
)
def test_small_sparse_kernels_compile_without_spills(name, part):
    image, _ = build.compile_kernel(f"attention/sm90/{name}.cu", ("HEAD_DIM=128", "DTYPE=Bf16", f"PART={part}"))
    assert not resources(image).spilled_bytes


@pytest.mark.parametrize(("dim", "gradients"), [(64, 2), (128, 2), (576, 1)])
def test_kernels_that_add_key_by_key_compile_without_spills(dim, gradients):
    defines = f"HEAD_DIM={dim}", f"GRADIENTS={gradients}", "DTYPE=Bf16"
    image, _ = build.compile_kernel("attention/sm90/sparse_sums.cu", defines)
    assert not resources(image).spilled_bytes
