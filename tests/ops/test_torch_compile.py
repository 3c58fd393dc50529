"""Attention inside compiled functions: one graph, no recompilation for another mask, the results of eager mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.mask import AttnMask, builders
from megatron_magi.ops import slice_operator
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from megatron_magi.ops.slice_attention import slice_attention
from tests import forced

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def tensors(num_rows=24, dim_v=8, dtype=forced.DTYPE, device=forced.DEVICE):
    gen = forced.generator(num_rows)
    shapes = [(num_rows, 4, 8), (num_rows, 2, 8), (num_rows, 2, dim_v)]
    return [torch.randn(shape, generator=gen, dtype=dtype).to(device).requires_grad_() for shape in shapes]


def num_graphs():
    """How often something was compiled since the test began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def results(fn, inputs, *args):
    out, lse, max_logits = fn(*inputs, *args)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    return [out, lse, *([] if max_logits is None else [max_logits]), *grads]


def assert_same(fn, compiled, inputs, *args):
    for expected, got in zip(results(fn, inputs, *args), results(compiled, inputs, *args), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def step(q, k, v, mask, sink=None, **options):
    out, meta = slice_attention(q * 2, k, v, mask, sink=sink, return_max_logits=True, **options)
    return out + 1, meta.lse, meta.max_logits


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dynamic", [False, None, True])
def test_new_masks_of_one_size_class_run_the_same_graph(dynamic, impl):
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for lengths in ([24], [10, 14], [1] * 24, [5, 6, 13]):
        inputs, mask = tensors(), builders.varlen(doc_lengths=lengths, causal=True)
        assert_same(lambda *a: step(*a, impl=impl), lambda *a: compiled(*a, impl=impl), inputs, mask)
    assert num_graphs() == 1


def test_a_mask_may_hang_on_the_module_that_uses_it():
    class Layer(torch.nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.mask = mask

        def forward(self, q, k, v):
            return step(q, k, v, self.mask)

    for causal in (True, False):
        layer = Layer(builders.varlen(doc_lengths=[9, 15], causal=causal))
        assert_same(layer, torch.compile(layer, backend="aot_eager", fullgraph=True), tensors())


def test_a_larger_mask_compiles_once_more():
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)
    inputs = tensors(80)
    for lengths in ([80], [1] * 65 + [15], [1] * 80, [40, 40]):
        assert_same(step, compiled, inputs, builders.varlen(doc_lengths=lengths, causal=True))
    assert num_graphs() == 2


def test_tables_of_bands_are_inputs_of_the_graph():
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)
    for end in (10, 20):
        mask = AttnMask([(0, end, 0, end, 1), (end, 24, 0, 24, 0)], 24)
        assert_same(step, compiled, tensors(), np.array(mask.bands))
    assert num_graphs() == 1


def flex(q, k, v, q_ranges, k_ranges, types, sink=None, layout="sh"):
    out, meta = flex_flash_attn_func(q * 2, k, v, q_ranges, k_ranges, types, sink=sink, sink_layout=layout)
    return out, meta.lse, meta.max_logits


