"""What `bench_sparse` measures: patterns of visible keys, and how they are computed here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_magi import slice_attention
from megatron_magi.backends.sm90.sparse_lists import lists_of, lists_of_mask, lists_of_queries
from megatron_magi.mask import builders
from megatron_magi.operands.sparse_pattern import SparsePattern
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from megatron_magi.ops.latent_attention import latent_sparse_attention
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention

DENSITIES = (0.05, 0.1, 0.25, 0.5)
TOKENS, LIST_TOKENS = (8192, 32768, 131072), (32768, 65536, 131072, 262144, 524288)
TOP_TOKENS = (32768, 110592)
HEADS, VIDEO_HEADS, LIST_HEADS, TOP_HEADS = (64, 8), (24, 24), (128, 1), (7, 7)
DIMS, LATENT_DIMS = (128, 128), (576, 512)
LATENT_QUERIES, LATENT_KEYS, LATENT_HEADS, LATENT_TOPK = 4096, (32768, 65536, 131072), (64, 128), (512, 1024, 2048)
OTHER_LATENT_HEADS = (8, 16, 32, 96)
CAUSAL_LATENT_TOKENS = (4096, 8192, 16384)  # lists of all keys take 4 bytes a pair
LATENT_SCALE = 192**-0.5  # of DeepSeek-V3's heads before absorption


@dataclass(frozen=True)
class Case:
    """What is timed: ``attend(*tensors, **options)`` returns ``(out, meta)``; tensors are q, k and v, or q and kv.

    Attributes:
        shape: queries and keys.
        heads: of queries and of keys.
        blocks: tokens of a block of queries and of keys; 0 where they vary.
        keys_seen: by a query, on average.
        plan: all that has to be done for a new pattern, on the device.
        mask: bool ``[num_heads_kv or 1, blocks of queries, blocks of keys]`` for peers.
        sizes: of these blocks, ``[blocks]`` each.
        ours: the implementation here that ``attend`` takes.
        dims: head dims of q and k, and of v.
        indices: int32 ``[queries, 1, topk]`` of latent keys, whose first elements are the values, for peers.
    """

    name: str
    shape: tuple[int, int]
    heads: tuple[int, int]
    blocks: tuple[int, int]
    keys_seen: float
    attend: Callable
    plan: Callable | None = None
    mask: Tensor | None = None
    sizes: tuple[Tensor, Tensor] | None = None
    ours: str = "ffa"
    dims: tuple[int, int] = DIMS
    indices: Tensor | None = None

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Of the tensors that ``attend`` takes."""
        (queries, keys), (heads, heads_kv), (dim, dim_v) = self.shape, self.heads, self.dims
        found = [(queries, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v)]
        return found[:2] if self.indices is not None else found

    @property
    def forward_flops(self) -> float:
        """Of logits and of out."""
        return 2 * self.shape[0] * self.keys_seen * self.heads[0] * sum(self.dims)

    @property
    def backward_flops(self) -> float:
        """Of logits, dk and dq, and of dp and dv."""
        dim, dim_v = self.dims
        return self.forward_flops * (3 * dim + 2 * dim_v) / (dim + dim_v)


