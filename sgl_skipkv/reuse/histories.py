"""The histories of one scheduler process, found by the tokens that a prompt begins with.

A client manages nothing: a prompt that begins with an earlier request's prompt and output continues
that request's row. The radix tree decides whether the KV still exists.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_skipkv.offload.host_memory import HostMemory
from sgl_skipkv.reuse.history import History

#: histories that begin alike: more are neither kept nor compared, so a search takes milliseconds,
#: whatever clients send
MOST_ALIKE = 256


class HistoryMatch(NamedTuple):
    """A history, and how many of its logical tokens a prompt continues."""

    history: History
    cut: int

    def needs(self, pages: array[int], page_tokens: int) -> bool:
        """Whether a part of it is in the last of these pages, with which its row begins.

        Args:
            pages: keys of whole pages, each of ``page_tokens``.
        """
        row_tokens, count = self.cut - self.history.evicted_tokens, len(pages)
        key = self.history.key if count <= len(self.history.key) else self.history.pages
        return row_tokens > count - page_tokens and key[:count] == pages


class Histories:
    """All histories that can be continued; the least recently used are dropped first.

    Args:
        limit_bytes: of everything that they hold beside their KV.
        pinned: whether recordings are copied from a device other than the CPU.

    Attributes:
        memory: host memory for their recordings.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self._limit_bytes, self._used_bytes = limit_bytes, 0
        self.memory = HostMemory(limit_bytes, pinned=pinned)
        #: with two beginnings of each: what every cut of it contains, and its request's prompt
        self._by_use: OrderedDict[History, tuple[_Beginning, _Beginning]] = OrderedDict()
        #: those with recordings, by use
        self._recorded: OrderedDict[History, None] = OrderedDict()
        self._beginnings: defaultdict[Hashable, _Beginnings] = defaultdict(_Beginnings)
        self._hashes = _PrefixHashes()

    def __len__(self) -> int:
        return len(self._by_use)

    def make_room(self, recorded_bytes: int) -> bool:
        """Drop old histories with recordings until the host memory has room for these; whether it
        has.

        Raises:
            MemoryError: the host has no memory for the slab.
        """
        self.memory.reserve()
        while self._recorded and not self.memory.fits(recorded_bytes):
            used_bytes = self.memory.used_bytes
            self.drop(next(iter(self._recorded)))
            if self.memory.used_bytes == used_bytes:
                break  # requests wait to continue it, and those that were used after it
        return self.memory.fits(recorded_bytes)

    def add(self, history: History) -> None:
        """Keep it until it is lost, the limit is reached, or many that begin alike were used
        later; not at all if it alone is above the limit."""
        if history.nbytes > self._limit_bytes:
            return
        hashes = self._hashes.of(history.sent)
        lengths = history.first_cut - history.unsent_tokens, history.sent_prompt_tokens
        known = self._beginnings[history.namespace]
        alike = known.by_hash.get(int(hashes[lengths[0]]))
        if alike is not None and len(alike.histories) == MOST_ALIKE:
            self.drop(alike.histories[0])
            known = self._beginnings[history.namespace]
        cut, prompt = (known.get_or_add(length, int(hashes[length])) for length in lengths)
        cut.histories.append(history)
        prompt.prompts[history.own_prompt_tokens] += 1
        self._by_use[history] = cut, prompt
        if history.recorded_bytes:
            self._recorded[history] = None
        self._used_bytes += history.nbytes
        while self._used_bytes > self._limit_bytes:
            self.drop(next(iter(self._by_use)))

    def drop(self, history: History) -> None:
        """Forget it, because its KV or its recordings are gone, if it still is known."""
        if history not in self._by_use:
            return
        cut, prompt = self._by_use.pop(history)
        self._recorded.pop(history, None)
        self._used_bytes -= history.nbytes
        cut.histories.remove(history)
        prompt.prompts[history.own_prompt_tokens] -= 1
        if not prompt.prompts[history.own_prompt_tokens]:
            del prompt.prompts[history.own_prompt_tokens]
        known = self._beginnings[history.namespace]
        known.drop_empty({cut, prompt})
        if not known.by_hash:
            del self._beginnings[history.namespace]

    def lose(self, history: History) -> None:
        """Its KV is gone. Of a conversation that counts it stays known where that begins."""
        if history not in self._by_use:
            return
        self.drop(history)
        if (rest := history.without_kv()) is not None:
            self.add(rest)

    def lose_all(self) -> None:
        """The radix tree was flushed."""
        for history in [*self._by_use]:
            self.lose(history)

    def find(self, namespace: Hashable, tokens: Sequence[int]) -> tuple[list[HistoryMatch], int]:
        """The histories that this prompt continues, and the longest prompt of a request whose
        history it leaves, 0 for none.

        The farthest histories come first; of equally far ones those that evicted the fewest tokens.

        At least one token of the prompt is not of the history, because a request must compute one.
        A prompt leaves a history if it goes on behind its request's prompt and differs from the
        output before the last compaction: what was evicted for that output is gone.
        """
        prompt, matches = array("q", tokens), []
        begun, prompts = self._begun(namespace, prompt)
        for history in begun:
            sent_tokens = min(common_tokens(history.sent, prompt), len(prompt) - 1)
            cut = sent_tokens + history.unsent_tokens
            if cut >= history.first_cut:
                matches.append((sent_tokens, HistoryMatch(history, cut)))
                own_tokens = history.own_prompt_tokens
                if sent_tokens >= history.sent_prompt_tokens and own_tokens < len(prompt):
                    prompts[own_tokens] -= 1  # it is one of those that are counted
        matches.sort(key=lambda match: (-match[0], match[1].history.evicted_tokens))
        left = [length for length, count in prompts.items() if count]
        return [match for _, match in matches], max(left, default=0)

    def use(self, history: History) -> None:
        """It is continued: others are dropped before it."""
        self._by_use.move_to_end(history)
        if history.recorded_bytes:
            self._recorded.move_to_end(history)
        alike = self._by_use[history][0].histories
        alike.remove(history)
        alike.append(history)

    def _begun(self, namespace: Hashable, prompt: array[int]) -> tuple[list[History], Counter[int]]:
        """Histories of which the prompt contains what every cut does and goes on, those of the
        longest and then the last used first; and length -> how many requests had a prompt that it
        goes on behind."""
        begun: list[list[History]] = []
        prompts: Counter[int] = Counter()
        known = self._beginnings.get(namespace)
        if known is None:
            return [], prompts
        lengths = np.array(known.lengths)
        lengths = lengths[lengths < len(prompt)]
        hashes = self._hashes.of(prompt[: known.lengths[-1]])
        for one in known.find(hashes[lengths].tolist()):
            begun.append(one.histories)
            for own_tokens, count in one.prompts.items():
                prompts[own_tokens] += count if own_tokens < len(prompt) else 0
        last_first = chain.from_iterable(reversed(alike) for alike in reversed(begun))
        return [*islice(last_first, MOST_ALIKE)], prompts


