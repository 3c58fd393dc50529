"""Microbatches of equal work: every document once an epoch, the same on all ranks, and where it was left."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_magi.packing import BalancedSampler, balanced_sampler, causal_area, causal_work

SIZES = {"max_tokens": 4096, "num_microbatches": 4, "dp_size": 4}


def heavy_tailed(num_documents, largest=4096):
    return np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(largest + 1), num_documents)).astype(np.int64)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 3))
def test_each_document_is_packed_once_an_epoch(lengths, num_microbatches, dp_size):
    sampler = BalancedSampler(lengths, 50, num_microbatches, dp_size=dp_size)
    packed = []
    while len(packed) < 3 * len(lengths):
        for microbatch in sampler.step():
            assert sum(lengths[i] for i in microbatch) <= 50
            packed += microbatch
    assert_once_an_epoch(packed, sampler.state_dict(), lengths)


def assert_once_an_epoch(packed, seen, lengths):
    """The documents that were packed and those that wait are the state's first ones of the order."""
    counts = np.bincount(packed, minlength=len(lengths))
    waiting = np.bincount(np.array(seen["waiting"], dtype=np.int64), minlength=len(lengths))
    ahead = np.random.default_rng([0, seen["epoch"]]).permutation(len(lengths))[: seen["place"]]
    expected = np.full(len(lengths), seen["epoch"])
    expected[ahead] += 1
    assert (counts + waiting == expected).all()


def test_ranks_take_turns_of_one_step():
    lengths = heavy_tailed(500)
    whole = BalancedSampler(lengths, **SIZES)
    steps = [whole.step() for _ in range(3)]
    for rank in range(4):
        own = list(islice(BalancedSampler(lengths, **SIZES, dp_rank=rank), 12))
        assert own == [microbatch for step in steps for microbatch in step[rank::4]]


def test_a_run_goes_on_where_it_was_left():
    lengths = heavy_tailed(300)
    sampler = BalancedSampler(lengths, **SIZES, seed=5)
    sampler.step()
    state = sampler.state_dict()
    resumed = BalancedSampler(lengths, **SIZES, seed=5)
    resumed.load_state_dict(state)
    assert [resumed.step() for _ in range(20)] == [sampler.step() for _ in range(20)]
    assert BalancedSampler(lengths, **SIZES, seed=6).step() != BalancedSampler(lengths, **SIZES, seed=5).step()


class Numbers:
    """A data set of which each document is its number."""

    def __getitem__(self, number):
        return number


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 1, "prefetch_factor": 3},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=str,
)
def test_a_new_iterator_of_a_data_loader_goes_on_where_the_last_one_was_left(options):
    """Inside a step, after fewer microbatches than are drawn ahead, after none, and in the next epoch."""
    lengths = heavy_tailed(60, largest=1000)
    whole, own = BalancedSampler(lengths, **SIZES), BalancedSampler(lengths, **SIZES, dp_rank=2)
    right = [microbatch for _ in range(7) for microbatch in whole.step()[2::4]]
    made, found = DataLoader(Numbers(), batch_sampler=own, collate_fn=list, **options), []
    for taken in (4, 1, 0, 3, 6, 14):
        found += islice(made, taken)
        assert own.state_dict()["epoch"] <= whole.state_dict()["epoch"]
    assert found == right and whole.state_dict()["epoch"] > 1
    resumed = BalancedSampler(lengths, **SIZES)
    resumed.load_state_dict(own.state_dict())
    assert resumed.step() == whole.step()


class DrawsAhead:
    """Asks a sampler for microbatches as torch's loader with workers does, without workers."""

    def __init__(self, sampler, num_workers, prefetch_factor, in_order=True):
        self.batch_sampler, self.num_workers, self.prefetch_factor = sampler, num_workers, prefetch_factor
        self.in_order = in_order

    def __iter__(self):
        drawn = iter(self.batch_sampler)
        ahead = [next(drawn) for _ in range(self.num_workers * self.prefetch_factor)]

        def given_out():
            while True:
                ahead.append(next(drawn))
                yield ahead.pop(0)

        return given_out()


