"""The distributed operator against dense attention, through the whole path, on gloo."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_magi.attention import distributed_attention
from megatron_magi.attention.collective_args import plan_casts
from megatron_magi.config import AttendConfig, CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.operands.options import AttnOptions
from megatron_magi.ops.slice_passes import resolve_impl
from megatron_magi.plan import Plan, make_plan
from megatron_magi.runtime.upload import current_device
from megatron_magi.testing import shared_gpus
from megatron_magi.testing.error_budget import assert_within_budget
from tests import forced
from tests.attention import cases as cs
from tests.backends.sm90.cases import Inputs, assert_as_good, plain_attention


def run_case(case: cs.Case, cp_rank: int, plan: Plan, device: str = "cpu") -> dict[str, torch.Tensor]:
    """This rank's part of forward and backward, on the CPU again; padding rows hold NaN, or what the kernels allow."""
    x = cs.inputs(case)
    is_torch = case.config.attend.impl not in ("ffa", "cudnn", "triton") and not forced.multiplies_hidden_pairs()
    padding = torch.nan if is_torch else 100.0
    index = torch.from_numpy(plan.dispatch.global_index(cp_rank))
    real = index < case.mask.total_seqlen_q
    local: dict[str, torch.Tensor] = {}
    for name, t in x.items():
        if name == "sink" and case.sink_layout == "sh":
            local[name] = t.to(device, case.dtype)
            continue
        garbage = 0.0 if name in ("dout", "sink") else padding
        rows = torch.full((len(index), *t.shape[1:]), garbage, dtype=case.dtype)
        rows[real] = t[index[real]].to(case.dtype)
        local[name] = rows.to(device)
    leaves = {name: t.requires_grad_(True) for name, t in local.items() if name != "dout"}
    out, meta = distributed_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        plan.for_rank(cp_rank),
        dist.group.WORLD,
        config=case.config,
        sink=leaves.get("sink"),
        sink_layout=case.sink_layout,
        softmax_scale=case.softmax_scale,
        softcap=case.softcap,
        return_max_logits=plan.head_groups == 1,
    )
    out.backward(local["dout"])
    found = {"out": out.detach().cpu()[real], "lse": meta.lse.cpu()[real]}
    if plan.head_groups == 1:
        found["max_logits"] = meta.max_logits.cpu()
    for name, leaf in leaves.items():
        whole = name == "sink" and case.sink_layout == "sh"
        found[f"d{name}"] = leaf.grad.cpu() if whole else leaf.grad.cpu()[real]
    found["index"] = index[real]
    return found


def run_all_cases(rank: int, num_ranks: int, todo: list[cs.Case]) -> list[dict[str, torch.Tensor]]:
    return [run_case(case, rank, make_plan(case.mask, case.config, num_ranks)) for case in todo]


