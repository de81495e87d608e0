"""What a trace says of each request, in the form that the page draws.

A compaction's line lists what was kept. The page needs the opposite: when each token was evicted.
Positions are logical, as in the trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import numpy as np

from sgl_skipkv.config import LIMIT_NAME
from sgl_skipkv.explorer.events import Compact, Finish, Recompute, TraceEvent

#: tokens of one request that a page shows; more would be too much for a browser
LIMIT_TOKENS: Final = 131_072
_SUMMARY: Final = (
    *("compactions", "evicted_tokens", "kv_tokens", "peak_kv_tokens", "mean_kv_tokens"),
    *("full_kv_tokens", "sentences", "evicted_sentences"),
)

Decode = Callable[[Sequence[int]], list[str]]


@dataclass
class Life:
    """From a request's prefill to its end, or to the recomputation that undoes its evictions.

    Attributes:
        first_step: how many compactions came before it.
        generated: output tokens when it began.
        prompt_tokens: logical.
        evicted_at: int32 [positions], the number of the compaction that evicted a token, from 1 on
            over all lives; 0: none did.
    """

    first_step: int
    generated: int
    prompt_tokens: int
    evicted_at: np.ndarray[Any, np.dtype[np.int32]] = field(
        default_factory=lambda: np.zeros(0, dtype=np.int32)
    )

    def compact(self, step: int, event: Compact) -> None:
        """Note what this compaction evicted."""
        positions = min(event.prompt_tokens + event.generated, LIMIT_TOKENS)
        grown = np.zeros(max(positions, len(self.evicted_at)), dtype=np.int32)
        grown[: len(self.evicted_at)] = self.evicted_at
        is_evicted = np.ones(positions, dtype=bool)
        kept = np.asarray(event.kept, dtype=np.int64)
        is_evicted[kept[kept < positions]] = False
        known = grown[:positions]
        known[is_evicted & (known == 0)] = step
        self.prompt_tokens, self.evicted_at = event.prompt_tokens, grown

    def data(self) -> dict[str, Any]:
        runs = [(len([*run]), step) for step, run in groupby(self.evicted_at.tolist())]
        return {
            "first": self.first_step,
            "generated": self.generated,
            "prompt": self.prompt_tokens,
            "evicted": [number for run in runs for number in run],  # run length, compaction, ...
        }


@dataclass(eq=False)
class TracedRequest:
    """One request.

    Attributes:
        number: identifies it on the page; a client may use a request id twice.
        source: the replica that it ran on; empty where there is one alone.
        steps: per compaction: generated tokens, row tokens before and after it.
        similar: first position of an evicted sentence -> span of the later sentence that is most
            similar to it, and their cosine.
        changed: bytes of the trace that were read when it changed last.
        continues: the number of the one that it goes on from, if that was in the trace.
        text: of each output token, once it was decoded.
    """

    number: int
    rid: str
    source: str
    policy: str = ""
    lives: list[Life] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    similar: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    finish: Finish | None = None
    continues: int | None = None
    changed: int = 0
    text: list[str] | None = None

    def data(self, decode: Decode | None) -> dict[str, Any]:
        """As the page reads it (``state.js``).

        Args:
            decode: the text of each token; None: the page shows ids.
        """
        life, finish = self.lives[-1], self.finish
        shown: dict[str, Any] = {
            "number": self.number,
            "rid": self.rid[:LIMIT_NAME],
            "source": self.source,
            "policy": self.policy[:LIMIT_NAME],
            "prompt": life.prompt_tokens,
            "steps": self.steps,
            "lives": [life.data() for life in self.lives],
            "similar": [[start, *match] for start, match in self.similar.items()],
            "finished": finish is not None,
        }
        if finish is None:
            return shown
        ids = finish.output_ids[:LIMIT_TOKENS]
        if self.text is None and decode is not None:
            self.text = decode(ids)
        shown |= {
            "prompt": finish.prompt_tokens,
            "budget": finish.kv_budget,
            "reason": finish.finish_reason,
            "tokens": len(finish.output_ids),
            "ids": ids,
            "text": self.text,
            "sentences": finish.sentence_spans,
            "params": finish.kv_params,
            "reuse": finish.kv_reuse,
            "summary": {name: getattr(finish, name) for name in _SUMMARY},
        }
        if finish.continues is not None:
            shown["continues"] = {
                "rid": finish.continues.rid[:LIMIT_NAME],
                "tokens": finish.continues.tokens,
                "number": self.continues,
            }
        return shown


class Book:
    """The requests of a trace.

    Args:
        limit: how many it holds; those that changed least recently are forgotten. None: all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._next = limit, 1
        self._requests: OrderedDict[int, TracedRequest] = OrderedDict()
        self._open: dict[tuple[str, str], TracedRequest] = {}
        self._finished: dict[tuple[str, str], TracedRequest] = {}

    def __iter__(self) -> Iterator[TracedRequest]:
        """In the order in which they appeared."""
        return iter(sorted(self._requests.values(), key=lambda request: request.number))

    def add(self, event: TraceEvent, source: str = "", at: int = 0) -> None:
        """Add a line.

        Args:
            source: which trace file of several it is from.
            at: bytes of that file up to its end.
        """
        name = (source, event.rid)
        request = self._open.get(name)
        if request is None:
            request = self._open[name] = TracedRequest(self._next, event.rid, source)
            self._requests[request.number] = request
            self._next += 1
        if not request.lives:
            request.lives.append(Life(0, 0, 0))
        request.changed = at
        self._requests.move_to_end(request.number)
        if isinstance(event, Recompute):
            prompt_tokens = request.lives[-1].prompt_tokens
            request.lives.append(Life(len(request.steps), event.generated, prompt_tokens))
        elif isinstance(event, Compact):
            request.policy = event.policy
            request.steps.append((event.generated, event.before, event.after))
            request.lives[-1].compact(len(request.steps), event)
            for span, match in zip(event.evicted_sentences, event.similar, strict=False):
                if match is not None:
                    request.similar[span[0]] = match
        else:
            self._finish(name, request, event)
        self._forget()

    def _finish(self, name: tuple[str, str], request: TracedRequest, event: Finish) -> None:
        request.policy, request.finish = event.policy, event
        request.lives[-1].prompt_tokens = event.prompt_tokens
        if event.continues is not None:
            continued = self._finished.get((name[0], event.continues.rid))
            request.continues = None if continued is None else continued.number
        del self._open[name]
        self._finished[name] = request

    def _forget(self) -> None:
        if self._limit is None or len(self._requests) <= self._limit:
            return
        _, oldest = self._requests.popitem(last=False)
        name = (oldest.source, oldest.rid)
        for known in (self._open, self._finished):
            if known.get(name) is oldest:
                del known[name]
