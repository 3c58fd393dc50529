"""Data sets that a user's function makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from megatron_magi.mcore import data


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class OfThree(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def _provide(monkeypatch: pytest.MonkeyPatch, returned: Any, kind: str | None = None, reads: bool = True) -> list:
    monkeypatch.setattr(data, "get_args", lambda: SimpleNamespace(dataloader_type=kind))
    return data.make_dataset_provider(lambda vp_stage: reads, own=lambda nums: returned)([8, 4, 0])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([OfThree(), None], "expected training, validation and test data sets .or None., got 2$"),
        (OfThree(), "expected training, validation and test data sets .or None., got a OfThree$"),
        ([None, Endless(), None], "a Endless has no length; .* --dataloader-type external"),
    ],
    ids=["two", "one", "without_length"],
)
def test_what_is_not_three_data_sets_of_some_length_is_refused(
    monkeypatch: pytest.MonkeyPatch, returned: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^dataset_provider: {message}"):
        _provide(monkeypatch, returned)
    assert _provide(monkeypatch, returned, reads=False) == [None] * 3


def test_external_loaders_need_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Endless(), None, None]
    assert _provide(monkeypatch, tuple(found), "external") == found
    assert _provide(monkeypatch, [OfThree(), None, None])[1:] == [None, None]