def gather(case: cs.Case, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The global tensors from those of the ranks."""
    order = torch.argsort(torch.cat([p["index"] for p in parts]))
    whole: dict[str, torch.Tensor] = {}
    for name in parts[0]:
        if name == "max_logits":
            whole[name] = torch.stack([p[name] for p in parts]).amax(dim=0)
        elif name == "dsink" and case.sink_layout == "sh":
            whole[name] = torch.stack([p[name] for p in parts]).sum(dim=0)
        elif name != "index":
            whole[name] = torch.cat([p[name] for p in parts])[order]
    return whole


def dense_of(case: cs.Case) -> tuple[dict[str, torch.Tensor], ...]:
    """Dense attention on one device: in fp64, in the dtype of the case, and in fp32."""
    inputs = {name: t.to(case.dtype) for name, t in cs.inputs(case).items()}
    dtypes = (torch.float64, case.dtype, torch.float32)
    return tuple(cs.dense_attention(case, {name: t.to(dtype) for name, t in inputs.items()}) for dtype in dtypes)


def assert_case_within_budget(
    where: str, case: cs.Case, found: dict[str, torch.Tensor], dense: tuple[dict[str, torch.Tensor], ...]
) -> None:
    """Every result against that of `dense_of` in the dtype of the case, or in fp32 where results are."""
    exact, same_dtype, fp32 = dense
    for name, value in exact.items():
        reference = same_dtype if found[name].dtype == case.dtype else fp32
        assert_within_budget(f"{where} {name}", found[name], reference[name], value)


def feasible(case: cs.Case, num_ranks: int) -> bool:
    return not case.config.dispatch.uneven_shard or case.mask.total_seqlen_q >= num_ranks


def in_nodes(case: cs.Case, ranks_per_node: int) -> cs.Case:
    comm = dataclasses.replace(case.config.comm, ranks_per_node=ranks_per_node)
    return dataclasses.replace(case, config=dataclasses.replace(case.config, comm=comm))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_fp64_equals_dense_attention_to_rounding(ranks, num_ranks: int) -> None:
    todo = [c for c in cs.variants() if feasible(c, num_ranks)]
    if num_ranks == 4:
        todo += [in_nodes(c, 2) for c in todo[::3]]
    results = ranks(num_ranks, run_all_cases, todo)
    for i, case in enumerate(todo):
        found = gather(case, [r[i] for r in results])
        expected = cs.dense_attention(case, cs.inputs(case))
        for name, value in expected.items():
            where = f"case {i} {name}"
            torch.testing.assert_close(
                found[name].double(), value, rtol=cs.EXACT, atol=cs.EXACT, msg=lambda m, where=where: f"{where}: {m}"
            )


def run_all_cases_on_gpus(rank: int, num_ranks: int, todo: list[cs.Case]) -> list[dict[str, torch.Tensor]]:
    plans = [make_plan(case.mask, case.config, num_ranks) for case in todo]
    return [run_case(case, rank, plan, str(current_device())) for case, plan in zip(todo, plans, strict=True)]


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        *(("all_to_all", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
        *(pytest.param("native", dtype, marks=pytest.mark.sm90) for dtype in (torch.float64, torch.bfloat16)),
    ],
)
def test_gpus_equal_dense_attention_within_the_error_of_one_device(ranks, impl: str, dtype: torch.dtype) -> None:
    num_ranks = min(4, shared_gpus.most_ranks())
    comm = CommConfig(impl=impl)
    todo = [
        dataclasses.replace(c, dtype=dtype, config=dataclasses.replace(c.config, comm=comm))
        for c in cs.variants()
        if feasible(c, num_ranks)
    ]
    if num_ranks == 4:
        todo += [in_nodes(c, 2) for c in todo[::3]]
    results = ranks(num_ranks, run_all_cases_on_gpus, todo, backend="nccl", timeout_s=240.0)
    for i, case in enumerate(todo):
        found = gather(case, [r[i] for r in results])
        if dtype == torch.float64:
            for name, value in cs.dense_attention(case, cs.inputs(case)).items():
                torch.testing.assert_close(found[name].double(), value, rtol=1e-12, atol=1e-12)
        else:
            assert_case_within_budget(f"case {i}", case, found, dense_of(case))


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "variants",
    [
        pytest.param(cs.hopper_variants, marks=pytest.mark.sm90, id="ffa"),
        pytest.param(cs.cudnn_variants, marks=pytest.mark.cudnn, id="cudnn"),
        pytest.param(cs.triton_variants, id="triton"),
    ],
)
def test_kernels_on_several_ranks_err_at_most_twice_as_much_as_plain_torch(ranks, variants) -> None:
    num_ranks, todo = min(4, shared_gpus.most_ranks()), variants()
    results = ranks(num_ranks, run_all_cases_on_gpus, todo, backend="nccl", timeout_s=240.0)
    for i, case in enumerate(todo):
        found = gather(case, [r[i] for r in results])
        x = {name: t.to("cuda", case.dtype) for name, t in cs.inputs(case).items()}
        exact = cs.dense_attention(case, {name: t.double() for name, t in x.items()})
        options = AttnOptions(case.scale, case.softcap)
        plain = plain_attention(Inputs(x["q"], x["k"], x["v"], x["dout"], case.mask.bands, options), x.get("sink"))
        for name, value in zip(("out", "dq", "dk", "dv", "dsink"), plain, strict=False):
            assert_as_good(f"case {i} {name}", found[name].to("cuda"), value, exact[name])
        for name in ("lse", "max_logits"):
            torch.testing.assert_close(found[name].double(), exact[name].cpu(), atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.sm90
@forced.free_choice
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_hopper_gpu_its_kernels_are_the_default(dtype) -> None:
    for case in cs.hopper_variants():
        q = torch.empty(1, case.num_heads_q, case.head_dim, device="cuda", dtype=dtype)
        v = torch.empty(1, case.num_heads_kv, case.head_dim_v, device="cuda", dtype=dtype)
        assert resolve_impl("auto", q, v) is resolve_impl("ffa", q, v)
        assert resolve_impl("auto", q.float(), v.float()).name == "triton"


def test_low_precision_error_is_at_most_twice_that_of_one_device(ranks) -> None:
    """bf16 over three ranks, against the same-dtype dense computation on one."""
    case = cs.Case(cs.documents([70, 40, 18]), MagiConfig(overlap=OverlapConfig(degree=2)), dtype=torch.bfloat16)
    found = gather(case, [r[0] for r in ranks(3, run_all_cases, [case])])
    assert_case_within_budget("bf16", case, found, dense_of(case))


def run_twice(rank: int, num_ranks: int, case: cs.Case) -> list[dict[str, torch.Tensor]]:
    plan = make_plan(case.mask, case.config, num_ranks)
    return [run_case(case, rank, plan) for _ in range(2)]


def test_results_are_bitwise_repeatable(ranks) -> None:
    config = MagiConfig(overlap=OverlapConfig(degree=3))
    case = cs.Case(cs.documents([70, 40, 18]), config, dtype=torch.float32, num_sinks=1)
    for first, second in ranks(3, run_twice, case):
        for name in first:
            assert torch.equal(first[name], second[name]), name


def reduced_sink_grads(rank: int, num_ranks: int, case: cs.Case) -> list[torch.Tensor]:
    out = []
    for op in ("none", "sum", "avg"):
        config = dataclasses.replace(case.config, comm=CommConfig(dsink_all_reduce=op))
        this = dataclasses.replace(case, config=config)
        out.append(run_case(this, rank, make_plan(case.mask, config, num_ranks))["dsink"])
    return out


def test_sink_gradient_reduction_follows_the_configuration(ranks) -> None:
    case = cs.Case(cs.documents([30, 11]), num_sinks=1)
    results = ranks(2, reduced_sink_grads, case)
    total = results[0][0] + results[1][0]
    for partial, summed, averaged in results:
        assert not torch.allclose(partial, total)
        torch.testing.assert_close(summed, total)
        torch.testing.assert_close(averaged, total / 2)


def sink_gradient_of_stages(rank: int, num_ranks: int, case: cs.Case) -> torch.Tensor:
    """Over all ranks, of a sink in fp32 and other inputs in the case's dtype."""
    plan, x = make_plan(case.mask, case.config, num_ranks), cs.inputs(case)
    index = plan.dispatch.global_index(rank)
    rows = torch.from_numpy(index[index < case.mask.total_seqlen_q])
    padding = len(index) - len(rows)
    q, k, v, dout = (F.pad(x[n][rows], (0, 0, 0, 0, 0, padding)).to(case.dtype) for n in ("q", "k", "v", "dout"))
    sink = x["sink"].float().requires_grad_()
    out, _ = distributed_attention(
        q, k, v, plan.for_rank(rank), dist.group.WORLD, config=case.config, sink=sink, softmax_scale=case.scale
    )
    return torch.autograd.grad(out, sink, dout)[0]


def test_the_gradient_of_a_sink_knows_the_output_before_it_was_rounded_where_stages_are_merged(ranks) -> None:
    config = dataclasses.replace(cs._config(2), comm=CommConfig(dsink_all_reduce="sum"))
    case = cs.Case(cs.documents([500, 240]), config, head_dim=64, head_dim_v=64, dtype=torch.bfloat16, num_sinks=1)
    found, _ = ranks(2, sink_gradient_of_stages, case)
    x = cs.inputs(case)
    x = {name: t.float().double() if name == "sink" else t.to(torch.bfloat16).double() for name, t in x.items()}
    expected = cs.dense_attention(case, x)["dsink"]
    # From the rounded output it is off by 1e-3.
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def moved_bytes(rank: int, num_ranks: int, case: cs.Case) -> tuple[int, int]:
    """Bytes that the fetches of one forward pass sent and received, read off the handles."""
    import megatron_magi.attention.distributed as module

    handles = []
    original = module.group_cast

    def recording(*args, **kwargs):
        handles.append(original(*args, **kwargs))
        return handles[-1]

    module.group_cast = recording
    try:
        plan = make_plan(case.mask, case.config, num_ranks)
        x = cs.inputs(case)
        index = torch.from_numpy(plan.dispatch.global_index(rank))
        q, k, v = (x[n][index] for n in ("q", "k", "v"))
        with torch.no_grad():
            distributed_attention(q, k, v, plan.for_rank(rank), dist.group.WORLD, config=case.config)
    finally:
        module.group_cast = original
    return sum(h.sent_bytes for h in handles), sum(h.received_bytes for h in handles)


def test_bytes_on_the_wire_equal_the_lower_bound(ranks) -> None:
    case = cs.Case(cs.documents([48, 13, 35]), MagiConfig(overlap=OverlapConfig(degree=2)))
    moved = ranks(4, moved_bytes, case)
    stats = make_plan(case.mask, case.config, 4).stats()
    row_bytes = case.num_heads_kv * (case.head_dim + case.head_dim_v) * 8
    assert [received for _, received in moved] == [n * row_bytes for n in stats.lower_bound_rows]
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved) > 0


