"""Padding: how much there is, where positions in it point, and that it never counts."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_magi import api
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from tests.dense_attention import dense_attention

IGNORED = -100


def make_key(num_ranks, total, pad_size=None, chunk_size=None, config=None):
    group = dist.group.WORLD if num_ranks > 1 else None
    cu_seqlens = torch.tensor([0, total], dtype=torch.int32)
    return api.magi_attn_varlen_key(
        cu_seqlens, cu_seqlens, 4, 2, 8, pad_size, chunk_size, group, causal=True, dist_attn_config=config
    )


@pytest.mark.parametrize("pad_size", [0, None])
def test_one_rank_is_not_padded_to_whole_chunks(pad_size):
    key = api.magi_attn_varlen_key([0, 777], [0, 777], 4, 2, 8, pad_size, 512, causal=True)
    assert (key.pad_size, key.total_seqlen_q, key.chunk_size) == (0, 777, 512)
    q, k, v = (torch.randn(777, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    out, _ = api.calc_attn(q, k, v, key)
    torch.testing.assert_close(out, dense_attention(q, k, v, dense_mask(builders.causal(777)))[0])
    assert api.get_position_ids(key).tolist() == list(range(777))


def given_and_used(rank, num_ranks, cases):
    for total, pad_size, chunk_size in cases:
        key = make_key(num_ranks, total, pad_size, chunk_size)
        case = (num_ranks, total, pad_size, chunk_size)
        assert (key.pad_size, key.total_seqlen_q) == (pad_size, total + pad_size), case
        x = torch.arange(1.0, total + 1)
        local = api.dispatch(x, key, pad_value=-1)
        assert local.shape[0] * num_ranks == total + pad_size, case
        assert torch.equal(api.undispatch(local, key), x), case
    return True


def test_a_padding_that_is_given_is_what_is_used(ranks):
    one = [(777, 0, 512), (777, 247, 512), (777, 3, None), (777, 1, 512), (16, 496, 512)]
    assert given_and_used(0, 1, [*one, (16, 65536, None)])
    with pytest.raises(ValueError, match=r"^pad_size: expected at most 65536 for 16 tokens over 1 rank"):
        make_key(1, 16, 65537)
    two = [(777, 247, 512), (777, 247 + 1024, 512), (1024, 0, 512), (1024, 0, None), (777, 1, None), (777, 247, None)]
    assert all(ranks(2, given_and_used, [*two, (16, 1008, 512), (8180, 6, None)]))
    assert all(ranks(3, given_and_used, [(768, 0, 128), (777, 375, 128), (777, 0, None), (778, 2, None)]))


def refused(rank, num_ranks):
    uneven = api.DistAttnConfig(api.DispatchConfig(uneven_shard=True))
    for total, pad_size, chunk_size, config, message in [
        (777, 0, 512, None, "pad_size: got 0, but 777 tokens over 2 rank.s. in chunks of 512 need 247"),
        (777, 3, 512, None, "pad_size: got 3, .* need 247 .or more by a multiple of 1024"),
        (777, 0, None, None, "pad_size: got 0, but 777 tokens over 2 rank.s. need 1 "),
        (777, 2, None, None, "pad_size: got 2"),
        (776, 4, None, uneven, "pad_size: uneven shards have no padding, got 4"),
        (777, 247, 512, MagiConfig(dispatch=DispatchConfig(pad_size=0)), "pad_size: 247, but the configuration says 0"),
        (777, 4, None, MagiConfig(dispatch=DispatchConfig(alignment=4)), "pad_size: got 4, .* need 7"),
        (16, 1 << 20, None, None, "pad_size: expected at most 131072 for 16 tokens over 2"),
        (1, None, None, uneven, "cp_group_or_mesh: 1 tokens .* fewer than 2 ranks; .* or even shards"),
        (16, None, 10**7, None, "chunk_size: expected at most 65536 for 16 tokens over 2"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            make_key(num_ranks, total, pad_size, chunk_size, config)
    assert make_key(num_ranks, 777, 0, None, uneven).pad_size == 0
    return True


@pytest.mark.ranks(2)
def test_a_padding_that_cannot_be_used_is_refused(ranks):
    assert all(ranks(2, refused))


def positions(rank, num_ranks, total, chunk_size):
    key = make_key(num_ranks, total, None, chunk_size)
    ids = api.get_position_ids(key)
    is_token = api.dispatch(torch.ones(total), key).bool()
    table = torch.arange(total)
    assert torch.equal(table[ids][is_token], api.dispatch(table, key)[is_token])
    assert (ids[~is_token] == total - 1).all()
    assert not is_token[int(is_token.sum()) :].any()  # padding comes last
    ids.zero_()
    assert torch.equal(api.dispatch(table, key, pad_value=-1) >= 0, is_token)
    return int((~is_token).sum())


def test_positions_of_padding_repeat_the_last_one(ranks):
    assert sum(ranks(2, positions, 5, 4)) == 3
    assert sum(ranks(3, positions, 10, 8)) == 14
    assert api.get_position_ids(make_key(1, 5, 3)).tolist() == [0, 1, 2, 3, 4, 4, 4, 4]


def loss_of_labels(rank, num_ranks, pad_size):
    """Next-token loss of dispatched logits and labels, summed over ranks: sums and counts of real tokens alone."""
    total, vocabulary, chunk_size = 13, 6, 4
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(total, vocabulary, generator=gen, dtype=torch.float64)
    tokens = torch.randint(0, vocabulary, (total,), generator=gen)
    if pad_size == "computed":
        pad_size = api.compute_pad_size(total, num_ranks, chunk_size)
    key = make_key(num_ranks, total, pad_size, chunk_size)
    labels = api.roll(api.dispatch(tokens, key, pad_value=IGNORED), -1, 0, key)
    loss = F.cross_entropy(api.dispatch(logits, key), labels, ignore_index=IGNORED, reduction="sum")
    count = (labels != IGNORED).sum()
    if num_ranks > 1:
        dist.all_reduce(loss)
        dist.all_reduce(count)
    expected = F.cross_entropy(logits, tokens.roll(-1), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert count == total
    return True


def test_labels_of_padding_never_count(ranks):
    for pad_size in (None, "computed"):
        assert loss_of_labels(0, 1, pad_size)
        assert all(ranks(2, loss_of_labels, pad_size)) and all(ranks(3, loss_of_labels, pad_size))