LEFT = st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 3), LEFT)
def test_each_document_is_given_once_an_epoch_however_iterators_are_left_and_resumed(lengths, ranks, workers, left):
    def loaders(dp_size):
        samplers = [BalancedSampler(lengths, 50, 2, dp_rank=r, dp_size=dp_size) for r in range(dp_size)]
        return [DrawsAhead(sampler, workers, 2) for sampler in samplers]

    made, found = loaders(ranks), []
    for taken, is_resumed in left:
        iterators = list(map(iter, made))
        found += [document for it in iterators for microbatch in islice(it, taken) for document in microbatch]
        states = [loader.batch_sampler.state_dict() for loader in made]
        assert all(state == states[0] for state in states)
        assert_once_an_epoch(found, states[0], lengths)
        if is_resumed:
            made = loaders(1 + len(made) % 3)  # also over another number of ranks
            for loader in made:
                loader.batch_sampler.load_state_dict(states[0])


def test_a_loader_whose_microbatches_went_elsewhere_does_not_go_on():
    sampler = BalancedSampler([3, 4, 5], 8)
    with pytest.raises(ValueError, match=r"^in_order: expected True"):
        iter(DrawsAhead(sampler, 1, 2, in_order=False))
    first = iter(DrawsAhead(sampler, 1, 2))
    next(first)
    second = iter(DrawsAhead(sampler, 1, 2))
    with pytest.raises(RuntimeError, match=r"given to a newer iterator"):
        next(first)
    next(second)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match=r"dropped by load_state_dict"):
        next(second)
    # Nothing is ahead where there are no workers, so these take turns.
    one, other, third = iter(sampler), iter(sampler), BalancedSampler([3, 4, 5], 8)
    third.load_state_dict(sampler.state_dict())
    assert [next(one), next(other), next(one)] == list(islice(third, 3))


def test_what_was_drawn_ahead_is_not_lost():
    """A data loader's workers are steps ahead of training when its state is saved."""
    lengths = heavy_tailed(300)
    sampler = BalancedSampler(lengths, **SIZES)
    steps = [sampler.step() for _ in range(6)]
    assert sampler.state_dict(2) == sampler.state_dict(2)
    resumed = BalancedSampler(lengths, **SIZES)
    resumed.load_state_dict(sampler.state_dict(3))
    assert [resumed.step() for _ in range(3)] == steps[3:]
    assert resumed.state_dict(3) == resumed.state_dict() == sampler.state_dict()
    for wrong in (2, 7, -1):
        with pytest.raises(ValueError, match="num_steps"):
            sampler.state_dict(wrong)


def test_states_are_kept_of_the_last_steps_alone(monkeypatch):
    monkeypatch.setattr(balanced_sampler, "_MOST_STATES", 4)
    sampler = BalancedSampler(heavy_tailed(300), **SIZES)
    steps = [sampler.step() for _ in range(9)]
    with pytest.raises(ValueError, match=r"^num_steps: expected from 6 to 9, got 5"):
        sampler.state_dict(5)
    resumed = BalancedSampler(heavy_tailed(300), **SIZES)
    resumed.load_state_dict(sampler.state_dict(6))
    assert [resumed.step() for _ in range(3)] == steps[6:]


def first_fit(lengths, num_bins, max_tokens):
    """Documents in their order, each to the first microbatch that has room."""
    room, work = np.full(num_bins, max_tokens), np.zeros(num_bins)
    for length in lengths:
        fits = np.flatnonzero(room >= length)
        if not len(fits):
            return work
        room[fits[0]] -= length
        work[fits[0]] += causal_area(np.array([length]))[0]
    return work


def spread(work):
    return work.max() / work.mean()


def test_work_is_more_even_than_by_first_fit():
    lengths = heavy_tailed(4000, largest=2048)
    sampler = BalancedSampler(lengths, **SIZES)
    for _ in range(5):
        step = sampler.step()
        work = np.array([causal_area(lengths[microbatch]).sum() for microbatch in step]).reshape(4, 4)
        tokens = np.array([lengths[microbatch].sum() for microbatch in step])
        order = np.random.default_rng(0).permutation(lengths)
        assert spread(work.sum(axis=0)) < 1.02 < spread(first_fit(order, 16, 4096).reshape(4, 4).sum(axis=0))
        assert tokens.min() > 0.9 * 4096
        assert np.ptp(work.sum(axis=0)) <= np.ptp(work, axis=1).max(), "turns add to each other's differences"
    for _ in range(40):
        sampler.step()
    assert lengths[sampler.state_dict()["waiting"]].sum() <= 17 * 4096, "ever more documents wait"


