"""Turns of conversations against the masking oracle, whatever happened to their rows on the way.

A row may have continued a history or computed its whole prompt, and may have done the other when it
was recomputed. A request reports the history of its last row only; for the rows before, one of the
histories that it may continue must explain the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from oracle import Event, MaskingOracle, behind, phases
from servers import output_logprobs

LOGPROB_TOLERANCE = 2e-3


@dataclass(eq=False)
class Turn:
    """One request of a conversation that has finished.

    Attributes:
        before: the requests that generated the text that it goes on from: one, or ``n`` samples.
        events: of the trace.
        compactions: that its last row has been through, when it is judged.
    """

    prompt: Sequence[int]
    answer: dict[str, Any]
    before: Sequence[Turn] = ()
    events: Sequence[Event] = ()
    compactions: list[Event] = field(default_factory=list)

    @property
    def rid(self) -> str:
        return str(self.answer["meta_info"]["id"])

    @property
    def info(self) -> dict[str, Any]:
        return self.answer["meta_info"]["skipkv"]

    @property
    def output_ids(self) -> list[int]:
        return list(self.answer["output_ids"])

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output_ids]

    def histories(self) -> Iterator[list[Event]]:
        """What its row may have been through before it: that of an earlier turn, or nothing."""
        for turn in self.before:
            yield turn.compactions
            yield from turn.histories()
        yield []

    def judge(self, oracle: MaskingOracle) -> float | None:
        """The largest difference of a log-probability from the oracle's; None: no history that the
        request may have continued explains its tokens. Earlier turns are judged before."""
        largest, found = 0.0, phases(len(self.output_ids), self.events)
        for number, (first, stop, own) in enumerate(found):
            is_last, tried = number == len(found) - 1, list[list[Event]]()
            for history in self.histories():
                if history in tried or not self._agrees(history, own, is_last=is_last):
                    continue
                tried.append(history)
                gap = self._gap(oracle, first, stop, [*history, *own])
                if gap is not None:
                    break
            else:
                return None
            self.compactions, largest = [*history, *own], max(largest, gap)
        return largest

    def _agrees(self, history: Sequence[Event], own: Sequence[Event], *, is_last: bool) -> bool:
        """Whether a row that began with this history has the lengths that are reported."""
        evicted, reported = evicted_tokens(history), set[int]()
        if is_last:
            reported.add(self.info["reused_tokens"] - self.info["reused_kv_tokens"])
        if own:
            reported.add(len(self.prompt) + own[0]["generated"] - own[0]["before"])
        return reported <= {evicted}

    def _gap(
        self, oracle: MaskingOracle, first: int, stop: int, compactions: Sequence[Event]
    ) -> float | None:
        """Of these generated tokens."""
        events = [behind(event, len(self.prompt)) for event in compactions]
        verdict = oracle.judge(self.prompt, self.output_ids[:stop], events)
        pairs = zip(output_logprobs(self.answer), verdict.logprobs.tolist(), strict=False)
        gap = max([abs(ours - theirs) for ours, theirs in pairs][first:])
        right = gap <= LOGPROB_TOLERANCE and not any(at >= first for at in verdict.wrong)
        return gap if right else None


def evicted_tokens(compactions: Sequence[Event]) -> int:
    """Of a row that has been through these."""
    if not compactions:
        return 0
    last = compactions[-1]
    return int(last["prompt_tokens"] + last["generated"] - last["after"])