def reduce_precision(rank: int, num_ranks: int, case: cs.Case) -> list[tuple[float, int]]:
    """Error of dk and bytes sent by the reductions, with and without high precision."""
    import megatron_magi.attention.distributed as module

    original, found = module.group_reduce, []
    exact = cs.dense_attention(case, {n: t.to(case.dtype).double() for n, t in cs.inputs(case).items()})
    for high in (False, True):
        handles = []

        def recording(*args, handles=handles, **kwargs):
            handles.append(original(*args, **kwargs))
            return handles[-1]

        config = dataclasses.replace(case.config, comm=CommConfig(backward_high_precision_reduce=high))
        module.group_reduce = recording
        try:
            plan = make_plan(case.mask, config, num_ranks)
            part = run_case(dataclasses.replace(case, config=config), rank, plan)
        finally:
            module.group_reduce = original
        error = (part["dk"].double() - exact["dk"][part["index"]]).square().mean().sqrt()
        found.append((float(error), sum(h.sent_bytes for h in handles)))
    return found


def test_high_precision_reduction_sends_twice_the_bytes_and_rounds_less(ranks) -> None:
    config = MagiConfig(dispatch=DispatchConfig(algorithm="min_heap"), overlap=OverlapConfig(degree=2))
    case = cs.Case(cs.documents([256]), config, dtype=torch.bfloat16)
    results = ranks(4, reduce_precision, case)
    low, high = (sum(r[i][0] for r in results) for i in (0, 1))
    assert high < low
    assert all(r[1][1] == 2 * r[0][1] > 0 for r in results)