def block_case(name: str, mask: Tensor, tokens: int, heads: tuple[int, int], blocks: tuple[int, int]) -> Case:
    """A mask of blocks of one size, for a head of keys each or for all."""

    def attend(q, k, v, **options):
        return block_sparse_attention(q, k, v, mask, q_block_size=blocks[0], k_block_size=blocks[1], **options)

    def plan():
        lists_of_mask(mask), lists_of_mask(mask.transpose(1, 2))

    seen = float(mask.float().mean()) * tokens
    sizes = tuple(torch.full((tokens // b,), b, dtype=torch.int32, device="cuda") for b in blocks)
    return Case(name, (tokens, tokens), heads, blocks, seen, attend, plan, mask, (sizes[0], sizes[1]))


def uniform(tokens: int, density: float, k_block: int) -> Case:
    mask = torch.rand((HEADS[1], tokens // 128, tokens // k_block), device="cuda") < density
    return block_case(f"uniform {density:.0%}", mask, tokens, HEADS, (128, k_block))


def top_blocks(tokens: int, q_block: int) -> Case:
    """Each block of queries sees 64 blocks of 64 keys, at random, others for each head."""
    scores = torch.rand((TOP_HEADS[1], tokens // q_block, tokens // 64), device="cuda")
    mask = torch.zeros(scores.shape, dtype=torch.bool, device="cuda").scatter_(-1, scores.topk(64).indices, True)
    return block_case("top 64", mask, tokens, TOP_HEADS, (q_block, 64))


def video_tiles(tokens: int) -> Case:
    """Tiles of 4 x 8 x 4 tokens lie together; each sees the 5 x 5 x 5 tiles around it."""
    frames = tokens // 1024  # of 32 x 32 tokens
    grid = torch.tensor(list(itertools.product(range(frames // 4), range(4), range(8))), device="cuda")
    near = ((grid[:, None] - grid).abs() <= 2).all(-1)
    return block_case("video tiles", near[None], tokens, VIDEO_HEADS, (128, 128))


def ranged(name: str, table: np.ndarray, tokens: int, heads: tuple[int, int]) -> Case:
    """Slices that are full, as ranges; they are planned on the host when first seen."""
    q_ranges, k_ranges = (torch.from_numpy(table[:, i : i + 2].astype(np.int32)).cuda() for i in (0, 2))

    def attend(q, k, v, **options):
        return flex_flash_attn_func(q, k, v, q_ranges, k_ranges, auto_range_merge=True, sparse_load=True, **options)

    area = ((table[:, 1] - table[:, 0]) * (table[:, 3] - table[:, 2])).sum()
    return Case(name, (tokens, tokens), heads, (0, 0), area / tokens, attend)


def video_windows(tokens: int) -> Case:
    """Rows of 32 tokens, 32 to a frame, one after another; each sees 13 rows around it in the 5 frames around it."""
    frames = tokens // 1024
    rows = [
        (first, first + 32, 1024 * near + 32 * max(0, row - 6), 1024 * near + 32 * min(32, row + 7))
        for frame, row in itertools.product(range(frames), range(32))
        for first in [32 * (32 * frame + row)]
        for near in range(max(0, frame - 2), min(frames, frame + 3))
    ]
    return ranged("video windows", np.array(rows), tokens, VIDEO_HEADS)


def variable(tokens: int, density: float) -> Case:
    """Blocks of 32 to 512 tokens, the same for all heads."""
    rng = np.random.default_rng(0)
    cuts = []
    for _ in range(2):
        sizes = np.exp(rng.uniform(np.log(32), np.log(512), tokens // 32)).astype(np.int64)
        ends = np.cumsum(sizes)
        cuts.append(np.concatenate([[0], ends[ends < tokens - 32], [tokens]]))
    blocks = rng.random((len(cuts[0]) - 1, len(cuts[1]) - 1)) < density
    steps = np.diff(np.pad(blocks, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    (row, first), (_, past) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    table = np.stack([cuts[0][row], cuts[0][row + 1], cuts[1][first], cuts[1][past]], axis=1)
    sizes = tuple(torch.from_numpy(np.diff(c).astype(np.int32)).cuda() for c in cuts)
    case = ranged(f"variable {density:.0%}", table, tokens, HEADS)
    return replace(case, mask=torch.from_numpy(blocks).cuda()[None], sizes=(sizes[0], sizes[1]))


def listed_blocks(keys: int, k_block: int) -> Case:
    rows, topk = keys // 64, keys // 8 // k_block
    lists = torch.rand((1, rows, keys // k_block), device="cuda").argsort(-1)[..., :topk]
    lists = lists.sort(-1).values.int()
    pattern = SparsePattern((lists,), 1, k_block, False)

    def attend(q, k, v, **options):
        return block_sparse_attention(q, k, v, lists, q_block_size=1, k_block_size=k_block, **options)

    def plan():
        lists_of_queries(pattern, lists_of(pattern), rows, keys)

    mask = torch.zeros((1, rows, keys // k_block), dtype=torch.bool, device="cuda").scatter_(-1, lists.long(), True)
    return Case("blocks", (rows, keys), LIST_HEADS, (1, k_block), topk * k_block, attend, plan, mask)


def listed_keys(keys: int, topk: int | None) -> Case:
    rows, topk, name = keys // 64, topk or keys // 8, f"index top {topk}" if topk else "index"
    stretch = keys // topk  # one key of each
    first = stretch * torch.arange(topk, device="cuda", dtype=torch.int32)
    indices = first + torch.randint(0, stretch, (rows, 1, topk), device="cuda", dtype=torch.int32)

    def attend(q, k, v, **options):
        return index_sparse_attention(q, k, v, indices, **options)

    return Case(name, (rows, keys), LIST_HEADS, (1, 1), topk, attend)


def latent_keys(keys: int, heads: int, topk: int) -> Case:
    """MLA with absorbed heads over lists of single keys, as in DeepSeek's sparse attention."""
    stretch = keys // topk  # one key of each
    first = stretch * torch.arange(topk, device="cuda", dtype=torch.int32)
    indices = first + torch.randint(0, stretch, (LATENT_QUERIES, 1, topk), device="cuda", dtype=torch.int32)

    def attend(q, kv, **options):
        return latent_sparse_attention(q, kv, indices, softmax_scale=LATENT_SCALE, impl="ffa", **options)

    name, shape = f"mla top {topk}", (LATENT_QUERIES, keys)
    return Case(name, shape, (heads, 1), (1, 1), topk, attend, dims=LATENT_DIMS, indices=indices)


def latent_causal(tokens: int, heads: int) -> Case:
    """The same with a dense causal mask: each query lists itself and all before it."""
    key = torch.arange(tokens, device="cuda", dtype=torch.int32)
    indices = key.expand(tokens, tokens).where(key <= key[:, None], -1)[:, None]

    def attend(q, kv, **options):
        return latent_sparse_attention(q, kv, indices, softmax_scale=LATENT_SCALE, impl="ffa", **options)

    seen = (tokens + 1) / 2
    return Case("mla causal", (tokens, tokens), (heads, 1), (1, 1), seen, attend, dims=LATENT_DIMS, indices=indices)


def dense(tokens: int) -> Case:
    mask = builders.full(tokens)

    def attend(q, k, v, **options):
        return slice_attention(q, k, v, mask, **options)

    return Case("dense", (tokens, tokens), HEADS, (0, 0), tokens, attend)


def cases(only: list[str], least: int, most: int) -> Iterator[Case]:
    """Cases whose name begins with one of ``only``, of at least and at most so many keys, each made at its turn."""
    makers: list[tuple[str, int, Callable[[], Case]]] = []
    for tokens in TOKENS:
        makers.append(("dense", tokens, partial(dense, tokens)))
        makers += [
            (f"uniform {density:.0%} {k_block}", tokens, partial(uniform, tokens, density, k_block))
            for density, k_block in itertools.product(DENSITIES, (128, 64))
        ]
        makers += [(f"variable {density:.0%}", tokens, partial(variable, tokens, density)) for density in DENSITIES]
        makers += [("video tiles", tokens, partial(video_tiles, tokens))]
        makers += [("video windows", tokens, partial(video_windows, tokens))]
    for tokens, q_block in itertools.product(TOP_TOKENS, (64, 128)):
        makers.append((f"top 64 {q_block}", tokens, partial(top_blocks, tokens, q_block)))
    for keys in LIST_TOKENS:
        makers += [(f"blocks {k_block}", keys, partial(listed_blocks, keys, k_block)) for k_block in (128, 64)]
        makers += [(f"index top {topk}", keys, partial(listed_keys, keys, topk)) for topk in (512, 2048)]
        makers.append(("index eighth", keys, partial(listed_keys, keys, None)))
    for keys, heads, topk in itertools.product(LATENT_KEYS, LATENT_HEADS, LATENT_TOPK):
        makers.append((f"mla top {topk}", keys, partial(latent_keys, keys, heads, topk)))
    for keys, heads in itertools.product(LATENT_KEYS, OTHER_LATENT_HEADS):
        makers.append(("mla heads", keys, partial(latent_keys, keys, heads, 2048)))
    for tokens, heads in itertools.product(CAUSAL_LATENT_TOKENS, LATENT_HEADS):
        makers.append(("mla causal", tokens, partial(latent_causal, tokens, heads)))
    for name, keys, make in makers:
        if least <= keys <= most and (not only or any(name.startswith(prefix) for prefix in only)):
            yield make()
