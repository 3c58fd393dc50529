"""A microbatch over ranks: what each holds, and that nothing is lost."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import AttnShape
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.microbatch import Microbatch
from megatron_magi.mask.source import LayerMasks, MaskSource
from megatron_magi.mcore import batch as batch_module
from megatron_magi.mcore.batch import BatchDispatcher, LocalBatch
from megatron_magi.mcore.loader import LoadedBatch
from megatron_magi.mcore.planner import Planner, checksum
from megatron_magi.mcore.token_order import TokenOrder
from megatron_magi.runtime.upload import PackedArrays

EOD = 99
SHAPE = AttnShape(2, 2, 8, 8, torch.float32)


def _batch(batch_size: int, seqlen: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, EOD + 1, (batch_size, seqlen), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.1] = EOD
    return {
        "tokens": tokens,
        "labels": tokens + 1000,
        "loss_mask": (torch.rand(tokens.shape, generator=generator) < 0.7).float(),
        "position_ids": torch.arange(seqlen).expand(batch_size, -1).contiguous(),
        **more,
    }


def _shards(batch: dict, cp_size: int, alignment: int = 1, eod: int | None = EOD) -> list[LocalBatch]:
    config = MagiConfig(dispatch=DispatchConfig(alignment=alignment * batch["tokens"].shape[0]))
    shards = []
    for rank in range(cp_size):
        planner = Planner(config, rank, cp_size, SHAPE, eod=eod)
        shards.append(BatchDispatcher(planner, None).dispatch(batch))
    return shards


def _order_of(
    batch: dict, cp_size: int, alignment: int | None = None, **options: object
) -> tuple[list[LocalBatch], torch.Tensor, TokenOrder]:
    """Shards, their rows as a linear layer has them after its exchange, and the order that brings them into."""
    dispatch = DispatchConfig(alignment=alignment or batch["tokens"].shape[0], algorithm="affinity")
    config, shards = MagiConfig(dispatch=dispatch), []
    for rank in range(cp_size):
        planner = Planner(config, rank, cp_size, SHAPE, **options)
        shards.append(BatchDispatcher(planner, None).dispatch(batch))
    rows = torch.cat([shard.tokens.t().reshape(-1) for shard in shards])
    return shards, rows, shards[0].params.plans.order(rows.device)


@pytest.mark.parametrize("foreseen", [True, False])
@pytest.mark.parametrize("layout", [None, "zigzag", "contiguous"])
@pytest.mark.parametrize(("batch_size", "cp_size"), [(1, 1), (2, 1), (1, 3), (2, 4)])
def test_rows_of_any_layout_are_brought_into_order(
    batch_size: int, cp_size: int, layout: str | None, foreseen: bool
) -> None:
    batch = _batch(batch_size, 50)
    _, rows, order = _order_of(batch, cp_size, eod=EOD, layout=layout, has_linear_layers=foreseen)
    num_tokens = batch_size * 50
    assert torch.equal(order.sort(rows)[:num_tokens], batch["tokens"].reshape(-1))
    assert torch.equal(order.unsort(order.sort(rows)), rows)
    padded = [len(rows)] if len(rows) > num_tokens else []
    documents = [0, *(end for _, end in _documents(batch)), *padded]
    assert order.cu_seqlens_q.tolist() == documents
    order.number_documents()
    expected = [n for n, (begin, end) in enumerate(pairwise(documents)) for _ in range(begin, end)]
    assert order.seq_idx.tolist() == [expected]


@pytest.mark.parametrize("foreseen", [True, False])
def test_linear_layers_of_one_rank_run_as_in_megatron_where_sequences_are_documents(foreseen: bool) -> None:
    for cp_size in (1, 2):
        _, _, order = _order_of(_batch(2, 50), cp_size, has_linear_layers=foreseen)
        assert (order is None) == (cp_size == 1)
    _, _, order = _order_of(_batch(1, 50), 1, alignment=4, has_linear_layers=foreseen)
    assert order is None


@pytest.mark.parametrize("foreseen", [True, False])
def test_padded_sequences_of_one_rank_are_not_run_into_each_other(foreseen: bool) -> None:
    """Of rows 0 to 51 and 52 to 103, Megatron's two columns, the first 50 and the next 50 are a sequence each."""
    batch = _batch(2, 50)
    _, rows, order = _order_of(batch, 1, alignment=8, has_linear_layers=foreseen)
    assert len(rows) == 104 and order.cu_seqlens_q.tolist() == [0, 50, 100, 104]
    assert torch.equal(order.sort(rows)[:100], batch["tokens"].reshape(-1))


