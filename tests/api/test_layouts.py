"""Keys of tokens that are distributed already: by name, by positions, and by torch's own context parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from megatron_magi import api
from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import AttendConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from tests.dense_attention import dense_attention

TOTAL, HEADS, DIM = 64, (4, 2, 2), 8


@pytest.fixture(autouse=True)
def no_plans_left_over():
    api.clear_cache()


def qkv(total: int = TOTAL) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, n, DIM, generator=generator, dtype=torch.float64) for n in HEADS]


def causal_key(num_ranks: int, total: int = TOTAL, **options) -> api.DistAttnRuntimeKey:
    group = dist.group.WORLD if num_ranks > 1 else None
    return api.magi_attn_flex_key([[0, total]], [[0, total]], "causal", total, total, cp_group_or_mesh=group, **options)


def run_keys(rank: int, num_ranks: int) -> None:
    """Local tensors as the layout says: nothing is dispatched to compute attention, and everything else works too."""
    x, bounds = qkv(), [0, 16, 64]
    turned = [list(range(at, TOTAL, num_ranks))[::-1] for at in range(num_ranks)]
    turned[0] = [*turned[0], TOTAL]  # padding
    group = dist.group.WORLD if num_ranks > 1 else None
    keys = {
        "contiguous": causal_key(num_ranks, layout="contiguous"),
        "zigzag": causal_key(num_ranks, layout="zigzag"),
        "positions": causal_key(num_ranks, layout=[torch.tensor(some) for some in turned]),
        "documents": causal_key(num_ranks, layout="zigzag_documents", layout_cu_seqlens=bounds),
        "varlen": api.magi_attn_varlen_key(
            bounds, bounds, causal=True, cp_group_or_mesh=group, layout="zigzag_documents"
        ),
    }
    assert len(set(keys.values())) == (5 if num_ranks > 1 else 3)
    for name, key in keys.items():
        positions = api.get_position_ids(key).cpu()
        local = [t[positions].requires_grad_() for t in x]
        for t, given in zip(local, x, strict=True):
            kept = api.dispatch(torch.ones(TOTAL), key).bool()
            assert torch.equal(api.dispatch(given, key)[kept], t[kept])
        out, meta = api.calc_attn(*local, key, return_max_logits=True)
        mask = dense_mask(builders.varlen(bounds) if name == "varlen" else builders.causal(TOTAL))
        expected, lse = dense_attention(*x, mask)[:2]
        torch.testing.assert_close(api.undispatch(out, key), expected)
        torch.testing.assert_close(api.undispatch(meta.lse, key).double(), lse.view(TOTAL, -1), check_dtype=False)
        rolled = api.roll(local[0].detach(), -1, 0, key)
        torch.testing.assert_close(api.undispatch(rolled, key), x[0].roll(-1, 0))
        window = api.make_varlen_key_for_new_mask_after_dispatch(
            [0, TOTAL], [0, TOTAL], key_for_dispatch=key, window_size=(7, 0)
        )
        expected = dense_attention(*x, dense_mask(builders.sliding_window(left=7, right=0, cu_seqlens=[0, TOTAL])))[0]
        torch.testing.assert_close(api.undispatch(api.calc_attn(*local, window)[0], window), expected)
    assert keys["positions"].pad_size == 1 and keys["zigzag"].pad_size == 0
    assert causal_key(num_ranks, layout="zigzag") == keys["zigzag"] != causal_key(num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_calc_attn_takes_tokens_where_they_are(ranks, num_ranks: int) -> None:
    ranks(num_ranks, run_keys)


def run_travel(rank: int, num_ranks: int) -> None:
    """Keys over a contiguous layout let others compute: by default, where it is predicted to be faster."""
    total, group = 1024, dist.group.WORLD
    x = [t.requires_grad_() for t in qkv(total)]
    weight = torch.randn(total, HEADS[0], DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slow = replace(DEFAULT, forward_tflops=1e-4, backward_tflops=1e-4)
    cost = OverlapConfig(cost=CostModel(num_heads_q=64, num_heads_kv=8))  # so many that a GPU is busy
    configs = {
        queries: MagiConfig(DispatchConfig(rates=slow, queries=queries), cost, AttendConfig(impl="torch"))
        for queries in ("auto", "home")
    }
    for queries, config in configs.items():
        key = causal_key(num_ranks, total, layout="contiguous", dist_attn_config=config)
        other = api.make_flex_key_for_new_mask_after_dispatch([[0, total]], [[0, 64]], "full", key)
        moves = [api.functions._RUNTIMES.get(some).rank_plan.moves for some in (key, other)]
        assert (moves[0] is not None) == (queries == "auto") and moves[1] is None
        positions = api.get_position_ids(key)
        local = [t.detach()[positions].requires_grad_() for t in x]
        out, _ = api.calc_attn(*local, key)
        out.backward(weight[positions])
        expected = dense_attention(*x, dense_mask(builders.causal(total)))[0]
        grads = torch.autograd.grad(expected, x, weight)
        torch.testing.assert_close(out, expected[positions])
        for t, grad in zip(local, grads, strict=True):
            torch.testing.assert_close(t.grad, grad[positions])
    dist.barrier(group)


def test_queries_travel_where_it_is_faster(ranks) -> None:
    ranks(2, run_travel)


def run_different(rank: int, num_ranks: int) -> None:
    x = [t[:16] for t in qkv()]
    key = causal_key(num_ranks, layout="zigzag" if rank != 1 else "contiguous")
    with pytest.raises(RuntimeError, match="plan: ranks disagree"):
        api.calc_attn(*x, key)
    wrong = [list(range(at, at + 16))[::-1] for at in range(0, TOTAL, 16)]
    if rank == 2:
        wrong[0][-1] = 1
        with pytest.raises(ValueError, match=r"^layout: position 1 is held 2 times, position 0 never"):
            causal_key(num_ranks, layout=wrong)
        return
    key = causal_key(num_ranks, layout=wrong)
    with pytest.raises(RuntimeError, match="rank 2"):
        api.calc_attn(*x, key)


def test_layouts_that_differ_are_one_message_on_all_ranks(ranks) -> None:
    ranks(4, run_different)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "ring"}, "layout: expected one of contiguous, zigzag"),
        ({"layout": [[0], [1]]}, "layout: expected positions for each of 1 ranks"),
        ({"layout": "zigzag", "chunk_size": 8}, "chunk_size: 8, but layout says"),
        ({"layout": "zigzag_documents"}, "layout_cu_seqlens: bounds of documents"),
        ({"layout": "zigzag", "layout_cu_seqlens": [0, 64]}, "layout_cu_seqlens: bounds of documents"),
        ({"layout_cu_seqlens": [0, 64]}, "layout_cu_seqlens: bounds of documents"),
        ({"layout": [list(range(TOTAL))], "pad_size": 2}, "pad_size: got 2, but the layout has 0 rows"),
    ],
)
def test_what_contradicts_a_layout_is_refused(options, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        causal_key(1, **options)


def run_torch_sharding(rank: int, num_ranks: int) -> None:
    x, mesh = qkv(), init_device_mesh("cpu", (num_ranks,))
    weight = torch.randn(TOTAL, HEADS[0], DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = [t.clone().requires_grad_() for t in x]
    expected = dense_attention(*whole, dense_mask(builders.causal(TOTAL)))[0]
    expected.backward(weight)
    buffers, positions = [*(t.clone() for t in x), weight.clone()], torch.arange(TOTAL)
    key = causal_key(num_ranks, layout="zigzag")
    with context_parallel(mesh, buffers=[*buffers, positions], buffer_seq_dims=[0] * 5):
        local = [t.clone().requires_grad_() for t in buffers[:3]]
        assert torch.equal(positions, api.get_position_ids(key))
        out, _ = api.calc_attn(*local, key)
        out.backward(buffers[3])
        rows = positions.clone()
    torch.testing.assert_close(out, expected[rows])
    for t, given in zip(local, whole, strict=True):
        torch.testing.assert_close(t.grad, given.grad[rows])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_sharding_of_torch_is_the_zigzag_layout(ranks, num_ranks: int) -> None:
    ranks(num_ranks, run_torch_sharding)


class Decoder(torch.nn.Module):
    """A small decoder whose attention is given, a function of q, k and v of ``[1, heads, rows, head_dim]``."""

    def __init__(self, attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, kv = HEADS[0] * DIM, HEADS[1] * DIM
        self.attention = attention
        self.embed, self.place = torch.nn.Embedding(11, width), torch.nn.Embedding(TOTAL, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width + 2 * kv) for _ in range(2))
        self.double()

    def forward(self, tokens, positions, targets):
        """The sum of the losses of tokens ``[1, rows]``."""
        x = self.embed(tokens) + self.place(positions)
        for layer in self.layers:
            parts = layer(x).split([n * DIM for n in HEADS], dim=-1)
            q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in parts)
            x = x + self.attention(q, k, v).transpose(1, 2).flatten(2).tanh()
        logits = x @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def run_torch_model(rank: int, num_ranks: int) -> None:
    tokens = torch.randint(11, (1, TOTAL + 1), generator=torch.Generator().manual_seed(3))
    batch = [tokens[:, :-1].clone(), torch.arange(TOTAL)[None], tokens[:, 1:].clone()]
    stock = Decoder(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    expected = stock(*batch)
    expected.backward()
    key, mesh = causal_key(num_ranks, layout="zigzag"), init_device_mesh("cpu", (num_ranks,))

    def attention(q, k, v):
        return api.calc_attn(*(x[0].transpose(0, 1) for x in (q, k, v)), key)[0].transpose(0, 1)[None]

    model = Decoder(attention)
    with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1] * 3):
        assert batch[0].shape == (1, TOTAL // num_ranks)
        loss = model(*batch)
        loss.backward()
    loss = loss.detach()
    for x in (loss, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(x)
    torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_under_the_sharding_of_torch_is_that_of_one_rank(ranks, num_ranks: int) -> None:
    ranks(num_ranks, run_torch_model)