@pytest.mark.parametrize("dynamic", [False, None])
def test_range_tensors_are_inputs_of_the_graph(dynamic):
    compiled = torch.compile(flex, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for at in (3, 9, 20):
        ranges = torch.tensor([[0, at], [at, 24]], dtype=torch.int32)
        for types in (torch.tensor([1, 0]), torch.tensor([0, 1])):
            assert_same(flex, compiled, tensors(), ranges, ranges, types)
    assert num_graphs() == 1


@pytest.mark.parametrize("types", [None, [1, 1]])
def test_lists_of_ranges_and_arrays_can_be_compiled_too(types):
    compiled = torch.compile(flex, backend="aot_eager", fullgraph=True)
    ranges = [[0, 9], [9, 24]]
    assert_same(flex, compiled, tensors(), ranges, ranges, types)
    assert_same(flex, compiled, tensors(), np.array(ranges), np.array(ranges), types)
    assert_same(flex, compiled, tensors(), None, None, None)


@pytest.mark.parametrize(
    "ranges, types, name",
    [([[0, 7.5]], [0], "q_ranges"), ([[False, True]], [0], "q_ranges"), ([[0, 9]], [0.5], "attn_type_map")],
)
@pytest.mark.parametrize("fullgraph, error", [(False, ValueError), (True, torch._dynamo.exc.Unsupported)])
def test_numbers_that_are_no_integers_are_not_rounded_in_a_graph(ranges, types, name, fullgraph, error):
    with pytest.raises(error, match=f"{name}: expected integers, got"):
        torch.compile(flex, backend="aot_eager", fullgraph=fullgraph)(*tensors(), ranges, ranges, types)


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_a_sink_gets_its_gradient(layout):
    sink = torch.randn((24, 3, 4) if layout == "ssh" else (3, 4), dtype=torch.float32, requires_grad=True)

    def attend(q, k, v, sink):
        return flex(q, k, v, None, None, None, sink, layout)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_same(attend, compiled, [*tensors(), sink])


def test_a_value_head_dim_of_its_own_and_partial_gradients():
    q, k, v = tensors(dim_v=6)
    mask = builders.causal(24)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_same(step, compiled, [q, k, v], mask)
    only_v = [q.detach(), k.detach(), v]
    grads = [torch.autograd.grad(f(*only_v, mask)[0].sum(), v)[0] for f in (step, compiled)]
    assert torch.equal(*grads)


def test_arguments_are_checked_when_a_compiled_function_runs():
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    q, k, v = tensors()
    with pytest.raises(ValueError, match="impl: 'fast' is not available"):
        compiled(q, k, v, builders.causal(24), impl="fast")
    with pytest.raises(ValueError, match="mask_or_bands: the mask is not over 24 x 24 tokens"):
        compiled(q, k, v, builders.causal(20))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("max_logits", [False, True])
def test_the_operators_keep_the_rules_of_torch(sink, max_logits):
    q, k, v = tensors(12, dim_v=6)
    sinks = torch.randn(2, 4, requires_grad=True) if sink else None
    options = (0.3, 0.0, False, 0, False, "torch")
    masks = ([torch.from_numpy(builders.causal(12).packed)], [torch.tensor([[0, 12]])] * 2)
    for mask in masks:
        torch.library.opcheck(slice_operator._forward_operator, (q, k, v, sinks, mask, max_logits, *options))
    with torch.no_grad():
        out, lse, _ = slice_operator._forward_operator(q, k, v, sinks, masks[0], False, *options)
        torch.library.opcheck(
            slice_operator._backward_operator, (torch.ones_like(out), q, k, v, sinks, out, lse, masks[0], *options)
        )


def test_the_operators_stay_out_of_captured_graphs_which_would_replay_one_mask_for_all():
    for name in ("slice_attention", "slice_attention_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.megatron_magi, name).default.tags


@pytest.mark.gpu
def test_a_compiled_function_with_cuda_graphs_follows_ranges_that_change():
    compiled = torch.compile(flex, mode="reduce-overhead", fullgraph=True)
    gen = forced.generator(0)
    inputs = [torch.randn(256, n, 64, generator=gen).bfloat16().cuda() for n in (4, 2, 2)]
    for end in (64, 128, 200, 64):
        ranges = torch.tensor([[0, end], [end, 256]], device="cuda")
        for _ in range(3):
            out = compiled(*inputs, ranges, ranges, None)[0].clone()
        assert torch.equal(out, flex(*inputs, ranges, ranges, None)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_attention_on_a_gpu_gives_the_bits_of_eager_mode(backend):
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    gen = forced.generator(0)
    inputs = [torch.randn(300, n, 64, generator=gen).bfloat16().cuda().requires_grad_() for n in (4, 2, 2)]
    for causal in (True, False):
        mask = builders.varlen(doc_lengths=[100, 200], causal=causal)
        out, lse, max_logits = compiled(*inputs, mask, deterministic=True)
        expected = step(*inputs, mask, deterministic=True)
        for a, b in zip((out, lse, max_logits), expected, strict=True):
            assert torch.equal(a, b)
        grads, others = (torch.autograd.grad(o.float().square().sum(), inputs) for o in (out, expected[0]))
        for a, b in zip(grads, others, strict=True):
            torch.testing.assert_close(a, b)