def test_work_counts_the_matrix_products_of_tokens_beside_pairs():
    """Of a layer with one head: 14 operations a pair and dimension, 6 a token and parameter."""
    work = causal_work(layer_parameters=7 * 64, num_heads_q=1, head_dim=64)
    assert work(np.array([1, 10])).tolist() == [1 + 3, 55 + 30]
    lengths = heavy_tailed(4000)
    sampler = BalancedSampler(lengths, **SIZES, area=causal_work(218_112_000, 32, 128))
    tokens = np.array([[lengths[m].sum() for m in sampler.step()] for _ in range(5)]).reshape(5, 4, 4).sum(axis=1)
    assert spread(tokens.T).max() < 1.02


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lengths": []}, "lengths: expected documents of 1 to 8 tokens, there is none"),
        ({"lengths": [0]}, "lengths"),
        ({"lengths": [3, 9]}, "lengths: expected documents of 1 to 8 tokens, number 1 has 9"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"seed": -1}, "seed"),
        ({"area": 3}, "area: expected a function of lengths, got 3"),
        ({"area": lambda lengths: lengths[:1]}, r"area: expected work of 2 documents, got \[1\]"),
        ({"area": lambda lengths: [1.0, float("nan")]}, "area: .* at least 0, document 1 of 4 tokens has nan"),
        ({"area": lambda lengths: [-1, 1]}, "area: .* at least 0, document 0 of 3 tokens has -1"),
        ({"area": lambda lengths: [1.0, float("inf")]}, "area: expected finite work"),
        ({"area": lambda lengths: ["1", "2"]}, "area: expected numbers"),
        ({"area": lambda lengths: torch.ones(2, requires_grad=True)}, "area: expected work of 2 documents, got tensor"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        BalancedSampler(**{"lengths": [3, 4], "max_tokens": 8, **arguments})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epoch": -1}, r"state\['epoch'\]"),
        ({"epoch": "0"}, r"state\['epoch'\]"),
        ({"seed": True}, r"state\['seed'\]"),
        ({"place": 3}, "state: it is of other documents"),
        ({"waiting": [2]}, "state: it is of other documents"),
        ({"waiting": [-1]}, "state: it is of other documents"),
        ({"waiting": [0.5]}, r"state\['waiting'\]"),
        (BalancedSampler([3, 4], 8, seed=1).state_dict(), "state: it is of seed 1, this sampler has 0"),
        (BalancedSampler([3, 5], 8).state_dict(), "state: it is of other documents than the 2"),
        (BalancedSampler([3, 4, 4], 8).state_dict(), "state: it is of other documents than the 2"),
        (None, "state: expected what state_dict returns"),
    ],
)
def test_a_state_that_is_none_or_of_other_documents_or_seed_is_refused_and_changes_nothing(wrong, message):
    sampler, other = (BalancedSampler([3, 4], 8) for _ in range(2))
    state = sampler.state_dict()
    with pytest.raises(ValueError, match=f"^{message}"):
        sampler.load_state_dict({**state, **wrong} if wrong is not None else None)
    for name in state:
        with pytest.raises(ValueError, match=r"^state: expected what state_dict returns, epoch, place"):
            sampler.load_state_dict({key: value for key, value in state.items() if key != name})
    assert [sampler.step() for _ in range(3)] == [other.step() for _ in range(3)]


@pytest.mark.parametrize(("numbers", "name"), [((-1, 1, 1), "layer_parameters"), ((9, 0, 1), "num_heads_q")])
def test_numbers_of_a_model_are_checked(numbers, name):
    with pytest.raises(ValueError, match=f"^{name}: expected at least"):
        causal_work(*numbers)
