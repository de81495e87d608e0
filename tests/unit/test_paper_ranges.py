"""Logical positions against the paper's range monitoring (SkipKV, eqs 9-11): the same sentences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_inputs import some_sentences

from sgl_skipkv.policy.skipkv import sentence_penalty


class RangeMonitor:
    """Start and end of every sentence in cache coordinates, inclusive, as the paper moves them.

    ``edge`` is where the last known sentence ends, kept also when that sentence is gone: eq. 10
    starts the next one behind it.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[int, int]] = {}
        self.edge = -1

    def append(self, spans: Sequence[tuple[int, int]], known: int, cached: int, made: int) -> None:
        """Eqs 9 and 10: sentences closed since the last compaction, in order.

        Args:
            spans: all closed sentences in generation space, inclusive. known: how many of them the
                last compaction knew. cached, made: cache length and generation length now.
        """
        for i in range(known, len(spans)):
            end = cached - (made - spans[i][1])
            self.ranges[i] = (self.edge + 1, end)
            self.edge = end

    def evict(self, survivors: Sequence[int]) -> None:
        """Eq. 11: first survivor not before the start, last survivor not behind the end."""

        def moved(start: int, end: int) -> tuple[int, int]:
            first = [k for k, p in enumerate(survivors) if p >= start]
            last = [k for k, p in enumerate(survivors) if p <= end]
            return min(first, default=len(survivors)), max(last, default=-1)

        new = {i: moved(*span) for i, span in self.ranges.items()}
        self.ranges = {i: (b, e) for i, (b, e) in new.items() if b <= e}
        self.edge = moved(0, self.edge)[1]


@settings(max_examples=150)
@given(st.data())
def test_logical_positions_equal_the_papers_ranges(data: st.DataObject) -> None:
    """The sentence of every cached token, through random evictions, by both methods."""
    monitor = RangeMonitor()
    positions: list[int] = []
    spans: list[tuple[int, int]] = []  # inclusive
    made, known = 0, 0
    for _ in range(data.draw(st.integers(1, 5))):
        before = made
        for length in data.draw(st.lists(st.integers(2, 6), max_size=4)):
            start = spans[-1][1] + 1 if spans else 0
            made = max(start + length, made + 1)  # the first may finish a sentence that was open
            spans.append((start, made - 1))
        made += data.draw(st.integers(0, 3))
        positions += range(before, made)
        monitor.append(spans, known, len(positions), made)
        known = len(spans)

        by_ranges = [-1] * len(positions)
        for i, (start, end) in monitor.ranges.items():
            by_ranges[start : end + 1] = [i] * (end + 1 - start)
        assert owners(positions, spans) == by_ranges

        stays = data.draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions)))
        survivors = [k for k, stay in enumerate(stays) if stay]
        monitor.evict(survivors)
        positions = [positions[k] for k in survivors]
        assert set(monitor.ranges) == {
            i for i, (b, e) in enumerate(spans) if any(b <= p <= e for p in positions)
        }


def owners(positions: list[int], spans: list[tuple[int, int]]) -> list[int]:
    """The sentence of each token by ``sentence_penalty``: every sentence has its own likeness."""
    if not spans:
        return [-1] * len(positions)
    likeness = [0.9 + 0.001 * i for i in range(len(spans))]
    sentences = some_sentences(
        *[(b, e + 1, value) for (b, e), value in zip(spans, likeness, strict=True)]
    )
    found = sentence_penalty(torch.tensor(positions, dtype=torch.int64), sentences, 0.5)
    return [-1 if value == 0 else round((value - 0.9) / 0.001) for value in found.tolist()]
