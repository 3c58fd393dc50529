"""A backend that the package does not have serves distributed attention, prepared batches and loader workers."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import megatron_magi
from megatron_magi import config
from megatron_magi.attention import AttnShape, StaticPlans, distributed_attention, prepare_batch
from megatron_magi.backends import registry
from megatron_magi.config import AttendConfig, CommConfig, MagiConfig, OverlapConfig
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.plan import make_plan
from tests.attention import cases as cs
from tests.attention.test_distributed import feasible, gather, run_case
from tests.backends import slices_backend

SHAPE = AttnShape(4, 2, 8, 8, torch.float64)
MASKS = [cs.documents([20, 3, 31]), cs.window(50, 7), cs.random_mask(40, 4, 1)]


def of_slices(case: cs.Case) -> cs.Case:
    return replace(case, config=replace(case.config, attend=AttendConfig(impl=slices_backend.NAME)))


def run_cases(rank, num_ranks, todo):
    slices_backend.add()
    cases = [of_slices(case) for case in todo]
    return [run_case(case, rank, make_plan(case.mask, case.config, num_ranks)) for case in cases]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_distributed_attention_over_stages_equals_dense_attention(ranks, num_ranks) -> None:
    todo = [case for case in cs.variants() if feasible(case, num_ranks)]
    results = ranks(num_ranks, run_cases, todo)
    for i, case in enumerate(todo):
        found = gather(case, [r[i] for r in results])
        for name, value in cs.dense_attention(case, cs.inputs(case)).items():
            where = f"case {i} {name}"
            torch.testing.assert_close(
                found[name].double(), value, rtol=1e-10, atol=1e-10, msg=lambda m, where=where: f"{where}: {m}"
            )


class Batches(Dataset):
    """Prepared batches of this rank, made where they are asked for."""

    def __init__(self, rank, num_ranks) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        attend, overlap = AttendConfig(impl=slices_backend.NAME), OverlapConfig(degree=2)
        self.config = MagiConfig(attend=attend, overlap=overlap, comm=CommConfig(impl="all_to_all"))
        self.shape = SHAPE.kernels_for("cpu", slices_backend.NAME)

    def __len__(self) -> int:
        return len(MASKS)

    def __getitem__(self, item):
        plan = make_plan(MASKS[item], self.config, self.num_ranks)
        return prepare_batch({"mask": plan.for_rank(self.rank)}, self.shape, self.config)


def use_prepared_batches(rank, num_ranks, batches, config):
    slices_backend.add()
    found = []
    for item in range(len(MASKS)):
        batch = batches[rank].pop(0)
        batch.to("cpu")
        plan = batch.plans["mask"]
        leaves = [torch.ones(plan.num_rows, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
        slices_backend.used.clear()
        out, _ = distributed_attention(*leaves, plan, dist.group.WORLD, config=config)
        out.sum().backward()
        found.append((plan.degree, list(slices_backend.used)))
        del batch, plan, out, leaves
        assert not slices_backend.brought, item
    return found


@pytest.fixture
def added(monkeypatch):
    """The backend in this process, during a test."""
    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
    monkeypatch.setattr(config, "AttendImpl", config.AttendImpl)
    slices_backend.add()


def test_workers_of_a_loader_make_its_tables_and_passes_use_them(ranks, added) -> None:
    datasets = [Batches(rank, 2) for rank in range(2)]
    assert (datasets[0].shape.num_sms, datasets[0].shape.backend) == (1, slices_backend.NAME)
    batches = [list(DataLoader(d, batch_size=None, num_workers=1, multiprocessing_context="fork")) for d in datasets]
    for found in ranks(2, use_prepared_batches, batches, datasets[0].config):
        assert any(degree for degree, _ in found)
        for degree, used in found:
            assert used == ["brought"] * 2 * (degree + 1)  # every stage, forward and backward


def test_it_is_asked_for_by_name_and_lists_of_names_have_it(added) -> None:
    q = torch.randn(12, 4, 8)
    found = slice_attention(q, q, q, cs.documents([5, 7]), impl=slices_backend.NAME)[0]
    torch.testing.assert_close(found, slice_attention(q, q, q, cs.documents([5, 7]), impl="reference")[0])
    with pytest.raises(ValueError, match=r"use one of auto, reference, torch, ffa, .*slices"):
        slice_attention(q, q, q, cs.documents([12]), impl="nothing")


def test_what_it_does_not_offer_is_refused_by_name(added) -> None:
    plan = make_plan(cs.documents([12]), MagiConfig(), 1).for_rank(0)
    with pytest.raises(ValueError, match="backend: expected one of ffa, which have capture, got 'slices'"):
        StaticPlans({"mask": plan}, "cpu", backend=slices_backend.NAME)
    static = StaticPlans({"mask": plan}, "cpu")
    q = torch.zeros(12, 4, 8)
    options = MagiConfig(attend=AttendConfig(impl=slices_backend.NAME))
    with pytest.raises(ValueError, match=r"rank_plan: a static key, .*'ffa' alone, not 'slices'"):
        distributed_attention(q, q, q, static.plans["mask"], None, config=options)


def test_the_configuration_knows_the_backends_of_the_registry() -> None:
    assert get_args(config.AttendImpl) == ("auto", *registry.BACKENDS)


def test_what_uses_backends_names_no_architecture() -> None:
    """Neither a compute capability nor an architecture's name is in the code outside of backends and `cuda.target`."""
    root = Path(megatron_magi.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        in_backend = place.parts[0] == "backends" and len(place.parts) > 2
        if in_backend or place == Path("cuda/target.py") or place.parts[0] == "testing":
            continue
        tree = ast.parse(path.read_text())
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                found += [f"{place}: {node.value}"] if "sm_90" in node.value or "sm90" in node.value else []
            if isinstance(node, ast.Tuple | ast.List):
                values = [getattr(element, "value", None) for element in node.elts]
                found += [f"{place}: {values}"] if values == [9, 0] else []
    assert not found
