"""Sparse attention under context parallelism: equal to one rank's, whoever holds which tokens."""

import pytest
import torch
import torch.distributed as dist

from megatron_magi import api, block_sparse_attention, index_sparse_attention
from megatron_magi.config import CommConfig, DispatchConfig, MagiConfig
from megatron_magi.testing.spawn import run_ranks

HEADS_Q, HEADS_KV, DIM, DIM_V = 4, 2, 16, 24
KEYS = 64
"""Keys of a block."""


def config(algorithm="zigzag", sinks="sum"):
    return MagiConfig(dispatch=DispatchConfig(algorithm=algorithm), comm=CommConfig(dsink_all_reduce=sinks))


def inputs(total, dtype=torch.float64):
    generator = torch.Generator().manual_seed(total)
    shapes = (total, HEADS_Q, DIM), (total, HEADS_KV, DIM), (total, HEADS_KV, DIM_V), (3, HEADS_Q)
    q, k, v, sink = (torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes)
    return q, k, v, sink, torch.randn(total, HEADS_Q, DIM_V, dtype=dtype, generator=generator)


def lists_of(form, total, q_block):
    """Lists of the whole sequence: a mask of blocks, lists of one length, CSR, or single keys."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = -(-total // q_block), -(-total // KEYS)
    if form == "keys":
        found = torch.rand(total, HEADS_KV, total, generator=generator).argsort(-1)[..., :20].int()
        return found.masked_fill(torch.rand(found.shape, generator=generator) < 0.2, -1)
    mask = torch.rand(HEADS_KV, rows, columns, generator=generator) < 0.6
    if form == "mask":
        return mask
    if form == "lists":
        return torch.where(mask, torch.arange(columns), -1)
    offsets = torch.nn.functional.pad(mask.sum(-1).cumsum(-1), (1, 0))
    offsets[1] += offsets[0, -1].clone()
    return offsets, mask.nonzero()[:, 2]


def of_rank(lists, form, positions, q_block):
    """Those of some tokens, which are whole blocks."""
    if form == "keys":
        return lists[positions]
    blocks = positions[::q_block] // q_block
    if form != "csr":
        return lists[:, blocks]
    offsets, entries = lists
    chosen = [entries[offsets[h, b] : offsets[h, b + 1]] for h in range(len(offsets)) for b in blocks.tolist()]
    lengths = torch.tensor([len(x) for x in chosen]).view(len(offsets), -1)
    if not len(blocks):
        return offsets[:, :1] * 0, entries[:0]
    ends = lengths.flatten().cumsum(0).view(len(offsets), -1)
    return torch.cat([ends[:, :1] - lengths[:, :1], ends], dim=1), torch.cat(chosen)


def whole(form, total, q_block, causal):
    """Outputs and gradients of one rank, by the dense definition."""
    q, k, v, sink, dout = inputs(total)
    options = {"sink": sink, "return_max_logits": True, "impl": "reference"}
    lists = lists_of(form, total, q_block)
    if form == "keys":
        out, meta = index_sparse_attention(q, k, v, lists, **options)
    else:
        sizes = {"q_block_size": q_block, "k_block_size": KEYS}
        out, meta = block_sparse_attention(q, k, v, lists, causal=causal, **sizes, **options)
    grads = torch.autograd.grad(out, (q, k, v, sink), dout)
    return [out.detach(), meta.lse, meta.max_logits, *grads]


def distributed(rank, num_ranks, form, total, q_block, causal, algorithm, fetch):
    """The same on a rank of several, brought together."""
    group = dist.group.WORLD
    key = api.magi_attn_varlen_key(
        torch.tensor([0, total]), torch.tensor([0, total]), chunk_size=2 * q_block, cp_group_or_mesh=group,
        causal=True, dist_attn_config=config(algorithm),
    )  # fmt: skip
    q, k, v, sink, dout = inputs(total)
    mine = [api.dispatch(x, key, is_partial_grad=True) for x in (q, k, v)]
    real = api.dispatch(torch.ones(total), key).bool()
    positions = api.get_position_ids(key)[real]
    lists = of_rank(lists_of(form, total, q_block), form, positions, q_block)
    options = {"sink": sink, "return_max_logits": True, "fetch": fetch}
    if form == "keys":
        padding = torch.full((len(real) - len(positions), *lists.shape[1:]), 7, dtype=torch.int32)
        out, meta = api.calc_index_sparse_attn(*mine, torch.cat([lists, padding]), key, **options)
    else:
        sizes = {"q_block_size": q_block, "k_block_size": KEYS}
        out, meta = api.calc_block_sparse_attn(*mine, lists, key, causal=causal, **sizes, **options)
    assert out.shape[0] == len(real) and not out[~real].any() and meta.lse[~real].isneginf().all()
    # Gradients of padding rows are nobody's.
    grads = list(torch.autograd.grad(out, (q, k, v, sink), api.dispatch(dout, key, pad_value=5.0)))
    for grad in grads[:3]:
        dist.all_reduce(grad)
    return [api.undispatch(out.detach(), key), api.undispatch(meta.lse, key), meta.max_logits, *grads]


CASES = [
    ("keys", 90, 1, False, "min_heap", 2),
    ("keys", 61, 1, False, "sequential", 3),
    ("mask", 300, 16, True, "zigzag", 2),
    ("mask", 257, 8, False, "min_heap", 4),
    ("lists", 300, 16, True, "min_heap", 3),
    ("csr", 300, 16, True, "zigzag", 2),
    ("csr", 200, 32, False, "sequential", 2),
    ("lists", 20, 16, True, "sequential", 3),  # ranks without tokens
]


@pytest.mark.parametrize("fetch", ["all", "selected"])
@pytest.mark.parametrize("form, total, q_block, causal, algorithm, num_ranks", CASES)
def test_ranks_compute_what_one_does(form, total, q_block, causal, algorithm, num_ranks, fetch):
    expected = whole(form, total, q_block, causal)
    for found in run_ranks(distributed, num_ranks, form, total, q_block, causal, algorithm, fetch):
        for name, x, y in zip(("out", "lse", "max_logits", "dq", "dk", "dv", "dsink"), found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def mistaken(rank, num_ranks):
    """What each rank is told of arguments that are wrong."""
    key = api.magi_attn_varlen_key(
        torch.tensor([0, 96]), torch.tensor([0, 96]), chunk_size=24, cp_group_or_mesh=dist.group.WORLD, causal=True
    )
    q, k, v, *_ = (x.detach() for x in inputs(48))
    sizes = {"q_block_size": 8, "k_block_size": KEYS}
    blocks = torch.ones(6, 2, dtype=torch.bool)
    wrong = [
        lambda: api.calc_block_sparse_attn(q, k, v, blocks, key, q_block_size=20, k_block_size=KEYS),
        lambda: api.calc_block_sparse_attn(q, k, v, blocks[:5], key, **sizes),
        lambda: api.calc_block_sparse_attn(q[1:], k, v, blocks, key, **sizes),
        lambda: api.calc_index_sparse_attn(q, k, v, torch.zeros(47, 1, 3, dtype=torch.int32), key),
        lambda: api.calc_block_sparse_attn(q, k[:, :1], v, blocks, key, **sizes),
    ]
    found = []
    for call in wrong:
        with pytest.raises(ValueError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_errors_name_the_argument():
    for found in run_ranks(mistaken, 2):
        assert found[0].startswith("q_block_size: this rank's tokens are not whole blocks of 20")
        assert [text.split(":")[0] for text in found] == ["q_block_size", "blocks", "q", "indices", "v"], found
