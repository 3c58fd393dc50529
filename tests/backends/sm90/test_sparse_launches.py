"""The host side of the sparse Hopper kernels on a machine without a GPU: kernels are named, not run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_magi.backends import registry
from megatron_magi.backends.sm90 import (
    key_sums,
    sparse_backward,
    sparse_kernels,
    sparse_lists,
    sparse_single_keys,
    support,
    tuning,
)
from megatron_magi.backends.sm90 import latent as latent_hopper
from megatron_magi.backends.sm90 import sparse as sparse_hopper
from megatron_magi.cuda import launch as hopper_launch
from megatron_magi.cuda.driver import Kernel
from megatron_magi.operands.passes import BackwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks
from megatron_magi.ops.latent_attention import latent_sparse_attention
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention
from tests.backends.sm90.fake_driver import fake_driver


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that are queued."""
    with fake_driver(monkeypatch) as names:
        for module in (sparse_hopper, sparse_backward, sparse_lists, sparse_single_keys, key_sums, latent_hopper):
            monkeypatch.setattr(module, "current_stream", lambda _device: 0)
        for module in (sparse_hopper, sparse_backward, key_sums, latent_hopper):
            monkeypatch.setattr(module, "sm_count", lambda _device: 132)
        monkeypatch.setattr(sparse_kernels, "_load", lambda _d, name, _m, threads, size: Kernel(name, threads, size))
        yield names


def tensors(dim, dtype=torch.bfloat16):
    return [torch.zeros(n, heads, dim, dtype=dtype).requires_grad_() for n, heads in ((100, 8), (300, 2), (300, 2))]


@pytest.mark.parametrize("dim", [64, 128])
def test_both_passes_of_both_functions_queue_their_kernels(launched, dim):
    inputs = tensors(dim)
    mask = torch.ones(7, 5, dtype=torch.bool)
    out, _ = block_sparse_attention(*inputs, mask, q_block_size=16, k_block_size=64, impl="ffa")
    out.sum().backward()
    lists = ["sparse_lists"]
    last = ["sparse_preprocess", "sparse_backward_keys"]
    assert launched == [*lists, "sparse_forward", *lists, "sparse_backward_queries", *lists, *last]
    launched.clear()
    out, _ = block_sparse_attention(*inputs, mask[:, :3], q_block_size=16, k_block_size=128, impl="ffa")
    out.sum().backward()
    assert launched == [*lists, "sparse_forward", *lists, *last, "sparse_postprocess_dq"]
    launched.clear()
    given = torch.zeros(7, 3, dtype=torch.int32)
    out, _ = block_sparse_attention(*inputs, given, q_block_size=16, k_block_size=64, impl="ffa")
    out.sum().backward()
    assert launched == ["sparse_forward", "sparse_backward_queries", *["sparse_transpose"] * 3, *last]
    launched.clear()
    for deterministic, want in (
        (False, ["sparse_forward", *["sparse_transpose"] * 3, *last, "sparse_postprocess_dq"]),
        (True, ["sparse_forward", "sparse_backward_queries", *["sparse_transpose"] * 3, *last]),
    ):
        out, _ = block_sparse_attention(
            *inputs, given, q_block_size=16, k_block_size=128, impl="ffa", deterministic=deterministic
        )
        out.sum().backward()
        assert launched == want
        launched.clear()
    out, _ = index_sparse_attention(*inputs, torch.zeros(100, 1, 3, dtype=torch.int64), impl="ffa")
    out.sum().backward()
    assert launched == ["sparse_forward", "sparse_backward", "sparse_postprocess"]