class _Beginning:
    """Tokens that histories or prompts of one namespace begin with.

    Attributes:
        length, hash: of these tokens.
        histories: of which every cut contains all of them, by use.
        prompts: how many requests had a prompt that begins so, by the length of that prompt.
    """

    def __init__(self, length: int, value: int) -> None:
        self.length, self.hash = length, value
        self.histories: list[History] = []
        self.prompts: Counter[int] = Counter()


class _Beginnings:
    """The beginnings of one namespace.

    Attributes:
        by_hash: all of them; the length is part of the hash.
        lengths: ascending, each once.
    """

    def __init__(self) -> None:
        self.by_hash: dict[int, _Beginning] = {}
        self.lengths: list[int] = []
        self._count: Counter[int] = Counter()

    def get_or_add(self, length: int, value: int) -> _Beginning:
        """The beginning with this length and hash, a new one if there is none."""
        if value not in self.by_hash:
            self.by_hash[value] = _Beginning(length, value)
            if not self._count[length]:
                insort(self.lengths, length)
            self._count[length] += 1
        return self.by_hash[value]

    def find(self, hashes: Sequence[int]) -> list[_Beginning]:
        """Those with these hashes, in the same order."""
        return [self.by_hash[value] for value in hashes if value in self.by_hash]

    def drop_empty(self, some: set[_Beginning]) -> None:
        """Forget those of these that no history has any more."""
        for one in some:
            if one.histories or one.prompts:
                continue
            del self.by_hash[one.hash]
            self._count[one.length] -= 1
            if not self._count[one.length]:
                del self._count[one.length], self.lengths[bisect_left(self.lengths, one.length)]


class _PrefixHashes:
    """Hashes of all beginnings of a sequence at once: ``sum((token_i + 2^40) * r_i) mod 2^64``.

    Each process draws the multipliers ``r_i``, so nobody can search for sequences with one hash. No
    id is -2^40, so no token adds nothing. A cryptographic hash of each length in turn took longer.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._multipliers = np.zeros(0, dtype=np.uint64)

    def of(self, tokens: array[int]) -> NDArray[np.uint64]:
        """[tokens + 1] uint64: at each length the hash of so many tokens."""
        if len(tokens) > len(self._multipliers):
            more = self._random.integers(1 << 64, size=2 * len(tokens), dtype=np.uint64)
            self._multipliers = np.concatenate((self._multipliers, more))
        hashes = np.zeros(len(tokens) + 1, dtype=np.uint64)
        numbers = np.frombuffer(tokens, dtype=np.uint64) + np.uint64(1 << 40)
        np.cumsum(numbers * self._multipliers[: len(tokens)], out=hashes[1:])
        return hashes


def common_tokens(one: array[int], other: array[int]) -> int:
    """How many tokens two sequences begin with alike."""
    shorter = min(len(one), len(other))
    a, b = (np.frombuffer(tokens, dtype=np.int64, count=shorter) for tokens in (one, other))
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if len(unequal) else shorter
