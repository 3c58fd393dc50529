"""A mesh stands for its group wherever a group is taken."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from megatron_magi import api, index_sparse_attention, slice_attention
from megatron_magi.attention import distributed_attention
from megatron_magi.comm import dispatch as rows
from megatron_magi.comm import roll as rolls
from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.group_collective import group_cast, group_reduce
from megatron_magi.comm.groups import group_of
from megatron_magi.config import MagiConfig
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan

pytestmark = pytest.mark.ranks(2)
TOTAL = 40


def of_keys(where):
    """What the public functions give on a group or a mesh."""
    key = api.magi_attn_varlen_key([0, 13, TOTAL], [0, 13, TOTAL], causal=True, cp_group_or_mesh=where)
    assert api.get_most_recent_key(where) == key
    x = torch.arange(TOTAL * 16.0).sin().view(TOTAL, 2, 8)
    q = api.dispatch(x, key)
    out = api.calc_attn(q, q, q, key)[0]
    result = api.undispatch(out, key), api.roll(q, 1, 0, key)
    api.clear_cache(where)
    with pytest.raises(ValueError, match="cp_group"):
        api.get_most_recent_key(where)
    return result


def of_plans(where, rank, num_ranks):
    """Likewise of the functions that take a plan or tables."""
    plan = make_plan(builders.causal(TOTAL), MagiConfig(), num_ranks)
    shards = [plan.dispatch.global_index(r) for r in range(num_ranks)]
    cpu = torch.device("cpu")
    args = rows.UndispatchArgs.build(shards, TOTAL, rank, cpu)
    x = torch.arange(TOTAL * 16.0).cos().view(TOTAL, 2, 8).requires_grad_()
    local = rows.dispatch_replicated(x, args, where)
    out, _ = distributed_attention(local, local, local, plan.for_rank(rank), where)
    whole = rows.undispatch(out, args, where)
    rolled = rolls.roll(out, rolls.RollArgs.build(rolls.make_roll_args(shards, 1, TOTAL, rank), cpu), where)
    (gradient,) = torch.autograd.grad(whole.sum() + rolled.sum(), x)
    # Rank 0 sends its first row to rank 1, which sends nothing.
    sends, receives = ([0], [0, 1]) if rank == 0 else ([], [0, 0]), [0, 0] if rank == 0 else [1, 0]
    cast = GroupCastArgs.build(*sends, receives, None, cpu)
    received = group_cast([local.detach()], cast, where).wait()[0]
    returned = group_reduce([received], cast, where, into=[torch.zeros_like(local)]).wait()[0]
    return whole.detach(), rolled.detach(), gradient, received, returned


def on_ranks(rank, num_ranks):
    line = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
    square = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("dp", "cp"))
    world = dist.group.WORLD
    assert group_of(line) is group_of(line["cp"]) and group_of(square["cp"]).size() == num_ranks
    expected = *of_keys(world), *of_plans(world, rank, num_ranks)
    for mesh in (line, square, square["cp"]):
        for got, want in zip((*of_keys(mesh), *of_plans(mesh, rank, num_ranks)), expected, strict=True):
            assert torch.equal(got, want)
    cube = init_device_mesh("cpu", (1, 1, num_ranks), mesh_dim_names=("pp", "dp", "cp"))
    without_names = init_device_mesh("cpu", (1, num_ranks))
    messages = []
    for wrong in (cube, without_names, "cp", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ValueError) as error:
            group_of(wrong, "cp_group_or_mesh")
        messages.append(str(error.value))
    return messages


def test_a_mesh_is_its_group_everywhere(ranks):
    for messages in ranks(2, on_ranks):
        expected = ("one or two dimensions", "mesh_dim_names", "got str", "this rank is not in the group")
        for message, said in zip(messages, expected, strict=True):
            assert message.startswith("cp_group_or_mesh: ")
            assert said in message


def distributed_tensors(rank, num_ranks):
    x = distribute_tensor(torch.zeros(TOTAL, 2, 8), init_device_mesh("cpu", (num_ranks,)), [Replicate()])
    key, plain = api.magi_attn_varlen_key([0, TOTAL], [0, TOTAL]), x.to_local()
    calls = {
        "x": [lambda: api.dispatch(x, key), lambda: api.undispatch(x, key), lambda: api.roll(x, 1, 0, key)],
        "q": [
            lambda: api.calc_attn(x, x, x, key),
            lambda: slice_attention(x, x, x, builders.causal(TOTAL)),
            lambda: api.flex_flash_attn_func(x, x, x),
            lambda: index_sparse_attention(x, x, x, torch.zeros(TOTAL, 1, 1, dtype=torch.int64)),
        ],
        "v": [lambda: api.calc_attn(plain, plain, x, key)],
        "sink": [lambda: api.calc_attn(plain, plain, plain, key, sink=x[0])],
    }
    for name, wrong in calls.items():
        for call in wrong:
            with pytest.raises(ValueError, match=rf"^{name}: .* got a DTensor; give {name}\.to_local"):
                call()


def test_distributed_tensors_are_refused_by_name(ranks):
    """torch would say that an operator got mixed tensors, of which the caller knows neither."""
    ranks(2, distributed_tensors)
