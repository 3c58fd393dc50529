"""Documents packed into microbatches of equal tokens and equal work, over data-parallel ranks."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_magi.checks import IntArrayLike, int_array, int_at_least
from megatron_magi.packing.microbatch_iterator import MicrobatchIterator, Turn, num_ahead


def causal_area(lengths: np.ndarray) -> np.ndarray:
    """Visible pairs of causal documents, float64."""
    lengths = lengths.astype(np.float64)
    return lengths * (lengths + 1) / 2


def causal_work(layer_parameters: int, num_heads_q: int, head_dim: int) -> Callable[[np.ndarray], np.ndarray]:
    """Work of causal documents in a model: visible pairs plus a layer's matrix products, in units of pairs.

    Both as operations of a training step: 14 a pair, head and dimension, 6 a token and parameter.

    Args:
        layer_parameters: that multiply a token: of the matrices of a layer, of experts those that one token takes.
        num_heads_q, head_dim: of its attention.

    Raises:
        ValueError: a number is not a whole one, or too small.
    """
    layer_parameters = int_at_least(layer_parameters, "layer_parameters", 0, most=1 << 62)
    num_heads_q, head_dim = int_at_least(num_heads_q, "num_heads_q", 1), int_at_least(head_dim, "head_dim", 1)
    pairs = 6 * layer_parameters / (14 * num_heads_q * head_dim)
    return lambda lengths: causal_area(lengths) + pairs * lengths


_MOST_STATES = 4096
"""Steps that a data loader may draw ahead of training, with room to spare."""


class BalancedSampler:
    """Packs documents into microbatches of equal work; a ``batch_sampler`` of torch's data loader.

    A step has ``dp_size * num_microbatches`` microbatches of at most ``max_tokens`` tokens. Its documents are the next
    ones of a random order, somewhat more than there is room for; the longest first, each goes to the microbatch of the
    least work that has room for it. Microbatches are dealt to ranks so that those of one turn are alike and the ranks'
    sums are even. A document that has no room waits for the next step and is then first. Every rank computes the same,
    without talking.

    The order is without end, epoch after epoch. It depends on the arguments alone, so a run that loads `state_dict`,
    also into another number of ranks or microbatches, goes on with the documents that have not been packed.

    An iterator goes on where the one before it was left, also inside a step. A data loader asks for microbatches ahead,
    ``prefetch_factor`` for each worker; what has not come out of it is given to the next iterator. A loader that wraps
    another and reads ahead itself is not known here: before a new iterator, and to save, tell `state_dict` how many
    steps training has done.

    Args:
        lengths: int ``[num_documents]``, tokens of each document, from 1 to ``max_tokens``.
        max_tokens: tokens that a microbatch has room for.
        num_microbatches: of a rank in a step.
        dp_rank, dp_size: of the caller. Ranks of one sequence are one.
        seed: of the order.
        area: work of documents by their lengths, to be evened: `causal_area`, `causal_work` or the masks' own.

    Raises:
        ValueError: an argument, named in the message, is wrong.
    """

    def __init__(
        self,
        lengths: IntArrayLike,
        max_tokens: int,
        num_microbatches: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        area: Callable[[np.ndarray], np.ndarray] = causal_area,
    ) -> None:
        self._lengths = int_array(lengths, "lengths")
        self._max_tokens = int_at_least(max_tokens, "max_tokens", 1)
        self._num_microbatches = int_at_least(num_microbatches, "num_microbatches", 1)
        self._dp_size = int_at_least(dp_size, "dp_size", 1)
        self._dp_rank = int_at_least(dp_rank, "dp_rank", 0)
        self._seed = int_at_least(seed, "seed", 0)
        if self._dp_rank >= self._dp_size:
            raise ValueError(f"dp_rank: expected less than dp_size {self._dp_size}, got {self._dp_rank}")
        wrong = np.flatnonzero((self._lengths < 1) | (self._lengths > self._max_tokens))
        if len(wrong) or not len(self._lengths):
            what = f"number {wrong[0]} has {self._lengths[wrong[0]]}" if len(wrong) else "there is none"
            raise ValueError(f"lengths: expected documents of 1 to {self._max_tokens} tokens, {what}")
        if not callable(area):
            raise ValueError(f"area: expected a function of lengths, got {area!r}")
        self._area = _checked_work(area(self._lengths.copy()), self._lengths)
        self._epoch, self._place, self._waiting = 0, 0, []
        self._states = [self._state()]  # before each step, from that of which the last was asked for on
        self._num_dropped = 0
        self._turns: deque[Turn] = deque()  # of steps that were drawn, not given to an iterator
        self._iterator: MicrobatchIterator | None = None

    def __iter__(self) -> MicrobatchIterator:
        """The documents of this rank's microbatches, one after another.

        Raises:
            ValueError: a data loader's workers give microbatches out of order, ``in_order=False``.
        """
        ahead = num_ahead(self)
        self._take_back()
        self._iterator = MicrobatchIterator(self._next_turn, self._dp_rank, ahead)
        return self._iterator

    def step(self) -> list[list[int]]:
        """All microbatches of the next step; number ``i * dp_size + r`` is microbatch i of rank r."""
        num_bins = self._dp_size * self._num_microbatches
        waited, self._waiting = self._waiting, []
        # One microbatch more, so that short documents are left to fill up what the long ones leave.
        fresh = self._next_documents((num_bins + 1) * self._max_tokens - int(self._lengths[waited].sum()))
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        room, work = np.full(num_bins, self._max_tokens), np.zeros(num_bins)
        for document in self._longest_first(waited) + self._longest_first(fresh):
            fits = np.flatnonzero(room >= self._lengths[document])
            if not len(fits):
                self._waiting.append(document)
                continue
            best = fits[np.argmin(work[fits])]
            bins[best].append(document)
            room[best] -= self._lengths[document]
            work[best] += self._area[document]
        self._states.append(self._state())
        if len(self._states) > _MOST_STATES:
            del self._states[0]
            self._num_dropped += 1
        return [bins[i] for i in self._dealt(work)]

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        """Returns the state after some steps: integers and a list of them.

        Args:
            num_steps: that have been trained on since the sampler was made or loaded, not fewer than at the call
                before. When None, the microbatches that came out of the data loader, or of an iterator, count; of a
                step that did so in part the other documents are packed anew.

        Raises:
            ValueError: so many steps have not been drawn, or an earlier call asked for more.
        """
        turns = self._not_given() if num_steps is None else []
        drawn = self._num_dropped + len(self._states) - 1
        if turns:
            done = max(turns[0].step, self._num_dropped)
        else:
            done = drawn if num_steps is None else int_at_least(num_steps, "num_steps", 0)
        if not self._num_dropped <= done <= drawn:
            raise ValueError(f"num_steps: expected from {self._num_dropped} to {drawn}, got {done}")
        del self._states[: done - self._num_dropped]
        self._num_dropped = done
        left = [turn for turn in turns if turn.step == done]
        is_inside = 0 < len(left) < self._num_microbatches
        state = self._states[1 if is_inside else 0]
        documents = [i for turn in left for microbatch in turn.microbatches for i in microbatch] if is_inside else []
        return {**state, "waiting": documents + state["waiting"]}

    def _state(self) -> dict[str, Any]:
        place = {"epoch": self._epoch, "place": self._place, "waiting": list(self._waiting)}
        return {**place, "seed": self._seed, "documents": zlib.crc32(self._lengths.tobytes())}

    def _not_given(self) -> list[Turn]:
        """Turns of drawn steps that have not come out of a data loader."""
        return [*(() if self._iterator is None else self._iterator.ahead), *self._turns]

    def _next_turn(self) -> Turn:
        """The next turn for an iterator."""
        if not self._turns:
            number, size = self._num_dropped + len(self._states) - 1, self._dp_size
            step = self.step()
            self._turns.extend(Turn(number, step[i : i + size]) for i in range(0, len(step), size))
        return self._turns.popleft()

    def _take_back(self) -> None:
        """Takes what the last iterator's data loader has asked for and not given out."""
        if self._iterator is not None:
            self._turns.extendleft(reversed(self._iterator.leave()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned, of a sampler of the same documents and seed.

        An iterator of a data loader with workers does not go on: make a new one.

        Raises:
            ValueError: it is none, or of other documents or another seed; the sampler goes on as before.
        """
        own = self._state()
        if not isinstance(state, Mapping) or not own.keys() <= state.keys():
            raise ValueError(f"state: expected what state_dict returns, {', '.join(own)}, got {state!r}")
        names = ("epoch", "place", "seed", "documents")
        epoch, place, seed, documents = (int_at_least(state[n], f"state[{n!r}]", 0, most=1 << 62) for n in names)
        count = len(self._lengths)
        if seed != self._seed:
            raise ValueError(f"state: it is of seed {seed}, this sampler has {self._seed}, so another order")
        waiting = int_array(state["waiting"], "state['waiting']")
        is_inside = place <= count and (not len(waiting) or 0 <= waiting.min() <= waiting.max() < count)
        if documents != own["documents"] or not is_inside:
            raise ValueError(f"state: it is of other documents than the {count} of this sampler, or other lengths")
        self._take_back()
        self._turns.clear()
        self._epoch, self._place, self._waiting = epoch, place, waiting.tolist()
        self._states, self._num_dropped = [self._state()], 0

    def _longest_first(self, documents: list[int]) -> list[int]:
        return sorted(documents, key=lambda i: -self._lengths[i])  # stable

    def _next_documents(self, num_tokens: int) -> list[int]:
        """The next documents of the random order, as many as fit in ``num_tokens``."""
        chosen: list[int] = []
        while True:
            order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self._lengths))[self._place :]
            count = int(np.searchsorted(np.cumsum(self._lengths[order]), num_tokens, side="right"))
            chosen += order[:count].tolist()
            self._place += count
            if count < len(order):
                return chosen
            num_tokens -= int(self._lengths[order].sum())
            self._epoch, self._place = self._epoch + 1, 0

    def _dealt(self, work: np.ndarray) -> list[int]:
        """Bins in the order of turns: alike within a turn, and each to the rank that has the least so far."""
        turns = np.argsort(-work, kind="stable").reshape(self._num_microbatches, self._dp_size)
        sums, out = np.zeros(self._dp_size), []
        for turn in turns:
            ranks = np.argsort(sums, kind="stable")  # the largest bin of the turn goes to the smallest sum
            dealt = np.empty(self._dp_size, dtype=np.int64)
            dealt[ranks] = turn
            sums += work[dealt]
            out += dealt.tolist()
        return out


def _checked_work(work: Any, lengths: np.ndarray) -> np.ndarray:
    """Work of each document, float64; ValueError unless all is finite and not negative."""
    try:
        array = np.asarray(work)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"area: expected work of {len(lengths)} documents, got {work!r}") from None
    if array.shape != lengths.shape:
        raise ValueError(f"area: expected work of {len(lengths)} documents, got {list(array.shape)}")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"area: expected numbers, got {array.dtype}")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~((array >= 0) & np.isfinite(array)))
    if len(wrong):
        got = f"document {wrong[0]} of {lengths[wrong[0]]} tokens has {array[wrong[0]]}"
        raise ValueError(f"area: expected finite work of at least 0, {got}")
    return array