def test_tokens_lie_as_the_layout_says() -> None:
    for layout, expected in (
        ("zigzag", [[0, 1, 2, 9, 10, 0], [3, 4, 5, 6, 7, 8]]),
        ("contiguous", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 0]]),
    ):
        shards, _, _ = _order_of(_batch(1, 11), 2, layout=layout)
        assert [shard.params.layout.positions.tolist() for shard in shards] == expected
        assert [shard.params.plans.dispatch.padded_seqlen for shard in shards] == [12, 12]


def _documents(batch: dict, eod: int | None = EOD) -> list[tuple[int, int]]:
    """Bounds of the documents that attention is confined to."""
    (mask,) = Planner(MagiConfig(), 0, 2, SHAPE, eod=eod).masks_of(batch)[1].values()
    return [tuple(s.q_range) for s in mask.slices]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("seqlen", "cp_size", "alignment"), [(64, 2, 1), (50, 3, 1), (50, 3, 4), (7, 4, 1)])
def test_every_token_is_on_one_rank_with_its_label_mask_and_position(
    batch_size: int, seqlen: int, cp_size: int, alignment: int
) -> None:
    batch = _batch(batch_size, seqlen)
    shards = _shards(batch, cp_size, alignment)
    assert len({shard.tokens.shape for shard in shards}) == 1
    assert shards[0].tokens.shape[0] == batch_size
    assert shards[0].tokens.shape[1] % alignment == 0

    def rows(name: str, source: torch.Tensor) -> tuple[list, list]:
        got = torch.cat([getattr(shard, name).reshape(-1) for shard in shards])
        real = torch.cat([shard.labels.reshape(-1) for shard in shards]) > 0
        return sorted(got[real].tolist()), sorted(source.reshape(-1).tolist())

    for name in ("tokens", "labels", "position_ids", "loss_mask"):
        got, expected = rows(name, batch[name])
        assert got == expected
    for shard in shards:
        real = shard.labels > 0
        assert torch.equal(shard.labels[real], shard.tokens[real] + 1000)
        assert torch.equal(shard.params.layout.positions.view_as(real)[real], shard.position_ids[real])
        assert not shard.loss_mask[~real].any()
        assert (shard.padding_mask is None) == (real.all() and all((s.labels > 0).all() for s in shards))


def test_loss_tokens_are_counted_over_all_ranks() -> None:
    batch = _batch(2, 50)
    total = float(batch["loss_mask"].sum())
    assert [shard.params.num_loss_tokens for shard in _shards(batch, 3)] == [total] * 3


def test_documents_end_at_eod_and_at_the_end_of_a_sequence() -> None:
    batch = _batch(2, 40)
    ends = set((torch.nonzero(batch["tokens"].reshape(-1) == EOD).view(-1) + 1).tolist()) | {40, 80}
    assert {end for _, end in _documents(batch)} == ends