def two_in_flight(rank: int, num_ranks: int, first: cs.Case, second: cs.Case) -> bool:
    """Backward of an older microbatch, after the forward of a newer one with another plan."""
    outs, leaves = [], []
    for case in (first, second):
        plan = make_plan(case.mask, case.config, num_ranks)
        x = cs.inputs(case)
        index = torch.from_numpy(plan.dispatch.global_index(rank))
        q, k, v = (x[n][index].requires_grad_(True) for n in ("q", "k", "v"))
        out, _ = distributed_attention(q, k, v, plan.for_rank(rank), dist.group.WORLD, config=case.config)
        outs.append((out, x["dout"][index]))
        leaves.append((q, k, v))
    for out, dout in outs:
        out.backward(dout)
    alone = run_case(first, rank, make_plan(first.mask, first.config, num_ranks))
    return all(torch.equal(leaf.grad, alone[name]) for leaf, name in zip(leaves[0], ("dq", "dk", "dv"), strict=True))


def test_backward_uses_its_own_plan_while_a_newer_microbatch_is_in_flight(ranks) -> None:
    first, second = cs.Case(cs.documents([40, 24])), cs.Case(cs.documents([10, 54]), seed=1)
    assert all(ranks(2, two_in_flight, first, second))


@forced.on_device_of_backend
def test_device_copies_live_and_die_with_their_plan() -> None:
    plan = make_plan(cs.documents([8]), cp_size=1)
    x = torch.zeros(8, 2, 8)
    distributed_attention(x, x, x, plan.for_rank(0), None)
    runtime = plan.for_rank(0).runtime
    assert len(runtime.calls) == 1 and set(runtime.casts) == {x.device}
    assert np.array_equal(plan.for_rank(0).bands[0], plan.mask.bands)


@contextmanager
def no_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_device_copies_are_freed_with_their_plan_without_a_garbage_collection() -> None:
    plan = make_plan(cs.documents([64]), cp_size=2).for_rank(0)
    casts = plan_casts(plan, torch.device("cpu"))
    alive = weakref.ref(casts[0].send_index)
    with no_garbage_collection():
        del plan, casts
        assert alive() is None


