"""Other implementations that `bench_sparse` measures, most with masks of blocks alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from benchmarks._lib.providers import Unavailable, backward_of, import_one
from benchmarks._lib.sparse_cases import Case

Pass = Callable[[], Tensor]


def flex(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Pass, Pass]:
    """FlexAttention in torch, compiled; blocks of 128.

    Raises:
        Unavailable: it does not take the mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if case.mask is None or case.blocks != (128, 128):
        raise Unavailable("not a mask of blocks of 128")
    mask = case.mask
    counts, indices = mask.sum(-1, dtype=torch.int32), mask.int().argsort(dim=-1, descending=True, stable=True).int()
    group = case.heads[0] // len(mask)
    counts, indices = (t.repeat_interleave(group, 0)[None] for t in (counts, indices))
    none = torch.zeros_like(counts)
    blocks = BlockMask.from_kv_blocks(none, indices, counts, indices, BLOCK_SIZE=128, seq_lengths=case.shape)
    leaves = tuple(t.detach().transpose(0, 1)[None].requires_grad_() for t in (q, k, v))
    gqa = case.heads[0] != case.heads[1]

    def attend() -> Tensor:
        return _compiled_flex()(*leaves, block_mask=blocks, enable_gqa=gqa)

    return lambda: attend()[0].transpose(0, 1).detach(), backward_of(attend(), leaves)


@cache
def _compiled_flex() -> Callable:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    config.donated_buffer = False  # else a backward cannot be run again
    return torch.compile(flex_attention)


def flashinfer(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Pass, None]:
    """FlashInfer's variable block sparse attention, which has no backward.

    Raises:
        Unavailable: it is not installed, or does not take the mask.
    """
    make = import_one(("flashinfer.sparse",)).VariableBlockSparseAttentionWrapper
    if case.mask is None or case.sizes is None:
        raise Unavailable("not a mask of blocks")
    heads_kv = case.heads[1]
    mask = case.mask.expand(heads_kv, -1, -1).contiguous()
    sizes = [s.expand(heads_kv, -1).contiguous() for s in case.sizes]
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=q.device)
    wrapper = make(workspace, backend="fa3")
    wrapper.plan(mask, *sizes, case.heads[0], heads_kv, q.shape[2], q_data_type=q.dtype)
    arranged = [t.transpose(0, 1).contiguous() for t in (q, k, v)]

    def attend() -> Tensor:
        out = wrapper.run(*arranged)
        return out if out.shape == q.shape else out.transpose(0, 1)

    return attend, None


def magi(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Pass, Pass]:
    """MagiAttention's kernels: a range for each visible block, merged in every call; heads are rows one after another.

    Raises:
        Unavailable: it is not installed, or does not take the mask.
    """
    flex_flash_attn_func = import_one(("magi_attention.functional",)).flex_flash_attn_func
    if case.mask is None or 0 in case.blocks:
        raise Unavailable("not a mask of blocks of one size")
    heads_kv, group = case.heads[1], case.heads[0] // case.heads[1]
    head, *block = case.mask.expand(heads_kv, -1, -1).nonzero().int().unbind(-1)
    starts = [head * tokens + b * size for b, tokens, size in zip(block, case.shape, case.blocks, strict=True)]
    ranges = [torch.stack([s, s + size], dim=-1) for s, size in zip(starts, case.blocks, strict=True)]
    rows_q = q.unflatten(1, (heads_kv, group)).transpose(0, 1).flatten(0, 1)
    leaves = tuple(
        t.detach().contiguous().requires_grad_()
        for t in (rows_q, *(x.transpose(0, 1).reshape(-1, 1, x.shape[2]) for x in (k, v)))
    )

    def attend() -> Tensor:
        return flex_flash_attn_func(
            *leaves, *ranges, torch.zeros_like(starts[0]), pack_gqa=True, auto_range_merge=True,
            disable_fwd_atomic_reduction=True, ref_block_size=(128, 128), max_seqlen_q=case.blocks[0],
        )[0]  # fmt: skip

    def forward() -> Tensor:
        with torch.no_grad():
            return attend().unflatten(0, (heads_kv, -1)).transpose(0, 1).flatten(1, 2)

    return forward, backward_of(attend(), leaves)


def triton(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Pass, Pass]:
    """The kernels in Triton here, by the call that the case makes."""
    leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
    out = case.attend(*leaves, impl="triton")[0]
    return lambda: case.attend(q, k, v, impl="triton")[0], backward_of(out, leaves)


PEERS = {"flex": flex, "flashinfer": flashinfer, "magi": magi, "triton": triton}
"""By name: forward, and backward where there is one."""
