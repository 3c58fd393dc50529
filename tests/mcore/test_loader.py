"""Data loaders whose workers plan."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.datasets.utils import Split
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode
from megatron.training import training
from torch.utils.data import DataLoader, Dataset

from megatron_magi.attention import AttnShape, prepare_plans
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mask.source import LayerMasks, MaskSource
from megatron_magi.mcore import loader
from megatron_magi.mcore import planner as planner_module
from megatron_magi.mcore.batch import BatchDispatcher, LocalBatch
from megatron_magi.mcore.planner import Planner

SEQLEN = 30
MASKS = LayerMasks(MaskSource("documents"), windows=[None, (4, 0)])
CONFIG = MagiConfig(dispatch=DispatchConfig(alignment=4))
SHAPE = AttnShape(4, 2, 128, 128, torch.bfloat16, num_sms=132)


class Samples(Dataset):
    """Packed documents; sample ``bad`` has bounds that decrease."""

    split = Split.train

    def __init__(self, bad: int = -1) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(SEQLEN) + 100 * i
        bounds = [0, 9, 5, SEQLEN] if i == self._bad else [0, 5 + i, 20, SEQLEN]
        ones = torch.ones(SEQLEN)
        return {"tokens": tokens, "labels": tokens + 1, "position_ids": tokens, "loss_mask": ones,
                "cu_seqlens": torch.tensor(bounds)}  # fmt: skip


def _planner(**options: object) -> Planner:
    return Planner(CONFIG, 1, 2, SHAPE, masks=MASKS, rolls=True, **options)


def _loader(dataset: Dataset, num_workers: int, planner: Planner | None = None) -> DataLoader:
    made = DataLoader(dataset, batch_size=2, num_workers=num_workers)
    made.collate_fn = loader.PlanningCollate(planner or _planner(), made.collate_fn)
    return made


def _contents(batch: LocalBatch) -> list:
    plans, layout = batch.params.plans, batch.params.layout
    tensors = [batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.padding_mask, batch.documents]
    of_layers = [plans.for_layer(1, None), plans.for_layer(2, (4, 0))]
    roll = plans.successors(torch.device("cpu"))
    tensors += [layout.positions, layout.roll_keeps, roll.local_from, roll.forward.send_index, roll.backward.send_index]
    return [
        [tensor.tolist() for tensor in tensors],
        [[band.tolist() for band in plan.bands] for plan in of_layers],
        [plan.plan_hash for plan in of_layers],
        [vars(batch.params)[name] for name in ("max_seqlen_q", "max_seqlen_kv", "num_loss_tokens")],
        plans.stats,
    ]


def test_batches_of_workers_are_those_planned_when_due() -> None:
    dispatcher = BatchDispatcher(_planner(), None)
    plain = DataLoader(Samples(), batch_size=2)
    ahead = iter(_loader(Samples(), 2))
    for fields in plain:
        assert _contents(dispatcher.next(ahead)) == _contents(dispatcher.dispatch(fields))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_plan_is_raised_in_its_step_and_no_other_step_fails(num_workers: int) -> None:
    dispatcher, batches = BatchDispatcher(_planner(), None), iter(_loader(Samples(bad=5), num_workers))
    for step in range(4):
        if step != 2:
            assert dispatcher.next(batches).tokens.shape == (2, 16)
            continue
        with pytest.raises(ValueError, match=r"^cu_seqlens: the bounds of sequence 1 must rise") as error:
            dispatcher.next(batches)
        notes = "".join(getattr(error.value, "__notes__", []))
        assert ("document_bounds" in notes) == (num_workers > 0)


class Unsendable(Exception):
    """Cannot be made again in another process."""

    def __init__(self, first: str, second: object) -> None:
        super().__init__(f"{first} failed")
        self.second = second


def test_errors_of_any_kind_reach_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Planner, fields: dict) -> None:
        raise Unsendable("the planner", lambda: None)

    monkeypatch.setattr(Planner, "masks_of", fail)
    batches = iter(_loader(Samples(), 1))
    with pytest.raises(RuntimeError, match=r"^Unsendable: the planner failed"):
        BatchDispatcher(_planner(), None).next(batches)
    batches._shutdown_workers()  # found by the garbage collector, it would wait for its worker for seconds


class Tuples(Samples):
    def __getitem__(self, i: int) -> tuple:
        return tuple(super().__getitem__(i).values())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_items_that_are_no_dicts_are_an_error_of_their_step(num_workers: int) -> None:
    batches = iter(_loader(Tuples(), num_workers))
    with pytest.raises(ValueError, match="dataset_provider: its items must be dicts, got a list of them"):
        BatchDispatcher(_planner(), None).next(batches)
    if num_workers:
        batches._shutdown_workers()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_replayed_microbatch_is_kept_as_megatron_collates_it_and_is_the_same_again(
    monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    machine = SimpleNamespace(get_mode=lambda: RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    dispatcher, batches = BatchDispatcher(_planner(), None), RerunDataIterator(iter(_loader(Samples(), num_workers)))
    first = [_contents(dispatcher.next(batches)) for _ in range(2)]
    checkpoint = io.BytesIO()
    torch.save(batches.state_dict(), checkpoint)
    saved = torch.load(io.BytesIO(checkpoint.getvalue()))["saved_microbatches"]
    assert all(type(fields) is dict and "cu_seqlens" in fields for fields in saved)
    assert all(x.untyped_storage().nbytes() == x.nbytes for fields in saved for x in fields.values())
    batches.rewind()
    assert [_contents(dispatcher.next(batches)) for _ in range(2)] == first


def test_layers_that_nobody_foresaw_are_planned_over_the_same_dispatch() -> None:
    plans = BatchDispatcher(_planner(), None).next(iter(_loader(Samples(), 1))).params.plans
    window = plans.for_layer(3, (2, 0))
    assert plans.for_layer(3, (2, 0)) is window
    assert window.num_rows == plans.for_layer(1, None).num_rows
    assert 0 < window.area < plans.for_layer(2, (4, 0)).area


def test_masks_that_repeat_are_planned_once_and_their_microbatches_share_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[object] = []
    monkeypatch.setattr(planner_module, "prepare_plans", lambda *a, **k: planned.append(a) or prepare_plans(*a, **k))
    planner, loaded = _planner(), list(DataLoader(Samples(), batch_size=2))
    bounds = loaded[0]["cu_seqlens"]
    dispatcher = BatchDispatcher(planner, None)
    same = [dispatcher.dispatch(fields | {"cu_seqlens": bounds}) for fields in loaded]
    assert len(planned) == 1
    for fields, batch in zip(loaded, same, strict=True):
        fields = fields | {"cu_seqlens": bounds}
        assert _contents(batch) == _contents(BatchDispatcher(_planner(), None).dispatch(fields))
    first, second = (batch.params.plans.for_layer(1, None) for batch in same[:2])
    assert first.bands[0] is second.bands[0] and first.runtime.casts and first.runtime is not second.runtime
    planner(loaded[0], needs_backward=False)
    planner(loaded[1], needs_backward=False)
    assert len(planned) == 1 + 4 + 2
    assert len(planner._last) == 1


def test_planners_with_functions_of_a_file_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "my_masks.py"
    path.write_text("from megatron_magi.mask.builders import causal\ndef all_causal(batch, twice=1):\n"
                    "    return causal(batch.total_seqlen)\n")  # fmt: skip
    masks = LayerMasks(MaskSource.parse(f"{path}:all_causal:twice=2", "magi_mask"))
    planner = Planner(CONFIG, 0, 2, SHAPE, masks=masks)
    again = pickle.loads(pickle.dumps(planner))
    fields = next(iter(DataLoader(Samples(), batch_size=2)))
    assert again(fields).fingerprint == planner(fields).fingerprint
    assert again.masks.primary == masks.primary and again.masks.primary.option == "magi_mask"


@pytest.fixture
def megatrons_loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Megatron's arguments; its function that builds loaders is a stub, and ours is put around it."""
    args = SimpleNamespace(dataloader_type="single", magi_attention=True)
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", args)
    monkeypatch.setattr(training, "build_pretraining_data_loader", _build)
    loader.install(_planner())
    return args


