"""The histories of one scheduler process, found by the tokens that a prompt begins with.

A client manages nothing: a prompt that begins with an earlier request's prompt and output continues
that request's row. The radix tree decides whether the KV still exists.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from sgl_skipkv.offload.host_memory import HostMemory
from sgl_skipkv.reuse.history import History

#: histories that begin alike: more are neither kept nor compared, so a search takes milliseconds,
#: whatever clients send
MOST_ALIKE = 256
_DIGEST_BYTES = 16


#: what sequences of one namespace begin with: the namespace, how many tokens, and their digest
Beginning = tuple[Hashable, int, bytes]


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
        #: with the beginnings of each: what every cut of it contains, and its request's prompt
        self._by_use: OrderedDict[History, tuple[Beginning, Beginning]] = OrderedDict()
        #: those with recordings, by use
        self._recorded: OrderedDict[History, None] = OrderedDict()
        #: under the first of these, by use
        self._under: defaultdict[Beginning, list[History]] = defaultdict(list)
        #: how many have a request's prompt that begins so, by the length of that prompt
        self._prompts: defaultdict[Beginning, Counter[int]] = defaultdict(Counter)
        self._lengths: defaultdict[Hashable, _Lengths] = defaultdict(_Lengths)

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
            self.drop(next(iter(self._recorded)))
        return self.memory.fits(recorded_bytes)

    def add(self, history: History) -> None:
        """Keep it until it is lost, the limit is reached, or many that begin alike were used
        later; not at all if it alone is above the limit."""
        if history.nbytes > self._limit_bytes:
            return
        cut, prompt = beginnings = _beginnings(history)
        alike = self._under[cut]
        if len(alike) == MOST_ALIKE:
            self.drop(alike[0])
            alike = self._under[cut]
        alike.append(history)
        self._prompts[prompt][history.own_prompt_tokens] += 1
        for beginning in (cut, prompt):
            self._lengths[history.namespace].add(beginning[1])
        self._by_use[history] = beginnings
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
        self._under[cut].remove(history)
        if not self._under[cut]:
            del self._under[cut]
        prompts = self._prompts[prompt]
        prompts[history.own_prompt_tokens] -= 1
        if not prompts[history.own_prompt_tokens]:
            del prompts[history.own_prompt_tokens]
        if not prompts:
            del self._prompts[prompt]
        lengths = self._lengths[history.namespace]
        for beginning in (cut, prompt):
            lengths.remove(beginning[1])
        if not lengths.distinct:
            del self._lengths[history.namespace]

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
        """The histories that this prompt continues, the farthest first, and the longest prompt of a
        request whose history it leaves, 0 for none.

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
        matches.sort(key=lambda match: match[0], reverse=True)
        left = [length for length, count in prompts.items() if count]
        return [match for _, match in matches], max(left, default=0)

    def use(self, history: History) -> None:
        """It is continued: others are dropped before it."""
        self._by_use.move_to_end(history)
        if history.recorded_bytes:
            self._recorded.move_to_end(history)
        alike = self._under[self._by_use[history][0]]
        alike.remove(history)
        alike.append(history)

    def _begun(self, namespace: Hashable, prompt: array[int]) -> tuple[list[History], Counter[int]]:
        """Histories of which the prompt contains what every cut does and goes on, those of the
        longest and then the last used first; and length -> how many requests had a prompt that it
        goes on behind."""
        digest, at = blake2b(digest_size=_DIGEST_BYTES), 0
        begun: list[list[History]] = []
        prompts: Counter[int] = Counter()
        lengths = self._lengths.get(namespace)
        for length in () if lengths is None else lengths.distinct:
            if length >= len(prompt):
                break
            digest.update(memoryview(prompt)[at:length])
            at, beginning = length, (namespace, length, digest.digest())
            if beginning in self._under:
                begun.append(self._under[beginning])
            for own_tokens, count in self._prompts.get(beginning, {}).items():
                prompts[own_tokens] += count if own_tokens < len(prompt) else 0
        last_first = chain.from_iterable(reversed(alike) for alike in reversed(begun))
        return [*islice(last_first, MOST_ALIKE)], prompts


class _Lengths:
    """Lengths of beginnings, ascending, each as often as it was added."""

    def __init__(self) -> None:
        self.distinct: list[int] = []
        self._count: Counter[int] = Counter()

    def add(self, length: int) -> None:
        if not self._count[length]:
            insort(self.distinct, length)
        self._count[length] += 1

    def remove(self, length: int) -> None:
        self._count[length] -= 1
        if not self._count[length]:
            del self._count[length], self.distinct[bisect_left(self.distinct, length)]


def _beginnings(history: History) -> tuple[Beginning, Beginning]:
    """What every cut of it contains, and the prompt of its request, as the next prompt has them."""
    sent = memoryview(history.sent)
    first, own = (
        (history.namespace, length, blake2b(sent[:length], digest_size=_DIGEST_BYTES).digest())
        for length in (history.first_cut - history.unsent_tokens, history.sent_prompt_tokens)
    )
    return first, own


def common_tokens(one: array[int], other: array[int]) -> int:
    """How many tokens two sequences begin with alike."""
    shorter = min(len(one), len(other))
    a, b = (np.frombuffer(tokens, dtype=np.int64, count=shorter) for tokens in (one, other))
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if len(unequal) else shorter