def test_without_eod_only_sequences_confine() -> None:
    assert _documents(_batch(2, 40), eod=None) == [(0, 40), (40, 80)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_a_loss_mask_of_any_dtype_is_floating_point_to_the_model(dtype: torch.dtype) -> None:
    """So multi-token prediction, which tells it from token ids by that, counts its tokens over all ranks."""
    batch = _batch(1, 600)
    batch["loss_mask"][:, :400] = 1
    for got, want in zip(
        _shards({**batch, "loss_mask": batch["loss_mask"].to(dtype)}, 2), _shards(batch, 2), strict=True
    ):
        assert got.loss_mask.dtype == torch.float32 and torch.equal(got.loss_mask, want.loss_mask)
        assert got.params.num_loss_tokens == want.params.num_loss_tokens


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_padded"])
def test_documents_of_the_data_loader_win_and_restart_positions(name: str) -> None:
    cu_seqlens = torch.full((2, 41), 40, dtype=torch.int32)
    cu_seqlens[0, :4] = torch.tensor([0, 10, 25, 40])
    cu_seqlens[1, :2] = torch.tensor([0, 40])
    batch = _batch(2, 40, **{name: cu_seqlens})
    shards = _shards(batch, 2)
    assert _documents(batch) == [(0, 10), (10, 25), (25, 40), (40, 80)]
    positions = np.empty(80, dtype=np.int64)
    for rank, shard in enumerate(shards):
        index = shard.params.plans.dispatch.global_index(rank)
        positions[index] = shard.params.layout.positions.numpy()
    expected = [*range(10), *range(15), *range(15), *range(40)]
    assert positions.tolist() == expected


def test_padding_is_a_token_of_the_vocabulary_at_position_zero_without_loss() -> None:
    """So its embedding, and with it its query, key and value, is as finite as any other."""
    shards = _shards(_batch(1, 50), 3, alignment=4)
    padding = [shard.padding_mask for shard in shards]
    assert sum(int(p.sum()) for p in padding) == sum(p.numel() for p in padding) - 50 > 0
    for shard in shards:
        for name in ("tokens", "labels", "position_ids", "loss_mask"):
            assert (getattr(shard, name)[shard.padding_mask] == 0).all()


def test_last_tokens_of_sequences_and_padding_have_no_successor() -> None:
    for rank, shard in enumerate(_shards(_batch(2, 50), 3)):
        index = shard.params.plans.dispatch.global_index(rank)
        expected = (index < 100) & (index % 50 != 49)
        assert shard.params.layout.roll_keeps.tolist() == expected.tolist()


def test_layout_goes_to_rows_and_back() -> None:
    layout = _shards(_batch(2, 12), 2)[0].params.layout
    x = torch.arange(layout.num_rows * 3).view(layout.seqlen, 2, 3)
    rows = layout.to_rows(x)
    assert torch.equal(rows[1], x[1, 0])
    assert torch.equal(rows[layout.seqlen], x[0, 1])
    assert torch.equal(layout.from_rows(rows), x)


def test_plan_is_a_function_of_the_batch() -> None:
    batch = _batch(1, 64)
    first, again = _shards(batch, 2)[0], _shards({k: v.clone() for k, v in batch.items()}, 2)[0]
    assert _hash(first) == _hash(again)
    other = _shards(_batch(1, 64) | {"tokens": batch["tokens"].flip(1)}, 2)[0]
    assert _hash(other) != _hash(first)


def _hash(shard: LocalBatch) -> int:
    return shard.params.plans.for_layer(1, None).plan_hash


def test_windows_share_the_dispatch_of_their_microbatch() -> None:
    plans = _shards(_batch(1, 64), 2)[0].params.plans
    windowed = plans.for_layer(1, (4, 0))
    assert windowed is plans.for_layer(3, (4, 0))
    assert windowed.num_rows == plans.for_layer(2, None).num_rows
    assert windowed.area < plans.for_layer(2, None).area


def _dispatch_alone(batch: dict, *masks: str, **options: object) -> LocalBatch:
    layers = LayerMasks(*(MaskSource.parse(text, "magi_mask") for text in masks))
    return BatchDispatcher(Planner(MagiConfig(), 0, 1, SHAPE, masks=layers, **options), None).dispatch(batch)


def test_own_positions_turn_rows_and_may_pass_the_length_of_the_sequence() -> None:
    batch = _batch(1, 16)
    batch["position_ids"] = torch.arange(16)[None].flip(1) + 5
    own = _dispatch_alone(batch, own_positions=True).params
    assert own.layout.positions.tolist() == batch["position_ids"][0].tolist()
    assert own.max_seqlen_q == own.max_seqlen_kv == 21
    batch["position_ids"] = torch.zeros(1, 16, dtype=torch.int64)  # the number of angles is the same in each step
    assert _dispatch_alone(batch, own_positions=True).params.max_seqlen_q == 16
    assert _dispatch_alone(batch).params.layout.positions.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "dataset_provider: its items have no labels, only"),
        ({"loss_mask": torch.ones(1, 15)}, r"loss_mask: expected shape \[1, 16\], got \[1, 15\]"),
        ({"tokens": np.zeros((1, 16))}, "tokens: expected a tensor .* on the CPU, got a ndarray"),
        ({"tokens": torch.zeros(16)}, r"tokens: expected a tensor \[batch_size, seqlen\] on .* got \[16\] on cpu"),
        ({"labels": torch.zeros(1, 16, device="meta")}, r"labels: expected a tensor .* got \[1, 16\] on meta"),
        ({"position_ids": torch.full((1, 16), -1)}, "position_ids: must not be negative, got -1"),
        ({"cu_seqlens": torch.tensor([[0, 17]])}, "cu_seqlens: the bounds of sequence 0"),
        ({"attention_mask": torch.ones(1, 1, 16, 16)}, "attention_mask: the data set returns one, .* for --magi-mask"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_items_of_a_data_set_that_do_not_fit_are_named(change: dict, message: str) -> None:
    batch = {name: value for name, value in (_batch(1, 16) | change).items() if value is not None}
    with pytest.raises(ValueError, match=f"^{message}"):
        _dispatch_alone(batch, own_positions=True)


def test_a_field_for_a_mask_of_attention_may_hold_none() -> None:
    assert _dispatch_alone(_batch(1, 16, attention_mask=None)).params.max_seqlen_q == 16


def mask_of_field(batch: Microbatch) -> AttnMask:
    """Documents of the lengths that a data set's own mask of attention shows."""
    sees = ~batch.fields["attention_mask"][0, 0]
    return builders.varlen([0, int(sees[0].sum()), batch.total_seqlen], causal=False)


def test_a_function_may_make_the_mask_of_that_of_the_data_set() -> None:
    hidden = torch.block_diag(torch.ones(6, 6), torch.ones(10, 10)).eq(0)[None, None]
    shard = _dispatch_alone(_batch(1, 16, attention_mask=hidden), f"{__name__}:mask_of_field")
    assert shard.params.plans.for_layer(1, None).area == 6 * 6 + 10 * 10


def test_padded_bounds_of_documents_go_before_those_without_padding() -> None:
    bounds = {"cu_seqlens": torch.tensor([[0, 7, 12]]), "cu_seqlens_padded": torch.tensor([[0, 8, 16]])}
    assert _documents(_batch(1, 16, **bounds)) == [(0, 8), (8, 16)]


def test_conversations_of_megatrons_data_set_are_taken_as_they_are() -> None:
    """Packed conversations of 5, 4 and 3 tokens on three ranks: nothing is padded to a multiple."""
    from megatron.training.datasets.sft_dataset import SFTDataset

    class Tokenizer:
        eod, pad = 90, 91

        def tokenize_conversation(self, turns: list, **_: object) -> tuple:
            tokens = np.arange(int(turns[0]["content"])) + 10
            return tokens, np.where(tokens < 12, -100, tokens)

    data = SFTDataset.__new__(SFTDataset)
    data.config = SimpleNamespace(
        tokenizer=Tokenizer(),
        sequence_length=16,
        context_parallel_size=1,
        reset_position_ids=False,
        create_attention_mask=False,
        reset_attention_mask=False,
    )
    data.dataset, data.indices = [[{"role": "system", "content": n} for n in (5, 4, 3)]], np.array([0])
    batch = torch.utils.data.default_collate([data[0]])
    shards = _shards(batch, 3, eod=None)
    assert _documents(batch, eod=None) == [(0, 5), (5, 9), (9, 16)]
    assert sum(float(shard.loss_mask.sum()) for shard in shards) == float(batch["loss_mask"].sum()) > 0


def test_a_batch_of_another_length_is_refused() -> None:
    dispatcher = BatchDispatcher(Planner(MagiConfig(), 0, 2, SHAPE, seq_length=64), None)
    dispatcher.dispatch(_batch(1, 64))
    with pytest.raises(ValueError, match="tokens: 1 sequences of 60 become 60"):
        dispatcher.dispatch(_batch(1, 60))


@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask", "position_ids"])
def test_checksum_tells_batches_with_the_same_documents_apart(name: str) -> None:
    batch = _batch(2, 40)
    other = {**batch, name: batch[name].flip(1)}
    assert checksum(batch) == checksum({key: value.clone() for key, value in batch.items()})
    assert checksum(batch) != checksum(other)
    planner = Planner(MagiConfig(), 0, 2, SHAPE, own_positions=True)
    assert planner(batch).fingerprint != planner(other).fingerprint


def test_documents_are_those_that_confine_attention() -> None:
    confined = _shards(_batch(1, 40), 2)
    bounds = [start for start, _ in _documents(_batch(1, 40))]
    assert all(shard.documents.tolist() == [*bounds, 40] for shard in confined)
    assert all(shard.documents is None for shard in _shards(_batch(1, 40), 2, eod=None))


def _one_rank_cannot_place_it(rank: int, num_ranks: int) -> str:
    def out_of_memory(self: PackedArrays, device: object) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("no room for the shard")

    if rank == 1:
        PackedArrays.to = out_of_memory  # a process of its own
    dispatcher = BatchDispatcher(Planner(MagiConfig(), rank, num_ranks, SHAPE, eod=EOD), dist.group.WORLD)
    with pytest.raises(RuntimeError, match="no room for the shard") as error:
        dispatcher.dispatch(_batch(1, 64))
    return str(error.value)


def test_a_shard_that_one_rank_cannot_place_is_an_error_on_all_ranks(ranks) -> None:
    message = "no room for the shard (on 1 of 2 ranks, first on global rank 1)"
    assert ranks(2, _one_rank_cannot_place_it) == [message] * 2


def _begun_before_they_are_due(rank: int, num_ranks: int) -> list[str]:
    """The next microbatch of a training, begun before an evaluation: it, what is between, and one that differs."""
    planner = Planner(MagiConfig(), rank, num_ranks, SHAPE, eod=EOD)
    dispatcher = BatchDispatcher(planner, dist.group.WORLD)
    other = _batch(1, 64) if rank == 0 else {**_batch(1, 64), "tokens": torch.zeros(1, 64, dtype=torch.int64)}
    good, differs, failed = (LoadedBatch(fields, planner(fields)) for fields in (_batch(1, 64), other, _batch(1, 64)))
    if rank == 1:
        failed = LoadedBatch({}, RuntimeError("the disk is gone"))
    messages = []
    for next_one in (good, differs, failed):
        dispatcher.begin(next_one)
        between = dispatcher.dispatch(_batch(1, 96))
        assert between.tokens.shape[1] == 48
        try:
            assert dispatcher.dispatch(next_one).tokens.shape[1] == 32
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_microbatches_that_were_begun_are_compared_when_they_are_due(ranks) -> None:
    for good, differs, failed in ranks(2, _begun_before_they_are_due):
        assert good == ""
        assert differs.startswith("tokens and plan of a microbatch: ranks disagree: rank 1 of the group")
        assert failed == "the disk is gone (on 1 of 2 ranks, first on global rank 1)"


class Unreadable:
    def __reduce__(self) -> tuple:
        return int, ("no number",)


def _one_rank_cannot_read_it(rank: int, num_ranks: int) -> str:
    planner = Planner(MagiConfig(), rank, num_ranks, SHAPE, eod=EOD)
    fields = _batch(1, 64)
    loaded = LoadedBatch({**fields, "more": Unreadable()} if rank == 1 else fields, planner(fields))
    with pytest.raises((RuntimeError, ValueError)) as error:
        BatchDispatcher(planner, dist.group.WORLD).next(iter([pickle.loads(pickle.dumps(loaded))]))
    return str(error.value)


def test_a_batch_that_one_rank_cannot_take_apart_is_an_error_on_all_ranks(ranks) -> None:
    for message in ranks(2, _one_rank_cannot_read_it):
        assert message.startswith("invalid literal for int") and message.endswith("first on global rank 1)")


def test_an_error_that_comes_while_ranks_compare_is_no_disagreement_to_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def died() -> None:
        raise RuntimeError("DataLoader worker (pid 9) is killed by signal")

    agreement = SimpleNamespace(values=died, wait=died)
    monkeypatch.setattr(batch_module, "start_agreement", lambda *args: agreement)
    monkeypatch.setattr(dist, "all_gather_object", lambda *args, **kwargs: pytest.fail("the others do not come"))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(RuntimeError, match=r"worker \(pid 9\)"):
        BatchDispatcher(Planner(MagiConfig(), 0, 1, SHAPE, eod=EOD), object()).dispatch(_batch(1, 64))


def _data_that_ends(rank: int, num_ranks: int) -> list[str]:
    """Messages where no rank has data, where one has none, where it has less, and where its error has no text."""
    planner = Planner(MagiConfig(), rank, num_ranks, SHAPE, eod=EOD)
    dispatcher, messages = BatchDispatcher(planner, dist.group.WORLD), []
    batch = LoadedBatch(_batch(1, 64), planner(_batch(1, 64)))

    def fails() -> Iterator[LoadedBatch]:
        raise AssertionError
        yield

    for data in (None, iter([])), (iter([batch]), None), (iter([batch]), iter([])), (iter([batch]), fails()):
        with pytest.raises((RuntimeError, ValueError)) as error:
            dispatcher.next(data[rank])
        messages.append(str(error.value))
    return messages


def test_data_that_is_missing_or_ends_is_a_message_on_all_ranks(ranks) -> None:
    on_one = " (on 1 of 2 ranks, first on global rank 1)"
    alone, of_both = ["data: none to read here", "data: has ended"], ranks(2, _data_that_ends)
    for (own, missing, ended, silent), text in zip(of_both, alone, strict=True):
        assert own.startswith(text) and "(on" not in own  # each rank its own
        assert missing.startswith(alone[0]) and missing.endswith(on_one)
        assert ended.startswith(alone[1]) and ended.endswith(on_one)
        assert silent == f"AssertionError: {on_one}"