def test_lists_of_few_keys_do_not_begin_together_whichever_lists_came_first(launched, monkeypatch):
    monkeypatch.setattr(tuning, "L2_BYTES", 1000)
    inputs, found = tensors(64), {}

    def prepared(key, make):
        launch = hopper_launch.prepared(key, make)
        if key[0] == "sparse_backward":
            found[width] = launch.params.tiles.long_list
        return launch

    monkeypatch.setattr(sparse_single_keys, "prepared", prepared)
    for width in (10, 3, 12):
        out, _ = index_sparse_attention(*inputs, torch.zeros(100, 1, width, dtype=torch.int32), impl="ffa")
        out.sum().backward()
    assert found == {10: 300 // 64, 3: sparse_kernels.BEHIND_ALL, 12: 300 // 64}


def test_columns_of_sums_of_latent_keys_are_put_in_order():
    """In every 16, thread t of 4 has columns 2t, 2t + 1, 2t + 8 and 2t + 9."""
    order = torch.tensor(
        [i + c for i in range(0, 576, 16) for t in range(4) for c in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
    )
    wanted = torch.randn(2, 5, 576)
    assert torch.equal(latent_hopper._in_order(wanted[..., order].contiguous(), torch.float32), wanted.transpose(0, 1))


def test_latent_keys_queue_one_kernel_of_all_query_heads(launched):
    for heads, parts in (((64, 1), 1), ((128, 1), 2), ((80, 2), 1), ((130, 1), 3)):
        q, kv = torch.zeros(90, heads[0], 576, dtype=torch.bfloat16), torch.zeros(300, heads[1], 576).bfloat16()
        indices = torch.zeros(90, 1, 70, dtype=torch.int64)
        out, meta = latent_sparse_attention(q, kv, indices, softmax_scale=0.5, return_max_logits=True, impl="ffa")
        assert out.shape == (90, heads[0], 512) and meta.lse.shape == out.shape[:2]
        assert meta.max_logits.shape == heads[:1]
        params = launched.params["latent_forward"]
        assert (params.num_items, params.parts, params.group) == (90 * heads[1] * parts, parts, heads[0] // heads[1])
        assert (params.entry_row, params.entry_list, params.topk, params.num_keys) == (70, 0, 70, 300)
        inputs = BackwardInputs(q, kv, kv[..., :512], out.float(), meta.lse, meta.lse)
        dq, dkv = latent_hopper.backward(inputs, SparsePattern((indices.transpose(0, 1),), 1, 1, False), 0.5, False)
        assert (dq.shape, dkv.shape, dkv.dtype) == (q.shape, kv.shape, kv.dtype)
        params = launched.params["latent_backward"]
        assert (params.num_items, params.parts, params.group) == (90 * heads[1] * parts, parts, heads[0] // heads[1])
        assert (params.entry_row, params.topk, params.num_keys, params.lse_row) == (70, 70, 300, heads[0])
    assert launched == ["latent_forward", "latent_backward"] * 4
    with pytest.raises(ValueError, match=r"^kv: latent impl 'ffa' takes head_dim 576 with dim_v 512, got 576 and 500"):
        latent_sparse_attention(q, kv, indices, softmax_scale=0.5, dim_v=500, impl="ffa")


@pytest.mark.usefixtures("launched")
def test_gradients_of_latent_keys_are_stored_where_sums_exceed_the_cache_and_few_lists_name_a_key():
    """Of one tile of heads: what a second one adds to is in the cache."""

    def stores(keys, width, heads=64, dtype=torch.bfloat16):
        q, kv = (torch.empty(n, h, 576, dtype=dtype, device="meta") for n, h in ((4096, heads), (keys, 1)))
        return latent_hopper._stores(q, kv, width)

    k = 1024
    assert all(stores(*case) for case in ((64 * k, 512), (128 * k, 512), (128 * k, 1024), (128 * k, 512, 16)))
    assert not stores(64 * k, 512, dtype=torch.float16)
    assert not any(stores(*case) for case in ((32 * k, 512), (64 * k, 1024), (128 * k, 2048), (128 * k, 512, 128)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_queries_give_to_latent_keys_is_stored_a_part_at_a_time(launched, monkeypatch, deterministic):
    """300 keys: sums have 691 KB, twice as much is stored at a time: 9 tiles with 128 places, of 4 or 9 queries."""
    monkeypatch.setattr(latent_hopper, "storing_pays", lambda *_: True)
    monkeypatch.setattr(tuning, "GIVEN_LATENT_BYTES", 0)
    heads = 128 if deterministic else 64  # two tiles, or one
    q, kv = torch.zeros(41, heads, 576).bfloat16(), torch.zeros(300, 1, 576).bfloat16()
    out, lse = q[..., :512], torch.zeros(41, heads)
    pattern = SparsePattern.of_keys(torch.zeros(1, 41, 70, dtype=torch.int32))
    asked, empty = [], torch.empty

    def note(*size, **options):
        found = empty(*size, **options)
        asked.append(found.nbytes)
        return found

    monkeypatch.setattr(torch, "empty", note)
    inputs = BackwardInputs(q, kv, kv[..., :512], out, lse, lse)
    dq, dkv = latent_hopper.backward(inputs, pattern, 0.5, deterministic)
    assert (dq.shape, dkv.shape, dkv.dtype) == (q.shape, kv.shape, kv.dtype)
    rows, packs = (4, 2) if deterministic else (9, 1)
    of_part = [*([] if deterministic else ["sparse_places"] * 2), "latent_backward", "sparse_sums"]
    assert launched == of_part * num_blocks(41, rows)
    assert rows * packs * 128 * 576 * 2 in asked and rows * packs * 128 * 576 * 2 <= 2 * 4 * kv.numel()
    last, left = launched.params["sparse_sums"], (41 - 1) % rows + 1
    assert (last.reads_sums, last.writes_sums, last.packs, last.list_heads) == (1, 0, packs, 1)
    assert last.pack_places == 128 * left
    params = launched.params["latent_backward"]
    assert (params.list_places, params.pack_places, params.together) == (128, 128 * left, 0)
    assert params.num_items == left * packs


def test_probabilities_are_shifted_in_fp16_so_that_ds_has_the_size_that_it_has_without_the_scale():
    assert [latent_hopper._shift(torch.float16, scale) for scale in (1.0, 0.3, 192**-0.5, 1e-9, 3.0, -0.5, 0.0)] == [
        0, 2, 4, 10, 0, 1, 0
    ]  # fmt: skip
    assert latent_hopper._shift(torch.bfloat16, 192**-0.5) == 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latent_gradients_without_a_kernel_that_ran_are_left_to_the_second_backend(dtype, deterministic):
    def backend(name):
        return SimpleNamespace(
            forward=None, row_delta=None, takes_backward=latent_hopper.takes_backward,
            backward=lambda *args: (name, args[-1]),
        )  # fmt: skip

    both = registry.Completed(backend("first"), backend("second"))
    name = "second" if dtype == torch.float16 else "first"
    assert both.backward(SimpleNamespace(q=torch.empty(0, dtype=dtype)), None, 0.5, deterministic) == (
        name, deterministic
    )  # fmt: skip


def test_sums_of_dq_that_exceed_the_cache_are_left_to_a_kernel_without_sums(launched, monkeypatch):
    q, k, v = tensors(128)
    lists = torch.zeros(7, 3, dtype=torch.int32)
    found, most = [], 100 * 8 * 128 * 4  # of two key heads
    for of_all, of_head in ((most, most // 2), (most - 1, most // 2), (most, most // 2 - 1)):
        monkeypatch.setattr(tuning, "MOST_SPARSE_DQ_BYTES", of_all)
        monkeypatch.setattr(tuning, "MOST_SPARSE_DQ_BYTES_OF_HEAD", of_head)
        out, _ = block_sparse_attention(q, k, v, lists, q_block_size=16, k_block_size=128, impl="ffa")
        launched.clear()
        out.sum().backward()
        found.append("sparse_postprocess_dq" in launched)
    assert found == [True, False, False]


def test_lists_of_queries_are_cut_into_parts_by_the_bytes_that_a_key_head_reads(launched, monkeypatch):
    q, k, v = tensors(128)
    found, make = [], sparse_backward.Launch

    def keep(kernel, num_blocks, params, maps=()):
        if kernel.handle == "sparse_backward_keys":
            found.append((params.parts, params.window, params.tiles.num_items))
        return make(kernel, num_blocks, params, maps)

    monkeypatch.setattr(sparse_backward, "Launch", keep)
    monkeypatch.setattr(sparse_backward, "sm_count", lambda _device: 1)  # fewer than lists
    monkeypatch.setattr(tuning, "MOST_SPARSE_DQ_BYTES", 0)
    read = 2 * 100 * 4 * 128 * 2  # q and dout
    lists = torch.zeros(100, 3, dtype=torch.int32)
    blocks = [num_blocks(k.shape[0], size) for size in (64, 128)]
    short = torch.ones(100, blocks[1], dtype=torch.bool)  # of 100 steps, where a part has 64 at least
    for pattern, k_block, most in (
        (lists, 64, read), (lists, 64, read - 1), (lists, 128, read // 3), (short, 128, read // 3),
        (lists, 64, read // 6),
    ):  # fmt: skip
        monkeypatch.setattr(tuning, "SPARSE_PART_BYTES", most)
        out, _ = block_sparse_attention(q, k, v, pattern, q_block_size=1, k_block_size=k_block, impl="ffa")
        out.sum().backward()
    assert found == [
        (1, 100, 2 * blocks[0]), (2, 50, 4 * blocks[0]), (4, 25, 8 * blocks[1]), (1, 100, 2 * blocks[1]),
        (7, 15, 14 * blocks[0]),
    ]  # fmt: skip


def test_few_lists_of_queries_are_cut_into_a_part_for_each_team_of_warpgroups(launched, monkeypatch):
    q, k, v = tensors(128)
    found, make = [], sparse_backward.Launch

    def keep(kernel, num_blocks, params, maps=()):
        if kernel.handle == "sparse_backward_keys":
            found.append((params.parts, params.window, params.least_steps, params.sum_heads, params.tiles.num_items))
        return make(kernel, num_blocks, params, maps)

    monkeypatch.setattr(sparse_backward, "Launch", keep)
    monkeypatch.setattr(tuning, "MOST_SPARSE_DQ_BYTES", 0)
    for num_sms, entries, k_block in ((20, 3, 64), (9, 3, 64), (132, 1, 64), (20, 3, 128)):
        monkeypatch.setattr(sparse_backward, "sm_count", lambda _device, num_sms=num_sms: num_sms)
        lists = torch.zeros(100, entries, dtype=torch.int32)  # a list may have a step for each entry
        out, _ = block_sparse_attention(q, k, v, lists, q_block_size=1, k_block_size=k_block, impl="ffa")
        out.sum().backward()
    # 10 lists of 64 keys, of which an SM computes two at a time; 25 parts of 4 steps; 6 lists of 128 keys
    assert found == [(4, 25, 4, 2, 40), (1, 100, 32, 0, 10), (25, 4, 4, 2, 250), (3, 34, 4, 2, 18)]


@pytest.mark.parametrize("dim", [32, 96, 256])
def test_head_dims_of_other_kernels_are_refused_by_name_and_left_to_the_definition(launched, caplog, dim):
    with pytest.raises(ValueError, match=rf"^q, v: .* 64 and 128, got {dim} .* use 'reference'"):
        block_sparse_attention(
            *tensors(dim), torch.ones(7, 5, dtype=torch.bool), q_block_size=16, k_block_size=64, impl="ffa"
        )
    assert not launched
    like = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(100, 8, dim))
    registry._warn_sparse_once.cache_clear()
    assert registry.choose_sparse("auto", like.device, like.dtype, (dim, dim)) is registry.SPARSE["reference"]
    assert "falls back" in caplog.text and "use 'reference'" in caplog.text


def test_other_dtypes_and_devices_are_refused_by_name(monkeypatch):
    indices = torch.zeros(100, 1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^impl: 'ffa' needs a Hopper GPU.* use 'reference'"):
        index_sparse_attention(*tensors(64), indices, impl="ffa")
    monkeypatch.setattr(support, "_is_hopper", lambda _device: True)
    with pytest.raises(ValueError, match=r"^q: .* use 'reference'"):
        index_sparse_attention(*tensors(64, torch.float32), indices, impl="ffa")


@pytest.mark.usefixtures("launched")
def test_gradients_of_single_keys_are_stored_where_sums_exceed_the_cache_and_few_lists_name_a_key():
    """As measured on one H200 with 132 SMs, head dim 128."""

    def stores(keys, width):
        return key_sums.storing_pays(torch.device("meta"), 8192, keys, 2 * 128, width)

    k = 1024
    assert all(stores(*case) for case in ((64 * k, 512), (128 * k, 512), (512 * k, 512), (512 * k, 2048)))
    assert not any(stores(*case) for case in ((32 * k, 512), (64 * k, 2048), (128 * k, 2048), (128 * k, 16 * k)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_queries_give_to_keys_is_stored_a_part_at_a_time(launched, monkeypatch, deterministic):
    """300 keys of 2 heads: sums have 614 KB, twice as much is stored at a time: 9 queries of 2 heads and 128 places."""
    for name, value in (("LEAST_STORED_SUM_BYTES", 0), ("MOST_STORED_ADDITIONS", 1000), ("GIVEN_BYTES", 0)):
        monkeypatch.setattr(tuning, name, value)
    inputs = tensors(128)
    asked, empty = [], torch.empty

    def note(*size, **options):
        found = empty(*size, **options)
        asked.append(found.nbytes)
        return found

    out, _ = index_sparse_attention(*inputs, torch.zeros(100, 2, 70, dtype=torch.int32), impl="ffa",
                                    deterministic=deterministic)  # fmt: skip
    launched.clear()
    monkeypatch.setattr(torch, "empty", note)
    out.sum().backward()
    of_part = [*([] if deterministic else ["sparse_places"] * 2), "sparse_backward", "sparse_sums"]
    assert [name for name in launched if name != "row_delta"] == of_part * 12  # 100 queries
    assert max(asked) == 9 * 2 * 128 * 2 * 128 * 2 <= 2 * 8 * inputs[1].numel()
    last = launched.params["sparse_sums"]
    assert (last.reads_sums, last.writes_sums, last.packs, last.list_heads) == (1, 0, 1, 2)
    assert last.pack_places == 128 and launched.params["sparse_backward"].list_places == 128


def test_places_that_are_sorted_name_each_key_where_lists_do():
    entries = torch.randint(-3, 13, (2, 7, 70), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    starts, places = key_sums.sorted_places(entries[:, 1:], 10, key_sums.Form(2, 128, 6))
    assert starts.dtype == places.dtype == torch.int32 and starts.shape == (21,)
    for head in range(2):
        for key in range(10):
            row, number = (entries[head, 1:] == key).nonzero().T
            first, past = starts[10 * head + key : 10 * head + key + 2].tolist()
            assert places[first:past].tolist() == (128 * row + number).tolist()


@pytest.mark.usefixtures("launched")
def test_more_entries_than_32_bits_count_are_refused():
    many = torch.zeros(1, dtype=torch.int32).expand(2**31)
    with pytest.raises(ValueError, match=r"blocks: .*2147483648"):
        sparse_lists.lists_of(SparsePattern((torch.zeros(1, 5, dtype=torch.int32), many), 1, 64, False))
    many = sparse_lists.Lists(many[: 2**30].expand(1, 2, -1))
    with pytest.raises(ValueError, match=r"blocks: .*2147483648"):
        sparse_lists.lists_of_queries(SparsePattern((many.entries,), 1, 64, False), many, 2, 64)


def test_numbers_that_32_bits_do_not_hold_stay_out_of_range():
    entries = torch.tensor([[[3, -1, 2**32 + 1, 2**31, -(2**40)]]])
    found = sparse_lists.lists_of(SparsePattern((entries,), 16, 64, False)).entries
    assert found.dtype == torch.int32 and found.flatten().tolist() == [3, -1, 2**31 - 1, 2**31 - 1, -1]


@pytest.mark.parametrize(("k_block", "deterministic"), [(64, False), (128, True), (128, False), (1, False)])
def test_what_kernels_are_given_is_as_large_whatever_dtype_torch_gives_by_default(
    launched, monkeypatch, k_block, deterministic
):
    monkeypatch.setattr(tuning, "SPARSE_PART_BYTES", 100 * 4 * 128)
    lists = torch.zeros(100, 3, dtype=torch.int32)
    sizes, empty = [], torch.empty

    def keep(*args, **given):
        made = empty(*args, **given)
        sizes[-1].append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", keep)
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            sizes.append([])
            if k_block == 1:
                out, _ = index_sparse_attention(*tensors(128), lists[:, None].long(), impl="ffa")
            else:
                out, _ = block_sparse_attention(
                    *tensors(128), lists, q_block_size=1, k_block_size=k_block, impl="ffa", deterministic=deterministic
                )
            out.sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(sizes[0]) > 2 and sizes[0] == sizes[1]


def test_captured_calls_have_counters_of_their_own(launched, monkeypatch):
    """Graphs that were captured on one stream may be replayed at the same time."""
    inputs, given = tensors(128), torch.zeros(7, 3, dtype=torch.int32)
    addresses, kept = [], []

    def step() -> None:
        out, _ = block_sparse_attention(*inputs, given, q_block_size=16, k_block_size=64, impl="ffa")
        out.sum().backward()
        known = [launch.params for _, launch in hopper_launch._launches.items()]
        owners = [getattr(params, "tiles", params) for params in known]
        addresses.append({owner.counter for owner in owners if hasattr(owner, "counter")})

    step()
    step()
    shared = support.work_counter(inputs[0].device, 0).data_ptr()
    assert addresses == [{shared}] * 2
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: kept.append(zeros(*size, **options)) or kept[-1])
    monkeypatch.setattr(support, "is_capturing", lambda _device: True)
    step()
    assert shared not in addresses[-1] and addresses[-1] <= {t.data_ptr() for t in kept}
    assert len(addresses[-1]) == 4, "forward, turned lists, dq, and dk with dv"