@forced.on_device_of_backend
def test_a_call_is_prepared_once_for_tensors_that_lie_alike(monkeypatch) -> None:
    import megatron_magi.attention.distributed as module

    made = []
    make = module._make_call
    monkeypatch.setattr(module, "_make_call", lambda *args: made.append(args) or make(*args))
    plan, config = make_plan(cs.documents([8])).for_rank(0), MagiConfig()
    x = torch.randn(8, 2, 8)

    def run(*qkv: torch.Tensor, **options) -> int:
        made.clear()
        out, _ = distributed_attention(*qkv, plan, None, **{"config": config, **options})
        expected, _ = distributed_attention(*qkv, make_plan(cs.documents([8])).for_rank(0), None, **options)
        assert torch.equal(out, expected)
        return len(made) - 1

    wide, other = torch.randn(8, 4, 8)[:, ::2], MagiConfig(attend=AttendConfig(impl="reference"))
    sink = torch.zeros(1, 2)
    kinds = [((x, x, x), {}), ((wide, x, x), {}), ((x, x, x), {"softcap": 2}), ((x.double(),) * 3, {})]
    kinds += [((x, x, x), {"config": other}), ((x, x, x), {"sink": sink}), ((x, x, x.clone().requires_grad_()), {})]
    kinds += [((x, x, wide), {}), ((x, x, x), {"sink": sink.clone().requires_grad_()})]
    kinds += [((x.clone().requires_grad_(), x, x), {}), ((x, x.clone().requires_grad_(), x), {})]
    assert [run(*qkv, **options) for qkv, options in kinds] == [1] * len(kinds)
    assert [
        run(*(t.clone() if t.is_contiguous() and not t.requires_grad else t for t in qkv), **options)
        for qkv, options in kinds
    ] == [0] * len(kinds)
    for _ in range(2):  # no number that could be told from others without reading it
        assert run(x, x, x, softmax_scale=torch.tensor(0.5)) == 1
    monkeypatch.setattr(module, "_MOST_CALLS", 3)
    last = list(plan.runtime.calls)[-2:]
    assert run(x, x, x, softcap=3.0) == 1 and list(plan.runtime.calls)[:-1] == last, "the first ones went"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [run(x, x, x, softcap=3.0) for _ in range(2)] == [1, 0]


@forced.on_device_of_backend
def test_a_plan_with_its_calls_is_freed_without_a_garbage_collection() -> None:
    plan = make_plan(cs.documents([64])).for_rank(0)
    x = torch.randn(64, 2, 8, requires_grad=True)
    out = distributed_attention(x, x, x, plan, None)[0]
    out.sum().backward()
    alive = weakref.ref(plan)
    with no_garbage_collection():
        del plan, out
        assert alive() is None


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(forced.DEVICE, forced.DTYPE, id="any"),
        pytest.param("cuda", torch.bfloat16, marks=[pytest.mark.gpu, pytest.mark.sm90, forced.for_hopper], id="Hopper"),
    ],
)
def test_padding_that_is_finite_stays_finite_and_gets_no_gradient(device, dtype) -> None:
    """On a Hopper GPU by its kernels, which read hidden keys: finite ones leave no trace."""
    mask = cs.documents([90, 40, 70])
    plan = make_plan(mask, MagiConfig(dispatch=DispatchConfig(alignment=128)), 1)
    index = torch.from_numpy(plan.dispatch.global_index(0))
    real = index < 200
    assert not real.all()
    gen = torch.Generator().manual_seed(0)

    def run(padding: float) -> list[torch.Tensor]:
        gen.manual_seed(0)
        leaves = []
        for heads in (4, 2, 2):
            rows = torch.randn(len(index), heads, 64, generator=gen, dtype=torch.float64)
            rows[~real] = padding
            leaves.append(rows.to(device, dtype).requires_grad_())
        out, meta = distributed_attention(*leaves, plan.for_rank(0), None)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        return [t.detach().cpu() for t in (out, meta.lse, *grads)]

    results = run(0.0)
    for t in (results[0], *results[2:]):
        assert (t[~real] == 0).all() and t.isfinite().all()
    assert (results[1][~real] == -torch.inf).all()
    for a, b in zip(results, run(1000.0), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if device == "cpu" else 1e-2)


