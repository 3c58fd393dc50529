"""The calls of MagiAttention's documents and examples, and of NeMo Automodel, as they stand there but for the module.

Tiny sizes, gloo; compared with attention over the whole matrix. What happens between the calls is ours.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from megatron_magi import api
from megatron_magi.api import (
    AttnMaskType,
    AttnOverlapMode,
    AttnRange,
    AttnRanges,
    DispatchConfig,
    DistAttnConfig,
    MinHeapDispatchAlg,
    OverlapConfig,
    UniformOverlapAlg,
    calc_attn,
    compute_pad_size,
    dispatch,
    get_most_recent_key,
    get_position_ids,
    infer_attn_mask_from_sliding_window,
    infer_varlen_mask_from_batch,
    magi_attn_flex_key,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    roll,
    squash_batch_dim,
    undispatch,
)
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.testing.ports import held_port
from tests.compat.test_names import with_new_imports
from tests.dense_attention import dense_attention

HEADS_Q, HEADS_KV, DIM = 4, 2, 8
SHAPE = {"num_heads_q": HEADS_Q, "num_heads_kv": HEADS_KV, "head_dim": DIM}
# As in the docstrings of the key functions.
CONFIG = DistAttnConfig(
    dispatch_config=DispatchConfig(alg=MinHeapDispatchAlg()),
    overlap_config=OverlapConfig(
        enable=True,
        mode=AttnOverlapMode.STATIC,
        degree=2,
        min_chunk_size=512,
        max_num_chunks=64,
        alg=UniformOverlapAlg(),
    ),
)


@pytest.fixture(autouse=True)
def no_plans_left_over():
    api.clear_cache()


def random_qkv(num_rows, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(num_rows, n, DIM, generator=gen, dtype=torch.float64) for n in (HEADS_Q, HEADS_KV, HEADS_KV)]


def attended(key, qkv):
    """Dispatched, attended, brought back."""
    local_out, _ = calc_attn(*(dispatch(x, key) for x in qkv), key)
    return undispatch(local_out, key)


def as_torchrun_starts(rank, num_ranks, port):
    """The environment of a process that joins no group yet."""
    dist.destroy_process_group()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")


def run_quick_start(rank, num_ranks, port):
    """Set up as torchrun would, block-causal mask, sink, roll, loss, gradients, tear down."""
    as_torchrun_starts(rank, num_ranks, port)
    found = api.setup_dist_env("gloo", base_seed=7, seed_bias=lambda rank: 100 * rank)
    env_rank, local_rank, world_size, num_nodes, num_local_ranks, world_group, device, seed = found
    assert (env_rank, local_rank, world_size, num_nodes, num_local_ranks) == (rank, rank, num_ranks, 1, num_ranks)
    assert seed == 7 + 100 * rank == torch.initial_seed()

    total_seqlen, embed_dim, chunk_size = 96, 16, 8
    torch.manual_seed(0)
    x = torch.randn(total_seqlen, embed_dim, device=device, dtype=torch.float64, requires_grad=True)
    projections = [nn.Linear(embed_dim, n * DIM, dtype=torch.float64) for n in (HEADS_Q, HEADS_KV, HEADS_KV)]
    global_sink = nn.Parameter(torch.randn(4, HEADS_Q, dtype=torch.float32))
    q_ranges = AttnRanges.from_ranges([[0, 24], [24, 48], [48, 72], [72, 96]])
    k_ranges = AttnRanges.from_ranges([[0, 24], [0, 48], [0, 72], [0, 96]])
    attn_mask_type = [AttnMaskType.FULL] * len(q_ranges)
    pad_size = compute_pad_size(total_seqlen_q=total_seqlen, cp_size=world_size, chunk_size=chunk_size)
    magi_attn_runtime_key = magi_attn_flex_key(
        q_ranges=q_ranges,
        k_ranges=k_ranges,
        attn_mask_type=attn_mask_type,
        total_seqlen_q=total_seqlen,
        total_seqlen_k=total_seqlen,
        pad_size=pad_size,
        chunk_size=chunk_size,
        cp_group_or_mesh=world_group,
        **SHAPE,
    )
    local_x = dispatch(x, key=magi_attn_runtime_key)
    local_x_rolled = roll(local_x, shift=1, dim=0, key=magi_attn_runtime_key)
    local_q, local_k, local_v = (p(local_x).view(-1, p.out_features // DIM, DIM) for p in projections)
    local_out, meta = calc_attn(q=local_q, k=local_k, v=local_v, key=magi_attn_runtime_key, sink=global_sink)
    total_out = undispatch(x=local_out, key=magi_attn_runtime_key)
    rolled = undispatch(local_x_rolled, magi_attn_runtime_key)
    total_out.sum().backward()
    grads = [p.weight.grad for p in projections] + [global_sink.grad]
    for grad in grads:
        dist.all_reduce(grad)
    assert meta.lse.shape == (local_q.shape[0], HEADS_Q) and x.grad.shape == x.shape
    api.clearup_dist_env()
    assert not dist.is_initialized()
    return [t.detach() for t in (total_out, rolled, *grads)]


@pytest.mark.ranks(2)
def test_the_quick_start_from_set_up_to_tear_down(ranks):
    torch.manual_seed(0)
    x = torch.randn(96, 16, dtype=torch.float64)
    projections = [nn.Linear(16, n * DIM, dtype=torch.float64) for n in (HEADS_Q, HEADS_KV, HEADS_KV)]
    sink = nn.Parameter(torch.randn(4, HEADS_Q, dtype=torch.float32))
    q, k, v = (p(x).view(96, -1, DIM) for p in projections)
    out, _ = dense_attention(q, k, v, dense_mask(builders.block_causal(96, 24)), sink=sink)
    out.sum().backward()
    expected = [out, torch.roll(x, 1, 0), *(p.weight.grad for p in projections), sink.grad]
    with held_port() as port:
        results = ranks(2, run_quick_start, port)
    for result in results:
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want)


def run_hybrid_masks(rank, num_ranks):
    """The examples of the key functions: one mask to dispatch with, two more after it."""
    seqlen, window = 96, 24
    cu_seqlens = torch.tensor([0, seqlen], dtype=torch.int32)
    options = {
        "pad_size": compute_pad_size(seqlen, num_ranks, 8),
        "chunk_size": 8,
        "cp_group_or_mesh": dist.new_group(list(range(num_ranks)), backend="gloo"),
        "dist_attn_config": CONFIG,
        **SHAPE,
    }
    varlen = magi_attn_varlen_key(
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, window_size=(-1, -1), **options
    )
    flex = magi_attn_flex_key(
        q_ranges=AttnRanges.from_ranges([[0, seqlen]]),
        k_ranges=AttnRanges.from_ranges([[0, seqlen]]),
        attn_mask_type="causal",
        total_seqlen_q=seqlen,
        total_seqlen_k=seqlen,
        **options,
    )
    assert varlen == flex and varlen.dist_attn_config.dispatch_config.alg == CONFIG.dispatch_config.alg
    of_window = make_varlen_key_for_new_mask_after_dispatch(
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=False, window_size=(window, 0), key_for_dispatch=varlen
    )
    of_slices = make_flex_key_for_new_mask_after_dispatch(
        q_ranges=AttnRanges.from_ranges([[0, window], [window, seqlen]]),
        k_ranges=AttnRanges.from_ranges([[0, window], [0, seqlen]]),
        attn_mask_type=["causal", "bi_causal"],
        key_for_dispatch=varlen,
    )
    qkv = random_qkv(seqlen)
    window_mask = builders.sliding_window(seqlen, left=window, right=0)
    for key, mask in ((varlen, builders.causal(seqlen)), (of_window, window_mask), (of_slices, window_mask)):
        torch.testing.assert_close(attended(key, qkv), dense_attention(*qkv, dense_mask(mask))[0])
    total_label = torch.arange(seqlen)
    assert torch.equal(undispatch(dispatch(total_label, varlen), of_window), total_label)


@pytest.mark.ranks(2)
def test_hybrid_masks_over_one_dispatch(ranks):
    ranks(2, run_hybrid_masks)


class Attention(nn.Module):
    """Stands for a layer of a Hugging Face model: [1, heads, rows, dim], the key found by its group."""

    def __init__(self, cp_group):
        super().__init__()
        self.cp_group = cp_group

    def forward(self, query, key, value):
        magi_attn_key = get_most_recent_key(self.cp_group)
        q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value))
        out = calc_attn(q, k, v, magi_attn_key)[0]
        return out.flatten(1)[None]


def run_training_examples(rank, num_ranks):
    """The calls of the FSDP2 and transformers examples: a mesh, a batch, rotary positions, a loss over all logits."""
    mesh = DeviceMesh("cpu", torch.arange(num_ranks).reshape(1, num_ranks), mesh_dim_names=("dp", "cp"))
    cp_group = mesh.get_group("cp")
    batch_size, seqlen, vocabulary, chunk_size = 2, 48, 11, 8
    gen = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch_size, seqlen), generator=gen)
    weights = torch.randn(vocabulary, HEADS_Q * DIM, generator=gen, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(batch_size * seqlen, 1, DIM, generator=gen, dtype=torch.float64)

    def model(input_ids, position_ids, attend):
        x = F.embedding(input_ids, weights).view(-1, HEADS_Q, DIM) * angles[position_ids]
        return attend(x, x[:, :HEADS_KV], x[:, HEADS_KV:]).reshape(-1, HEADS_Q * DIM) @ weights.t()

    local_input, label = squash_batch_dim(tokens), squash_batch_dim(tokens.roll(-1, 1))
    pad_size = compute_pad_size(local_input.size(0), num_ranks, chunk_size)
    cu_seqlens_q, cu_seqlens_k = infer_varlen_mask_from_batch(batch_size, seqlen, device="cpu")
    key = magi_attn_varlen_key(
        cu_seqlens_q,
        cu_seqlens_k,
        pad_size=pad_size,
        chunk_size=chunk_size,
        cp_group_or_mesh=cp_group,
        causal=True,
        dist_attn_config=DistAttnConfig(),
        **SHAPE,
    )
    layer = Attention(cp_group)
    assert get_most_recent_key(cp_group) == key
    local_ids = dispatch(local_input, key=key)

    def attend(q, k, v):
        return layer(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0]

    output = undispatch(model(local_ids, get_position_ids(key), attend), key)
    loss = F.cross_entropy(output, label)
    loss.backward()
    grad = weights.grad.clone()
    dist.all_reduce(grad, group=cp_group)

    weights.grad = None
    visible = dense_mask(builders.varlen(doc_lengths=[seqlen] * batch_size, causal=True))
    everywhere = torch.arange(batch_size * seqlen)
    expected = model(local_input, everywhere, lambda q, k, v: dense_attention(q, k, v, visible)[0])
    expected_loss = F.cross_entropy(expected, label)
    expected_loss.backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grad, weights.grad)


@pytest.mark.ranks(2)
def test_the_training_examples(ranks):
    ranks(2, run_training_examples)


def automodel_flex_key(q_ranges, k_ranges, mask_types, total_seqlen, cp_group, chunk_size):
    """As NeMo Automodel makes a key of a mask specification: lists of pairs, no padding."""
    return magi_attn_flex_key(
        q_ranges=AttnRanges.from_ranges([list(r) for r in q_ranges]),
        k_ranges=AttnRanges.from_ranges([list(r) for r in k_ranges]),
        attn_mask_type=list(mask_types),
        total_seqlen_q=total_seqlen,
        total_seqlen_k=total_seqlen,
        pad_size=0,
        cp_group_or_mesh=cp_group,
        chunk_size=chunk_size,
        **SHAPE,
    )


def run_automodel(rank, num_ranks):
    """NeMo Automodel's calls: keys of its own on a group of one rank, batches that are dispatched on all."""
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    total, chunk_size = 64, 16
    qkv = random_qkv(total, seed=1)
    # A prompt of 32 tokens that two answers of 16 share.
    q_ranges, k_ranges = (
        [(0, 32), (32, 48), (32, 48), (48, 64), (48, 64)],
        [(0, 32), (32, 48), (0, 32), (48, 64), (0, 32)],
    )
    types = ["causal", "causal", "full", "causal", "full"]
    tree = dense_attention(
        *qkv, dense_mask(AttnMask.from_ranges(q_ranges, k_ranges, [int(t == "causal") for t in types], 64))
    )
    key = automodel_flex_key(q_ranges, k_ranges, types, total, alone, chunk_size)
    torch.testing.assert_close(calc_attn(*qkv, key, softmax_scale=None)[0], tree[0])

    cu = torch.tensor([0, total], dtype=torch.int32)
    magi_attn_varlen_key(
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        pad_size=0,
        cp_group_or_mesh=alone,
        causal=True,
        chunk_size=chunk_size,
        **SHAPE,
    )
    out = calc_attn(*qkv, get_most_recent_key(alone), softmax_scale=0.3)[0]
    causal = dense_attention(*qkv, dense_mask(builders.causal(total)), softmax_scale=0.3)
    torch.testing.assert_close(out, causal[0])

    # A batch of one sequence, of any length: padded to whole chunks.
    world, seqlen = dist.group.WORLD, 75
    input_ids = torch.arange(seqlen)[None]
    cu = torch.tensor([0, seqlen], dtype=torch.int32)
    key = magi_attn_varlen_key(
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        pad_size=compute_pad_size(seqlen, num_ranks, chunk_size=chunk_size),
        cp_group_or_mesh=world,
        causal=True,
        chunk_size=chunk_size,
        **SHAPE,
    )
    local_ids = dispatch(input_ids.squeeze(0), key=key, pad_value=-1).unsqueeze(0)
    position_ids = get_position_ids(key).unsqueeze(0)
    assert local_ids.shape == position_ids.shape == (1, key.total_seqlen_q // num_ranks)
    assert torch.equal(position_ids[local_ids >= 0], local_ids[local_ids >= 0])
    qkv = random_qkv(seqlen, seed=2)
    torch.testing.assert_close(attended(key, qkv), dense_attention(*qkv, dense_mask(builders.causal(seqlen)))[0])

    # A packed batch: labels go where the inputs go.
    bounds = [(0, 20), (20, 50), (50, 64)]
    key = automodel_flex_key(bounds, bounds, ["causal"] * 3, total, world, chunk_size)
    ids = torch.randint(100, (total,), generator=torch.Generator().manual_seed(3))
    local_ids, local_labels, local_positions = dispatch(ids, key=key), dispatch(ids + 1, key=key), get_position_ids(key)
    assert torch.equal(local_labels, local_ids + 1) and torch.equal(ids[local_positions], local_ids)
    qkv = random_qkv(total, seed=4)
    visible = dense_mask(builders.varlen([0, 20, 50, 64], causal=True))
    torch.testing.assert_close(attended(key, qkv), dense_attention(*qkv, visible)[0])
    assert torch.equal(undispatch(local_ids, get_most_recent_key(world)), ids)


@pytest.mark.ranks(2)
def test_the_calls_of_nemo_automodel(ranks):
    ranks(2, run_automodel)


def test_a_window_of_a_part_of_the_sequence():
    q_ranges, k_ranges, attn_mask_type = infer_attn_mask_from_sliding_window(
        q_range=AttnRange.from_range([5, 15]), k_range=AttnRange.from_range([5, 15]), window_size=(2, 3)
    )
    key = magi_attn_flex_key(q_ranges, k_ranges, attn_mask_type, 20, 20, **SHAPE)
    qkv = random_qkv(20)
    visible = torch.zeros(20, 20, dtype=torch.bool)
    for row in range(5, 15):
        visible[row, max(5, row - 2) : min(15, row + 4)] = True
    torch.testing.assert_close(attended(key, qkv), dense_attention(*qkv, visible)[0])


def run_user_script(rank, num_ranks, port, text):
    as_torchrun_starts(rank, num_ranks, port)
    names = {"__name__": "user_script"}
    exec(compile(text, "user_script", "exec"), names)
    assert not dist.is_initialized()
    return [names[name].detach() for name in ("total_out", "dsink", "out", "x", "sink", "q", "k", "v")]


@pytest.mark.ranks(2)
def test_a_script_runs_with_its_imports_changed_alone(ranks):
    text = with_new_imports((Path(__file__).parent / "user_script.txt").read_text())
    for line in text.splitlines():
        assert not line.startswith(("import magi_", "from magi_")), line
    with held_port() as port:
        results = ranks(2, run_user_script, port, text)
    for total_out, dsink, out, _, sink, *qkv in results:
        sink = sink.double().requires_grad_()
        visible = dense_mask(AttnMask.from_ranges([[0, 32], [32, 96]], [[0, 32], [0, 96]], [0, 1], 96))
        want, _ = dense_attention(*(t.double() for t in qkv), visible, sink=sink)
        want.square().sum().backward()
        for got in (total_out, out):
            torch.testing.assert_close(got.double(), want.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dsink.double(), sink.grad, rtol=1e-4, atol=1e-4)
