"""What the public functions refuse, and what they take in more than one form."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_magi import api
from megatron_magi.config import CommConfig, CostModel, MagiConfig
from megatron_magi.config import OverlapConfig as Overlap


@pytest.fixture(autouse=True)
def no_plans_left_over():
    api.clear_cache()


def flex_key(q_ranges=((0, 8),), k_ranges=((0, 8),), attn_mask_type="full", total_q=8, total_k=8, **options):
    return api.magi_attn_flex_key(q_ranges, k_ranges, attn_mask_type, total_q, total_k, **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: flex_key(None, None), r"q_ranges: expected pairs \(start, end\), got None"),
        (lambda: flex_key(k_ranges=None), "k_ranges: expected pairs"),
        (lambda: flex_key([[0, 4, 8]]), r"q_ranges\[0\]: expected \(start, end\)"),
        (lambda: flex_key([0, 8]), r"q_ranges\[0\]: expected 1 dimension"),
        (lambda: flex_key(torch.tensor([0, 8])), "q_ranges: expected 2 dimension"),
        (lambda: flex_key(k_ranges=[[0, 7.5]]), r"k_ranges\[0\]: expected integers"),
        (lambda: flex_key(attn_mask_type=None), "attn_mask_type: expected a type"),
        (lambda: flex_key(attn_mask_type=[[1]]), "attn_mask_type: expected one of full"),
        (lambda: flex_key(attn_mask_type=1.5), "attn_mask_type"),
        (lambda: flex_key(attn_mask_type=torch.tensor([1.5])), "attn_mask_type: expected integers"),
        (lambda: flex_key(total_q=8.5), "total_seqlen_q: expected an integer"),
        (lambda: flex_key(pad_size=2.5), "pad_size: expected an integer, got 2.5"),
        (lambda: flex_key(num_heads_q=0), "num_heads_q: expected at least 1"),
        (lambda: flex_key(head_dim=2.5), "head_dim: expected an integer"),
        (lambda: api.magi_attn_varlen_key([0, 8], [0, 8], window_size=4), "window_size"),
        (lambda: api.magi_attn_varlen_key([0, 8], [0, 8], window_size=(2.5, 0)), "window_size: expected integers"),
        (lambda: api.magi_attn_varlen_key([0, 8], [0, 8], window_size=None), "window_size"),
        (lambda: api.magi_attn_varlen_key([0, 8], [0, 8], causal=True, window_size=(4, 0)), "leave out causal"),
        (lambda: api.infer_attn_mask_from_sliding_window([0, 8], None, (1, 1)), "k_range"),
        (lambda: api.compute_pad_size(8, 2, 2.5), "chunk_size: expected an integer"),
        (lambda: api.compute_pad_size(torch.zeros(8, 4), 2, 1), r"total_seqlen_q: .* got a Tensor of shape \[8, 4\]$"),
        (lambda: api.roll(torch.zeros(8, 2), 1, 3, flex_key()), "dim: 3 is not a dimension"),
        (lambda: api.roll(torch.zeros(8, 2), 1, -3, flex_key()), "dim: -3 is not a dimension"),
        (lambda: api.roll(torch.zeros(8, 2), 1.5, 0, flex_key()), "shift: expected an integer"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_mask_types_and_windows_may_be_tensors_and_arrays():
    causal = flex_key(attn_mask_type="causal")
    for same in (torch.tensor([1]), np.array([1]), torch.tensor(1), np.int64(1), (1,), ["causal"]):
        assert flex_key(attn_mask_type=same) == causal
    window = api.magi_attn_varlen_key([0, 8], [0, 8], window_size=(2, 0))
    assert api.magi_attn_varlen_key([0, 8], [0, 8], window_size=torch.tensor([2, 0])) == window


def test_editing_position_ids_does_not_change_later_dispatches():
    key, x = flex_key(), torch.arange(8.0)
    expected = api.dispatch(x, key)
    api.get_position_ids(key).zero_()
    assert torch.equal(api.dispatch(x, key), expected)
    assert api.get_position_ids(key).tolist() == list(range(8))


def test_no_configuration_is_the_default_one_of_every_kind(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE", "1")
    keys = [
        api.magi_attn_varlen_key([0, 64], [0, 64], 4, 2, 32, chunk_size=8, dist_attn_config=config)
        for config in (None, api.DistAttnConfig())
    ]
    assert keys[0] == keys[1] and keys[0].config.overlap.hide_tail_reduce
    assert keys[0].dist_attn_config == api.DistAttnConfig(api.DispatchConfig(chunk_size=8))


def test_a_new_mask_is_planned_for_the_heads_it_is_given():
    def new_cost(key, **shape):
        new = api.make_flex_key_for_new_mask_after_dispatch([[0, 8]], [[0, 8]], "full", key, **shape)
        return new.config.overlap.cost

    key = flex_key(num_heads_q=32, num_heads_kv=8, head_dim=64)
    assert new_cost(key) == key.config.overlap.cost
    cost = new_cost(key, num_heads_q=16, head_dim=256)
    assert (cost.num_heads_q, cost.num_heads_kv, cost.head_dim) == (16, 8, 256)
    ours = MagiConfig(overlap=Overlap(cost=CostModel(num_heads_q=16)))
    assert new_cost(flex_key(dist_attn_config=ours), num_heads_kv=2).num_heads_q == 16


def key_of_an_unnamed_mesh(rank, num_ranks):
    mesh = init_device_mesh("cpu", (1, num_ranks))
    with pytest.raises(ValueError, match=r"cp_group_or_mesh: .* mesh_dim_names"):
        flex_key(cp_group_or_mesh=mesh)
    named = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("nodes", "ranks"))
    variable = "MAGI_ATTENTION_HIERARCHICAL_COMM"
    assert flex_key(cp_group_or_mesh=named).config.comm.ranks_per_node == num_ranks
    assert flex_key(cp_group_or_mesh=dist.group.WORLD).config.comm.ranks_per_node is None
    ours = MagiConfig(comm=CommConfig(ranks_per_node=1))
    key = flex_key(cp_group_or_mesh=named, dist_attn_config=ours)
    new = api.make_flex_key_for_new_mask_after_dispatch([[0, 8]], [[0, 8]], "full", key, dist_attn_config=MagiConfig())
    assert key.config.comm.ranks_per_node == new.config.comm.ranks_per_node == 1
    os.environ[variable] = "0"
    assert flex_key(cp_group_or_mesh=named).config.comm.ranks_per_node is None
    os.environ[variable] = "1"
    assert flex_key(cp_group_or_mesh=named).config.comm.ranks_per_node == num_ranks
    with pytest.raises(ValueError, match=f"{variable}: needs cp_group_or_mesh of two dimensions"):
        flex_key(cp_group_or_mesh=dist.group.WORLD)
    assert flex_key().config.comm.ranks_per_node is None  # one rank
    falling = DeviceMesh("cpu", torch.tensor([[1, 0]]), mesh_dim_names=("nodes", "ranks"))
    with pytest.raises(ValueError, match=f"{variable}: needs"):
        flex_key(cp_group_or_mesh=falling)
    return True


def test_a_mesh_of_two_dimensions_needs_names_and_tells_nodes_unless_the_environment_says_otherwise(ranks):
    assert ranks(2, key_of_an_unnamed_mesh) == [True, True]


@pytest.mark.parametrize(
    "deprecated",
    [
        lambda x: api.magi_attn_flex_dispatch(x, [[0, 8]], [[0, 8]], "full", 8, 8),
        lambda x: api.magi_attn_varlen_dispatch(x, [0, 8], [0, 8]),
    ],
)
def test_a_deprecation_is_reported_in_the_code_that_calls_so_that_python_shows_it(deprecated):
    with pytest.warns(DeprecationWarning, match="and dispatch$") as found:
        deprecated(torch.zeros(8))
    assert [warning.filename for warning in found] == [__file__]
