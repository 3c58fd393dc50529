"""Byte-pair encoding, trained on the spot: enough of a tokenizer to pack several documents in a sequence."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

Pair = tuple[int, int]

# A run of letters, of digits, of blanks or of signs; one blank belongs to what follows it.
_WORD = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+| ?[^A-Za-z0-9_\s]+|\s+(?=\S)|\s+")


class BytePairEncoding:
    """Tokens 0 to 255 are bytes; token 256 + i joins the two tokens of merge i.

    Args:
        merges: pairs of tokens in the order in which they are joined.
    """

    def __init__(self, merges: list[Pair]) -> None:
        self.merges = merges
        self._rank = {pair: rank for rank, pair in enumerate(merges)}
        self._words: dict[bytes, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return 256 + len(self.merges)

    def encode(self, text: bytes) -> list[int]:
        """The tokens of ``text``."""
        tokens: list[int] = []
        for word in _WORD.findall(text):
            known = self._words.get(word)
            if known is None:
                known = self._words[word] = self._encode_word(word)
            tokens += known
        return tokens

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The inverse of `encode`."""
        table = [bytes([byte]) for byte in range(256)]
        for left, right in self.merges:
            table.append(table[left] + table[right])
        return b"".join(table[token] for token in tokens)

    def _encode_word(self, word: bytes) -> list[int]:
        tokens = list(word)
        while len(tokens) > 1:
            rank, pair = min((self._rank.get(p, len(self.merges)), p) for p in pairwise(tokens))
            if rank == len(self.merges):
                break
            tokens = _join(tokens, pair, 256 + rank)
        return tokens


def train(texts: Iterable[bytes], vocab_size: int) -> BytePairEncoding:
    """The encoding that joins, again and again, the pair that is most frequent in ``texts``.

    Deterministic: of equally frequent pairs the smaller wins.

    Args:
        texts: what to learn from.
        vocab_size: number of tokens, at least 256; fewer when nothing occurs twice any more.

    Raises:
        ValueError: ``vocab_size`` is below 256.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size: bytes alone are 256 tokens, got {vocab_size}")
    frequency = Counter(word for text in texts for word in _WORD.findall(text))
    words = [(list(word), count) for word, count in sorted(frequency.items())]
    counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, (tokens, count) in enumerate(words):
        for pair in pairwise(tokens):
            counts[pair] += count
            where[pair].add(index)
    merges: list[Pair] = []
    while len(merges) < vocab_size - 256 and counts:
        pair = min(counts, key=lambda p: (-counts[p], p))
        if counts[pair] < 2:
            break
        for index in where.pop(pair):
            _merge_in_word(words, index, pair, 256 + len(merges), counts, where)
        del counts[pair]
        merges.append(pair)
    return BytePairEncoding(merges)


def _merge_in_word(
    words: list[tuple[list[int], int]],
    index: int,
    pair: Pair,
    token: int,
    counts: Counter[Pair],
    where: defaultdict[Pair, set[int]],
) -> None:
    before, count = words[index]
    after = _join(before, pair, token)
    for old in pairwise(before):
        counts[old] -= count
    for new in pairwise(after):
        counts[new] += count
        where[new].add(index)
    words[index] = (after, count)


def _join(tokens: list[int], pair: Pair, token: int) -> list[int]:
    out: list[int] = []
    at = 0
    while at < len(tokens):
        if at + 1 < len(tokens) and (tokens[at], tokens[at + 1]) == pair:
            out.append(token)
            at += 2
        else:
            out.append(tokens[at])
            at += 1
    return out
