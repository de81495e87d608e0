"""The histories of one scheduler process, found by the tokens that a prompt begins with.

A client manages nothing: a prompt that begins with an earlier request's prompt and output continues
that request's row. The radix tree decides whether the KV still exists.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

import numpy as np

from sgl_skipkv.offload.host_memory import HostMemory
from sgl_skipkv.reuse.history import History

_DIGEST_BYTES = 16


#: what sequences of one namespace begin with: the namespace, how many tokens, and their digest
Beginning = tuple[Hashable, int, bytes]


class HistoryMatch(NamedTuple):
    """A history, and how many of its logical tokens a prompt continues."""

    history: History
    cut: int


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
        self._by_use: OrderedDict[History, None] = OrderedDict()
        #: under two beginnings of each: what every cut contains, and its request's prompt
        self._under: defaultdict[Beginning, list[History]] = defaultdict(list)
        self._lengths: defaultdict[Hashable, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_use)

    def make_room(self, recorded_bytes: int) -> bool:
        """Drop old histories until the host memory has room for these recordings; whether it has.

        Raises:
            MemoryError: the host has no memory for the slab.
        """
        self.memory.reserve()
        while self._by_use and not self.memory.fits(recorded_bytes):
            self.drop(next(iter(self._by_use)))
        return self.memory.fits(recorded_bytes)

    def add(self, history: History) -> None:
        """Keep it until it is lost or the limit is reached."""
        self._by_use[history] = None
        self._used_bytes += history.nbytes
        for beginning in _beginnings(history):
            self._under[beginning].append(history)
            insort(self._lengths[history.namespace], beginning[1])
        while self._used_bytes > self._limit_bytes:
            self.drop(next(iter(self._by_use)))

    def drop(self, history: History) -> None:
        """Forget it, because its KV or its recordings are gone, if it still is known."""
        if history not in self._by_use:
            return
        del self._by_use[history]
        self._used_bytes -= history.nbytes
        for beginning in _beginnings(history):
            self._under[beginning].remove(history)
            self._lengths[history.namespace].remove(beginning[1])
            if not self._under[beginning]:
                del self._under[beginning]
        if not self._lengths[history.namespace]:
            del self._lengths[history.namespace]

    def clear(self) -> None:
        """Forget all: the radix tree was flushed."""
        for history in list(self._by_use):
            self.drop(history)

    def find(self, namespace: Hashable, tokens: Sequence[int]) -> tuple[HistoryMatch | None, bool]:
        """The history that this prompt continues farthest, and whether it leaves another one.

        At least one token of the prompt is not of the history, because a request must compute one.
        A prompt leaves a history if it goes on behind its request's prompt and differs from the
        output before the last compaction: what was evicted for that output is gone.
        """
        prompt, best, farthest, left = array("q", tokens), None, 0, 0
        for history in self._begun(namespace, prompt):
            sent_tokens = min(_common_tokens(history.sent, prompt), len(prompt) - 1)
            cut = sent_tokens + history.unsent_tokens
            if cut >= history.first_cut:
                if sent_tokens >= farthest:
                    best, farthest = HistoryMatch(history, cut), sent_tokens
            elif history.own_prompt_tokens < len(prompt):
                left = max(left, history.own_prompt_tokens)
        if best is None:
            return None, left > 0
        self._by_use.move_to_end(best.history)
        return best, left > best.history.own_prompt_tokens

    def _begun(self, namespace: Hashable, prompt: array[int]) -> Iterator[History]:
        """Histories of which the prompt begins with one of the two beginnings."""
        digest, at = blake2b(digest_size=_DIGEST_BYTES), 0
        for length, _ in groupby(self._lengths.get(namespace, ())):
            if length > len(prompt):
                return
            digest.update(memoryview(prompt)[at:length])
            at = length
            yield from self._under.get((namespace, length, digest.digest()), ())


def _beginnings(history: History) -> list[Beginning]:
    """What every cut of it contains, and the prompt of its request, as the next prompt has them."""
    every_cut = history.first_cut - history.unsent_tokens
    sent, beginnings = memoryview(history.sent), []
    for length in {every_cut, history.own_prompt_tokens - history.edge_tokens}:
        digest = blake2b(sent[:length], digest_size=_DIGEST_BYTES).digest()
        beginnings.append((history.namespace, length, digest))
    return beginnings


def _common_tokens(one: array[int], other: array[int]) -> int:
    """How many tokens two sequences begin with alike."""
    shorter = min(len(one), len(other))
    a, b = (np.frombuffer(tokens, dtype=np.int64, count=shorter) for tokens in (one, other))
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if len(unequal) else shorter