def spied_backward(rank: int, num_ranks: int, case: cs.Case) -> list[tuple[str, ...]]:
    """For each pass of a backward: which gradients it adds to."""
    import megatron_magi.attention.distributed as module

    passes, original = [], module.backward_pass

    def recording(inputs, bands, options, impl, given, *rest, **hints):
        named = zip(("dq", "dk", "dv"), given, strict=True)
        passes.append(tuple(name for name, grad in named if grad is not None))
        return original(inputs, bands, options, impl, given, *rest, **hints)

    module.backward_pass = recording
    try:
        run_case(case, rank, make_plan(case.mask, case.config, num_ranks))
    finally:
        module.backward_pass = original
    return passes


def test_gradients_are_added_to_only_where_there_is_something_to_add_to(ranks) -> None:
    config = MagiConfig(dispatch=DispatchConfig(algorithm="min_heap"), overlap=OverlapConfig(degree=2))
    (alone,) = ranks(1, spied_backward, cs.Case(cs.documents([64]), config))
    assert alone == [()]
    case = cs.Case(cs.documents([256]), config)
    assert ranks(2, spied_backward, case) == [[(), ("dq",), ("dq",)]] * 2
    hidden = dataclasses.replace(config, overlap=OverlapConfig(degree=2, hide_tail_reduce=True))
    last = ranks(2, spied_backward, dataclasses.replace(case, config=hidden))
    assert last == [[("dq",), ("dq",), ("dq", "dk", "dv")]] * 2


@forced.on_device_of_backend
def test_compiled_models_may_call_the_operator() -> None:
    plan = make_plan(cs.documents([8]), cp_size=1).for_rank(0)
    x = torch.randn(8, 2, 8)

    def model(y: torch.Tensor) -> torch.Tensor:
        return distributed_attention(y * 2, y, y, plan, None)[0] + 1

    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


class NoGradient(torch.autograd.Function):
    """What it is given gets no gradient, not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def unused_output(rank: int, num_ranks: int, case: cs.Case, has_zeros: bool) -> torch.Tensor:
    """On rank 0 the loss does not depend on the output, but its keys are used by rank 1."""
    plan = make_plan(case.mask, case.config, num_ranks)
    x = cs.inputs(case)
    index = torch.from_numpy(plan.dispatch.global_index(rank))
    q, k, v = (x[n][index].requires_grad_(True) for n in ("q", "k", "v"))
    out, _ = distributed_attention(q, k, v, plan.for_rank(rank), dist.group.WORLD, config=case.config)
    if rank == 0:
        out = out * 0.0 if has_zeros else NoGradient.apply(out)
    out.sum().backward()
    return k.grad.abs().sum()


@pytest.mark.parametrize("has_zeros", [True, False])
def test_keys_of_a_rank_without_loss_still_get_their_gradients(ranks, has_zeros) -> None:
    case = cs.Case(cs.documents([64]))
    assert all(float(g) > 0 for g in ranks(2, unused_output, case, has_zeros))


@forced.on_device_of_backend
@pytest.mark.parametrize(
    ("options", "name"), [({"softmax_scale": 0.0}, "softmax_scale"), ({"softcap": -1.0}, "softcap")]
)
def test_bad_options_are_refused_before_anything_is_sent(options, name) -> None:
    plan = make_plan(cs.documents([8]), cp_size=1).for_rank(0)
    x = torch.zeros(8, 2, 8)
    with pytest.raises(ValueError, match=rf"^{name}:"):
        distributed_attention(x, x, x, plan, None, **options)


@forced.on_device_of_backend
def test_templates_that_were_used_longest_ago_go_first(monkeypatch) -> None:
    import megatron_magi.attention.distributed as module

    monkeypatch.setattr(module, "_MOST_CALLS", 2)
    shared, config, x = {}, MagiConfig(), torch.randn(8, 2, 8)

    def run(softcap: float) -> None:
        plan = make_plan(cs.documents([8])).for_rank(0)
        plan.runtime.templates = shared
        distributed_attention(x, x, x, plan, None, config=config, softcap=softcap)

    for softcap in (1.0, 2.0):
        run(softcap)
    first, second = shared.values()
    run(1.0)
    assert list(shared.values()) == [second, first]
    run(3.0)
    assert next(iter(shared.values())) is first and len(shared) == 2