def _build(dataset: object, consumed_samples: int) -> object:
    return DataLoader(dataset, batch_size=2) if isinstance(dataset, Samples) else dataset


def test_loaders_of_megatron_plan_and_those_of_evaluations_for_no_backward(megatrons_loader: SimpleNamespace) -> None:
    made = training.build_pretraining_data_loader(Samples(), 0)
    assert isinstance(next(iter(made)), loader.LoadedBatch) and made.collate_fn.needs_backward
    data = Samples()
    for data.split in (Split.valid, Split.test):
        evaluated = training.build_pretraining_data_loader(data, 0)
        assert not evaluated.collate_fn.needs_backward
    sizes = [next(iter(x)).planned.prepared.num_bytes for x in (evaluated, made)]
    assert sizes[0] < sizes[1]


def test_loaders_of_a_users_own_stay_as_they_are(megatrons_loader: SimpleNamespace) -> None:
    own = DataLoader(Samples(), batch_size=2)
    megatrons_loader.dataloader_type = "external"
    assert isinstance(next(iter(training.build_pretraining_data_loader(own, 0))), dict)
    megatrons_loader.dataloader_type = "single"
    assert training.build_pretraining_data_loader(None, 0) is None
    megatrons_loader.magi_attention = False
    assert isinstance(next(iter(training.build_pretraining_data_loader(Samples(), 0))), dict)


def test_fields_of_all_kinds_arrive_as_they_were() -> None:
    fields = {
        "tokens": torch.arange(6).view(2, 3), "half": torch.ones(2, 3, dtype=torch.bfloat16), "names": ["a", "b"],
        "is_first": torch.tensor([True, False]), "turned": torch.arange(6.0).view(2, 3).t(), "none": torch.zeros(2, 0),
    }  # fmt: skip
    batch = pickle.loads(pickle.dumps(loader.LoadedBatch(fields, ValueError("x"))))
    assert batch.fields.keys() == fields.keys() and str(batch.planned) == "x"
    for name, expected in fields.items():
        got = batch.fields[name]
        same = got.dtype == expected.dtype and torch.equal(got, expected) if name != "names" else got == expected
        assert same, name


def test_pinned_batches_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the thread of a data loader pins them, here into the same memory."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    batch = next(iter(_loader(Samples(), 0)))
    again = batch.pin_memory()
    assert len(pinned) == 1 and again.fields is batch.fields and again.planned.dispatch is batch.planned.dispatch
    assert copy.copy(again).keys() == batch.fields.keys()
    failed = loader.LoadedBatch({}, ValueError("x")).pin_memory()
    assert isinstance(failed.planned, ValueError)
