"""A scheduler's worth of requests without SGLang: real Runtime and Recorder, made-up keys and
queries.

It keeps its own books in plain lists (slots, logical positions), compares them with what the
runtime does at every compaction, and replays the order of SGLang's steps: compact, allocate, write
the row, forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from score_inputs import some_centres, some_reach
from torch import Tensor

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.compaction import Compaction, Plan
from sgl_skipkv.eviction.compactor import StepWork
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.eviction.read_back import read_back
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.policy.inputs.paged_cache import PagedCache
from sgl_skipkv.ranks import ONE_RANK, Ranks
from sgl_skipkv.recording.recorder import ModelShape, Recorder, Recording
from sgl_skipkv.recording.sentences import Delimiters
from sgl_skipkv.request.settings import resolve_request
from sgl_skipkv.request.state import RequestState
from sgl_skipkv.request.trace import TraceWriter

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 4, 2, 16, 12
KV_TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
WORD, DELIMITER, COLON = 0, 1, 2
TEXTS = [(DELIMITER, ".\n"), (COLON, ":\n")]
VOCAB = 4
# What the tests' usual call asks for.
BUDGET, INTERVAL, PROMPT = 40, 12, 10
PARAMETERS: dict[str, Any] = {"interval": INTERVAL, "delimiters": "paper"}


@dataclass(eq=False)
class Call:
    """One request with all it will ever cache, drawn from its own seed.

    Attributes:
        tokens: what the request generates, in order.
        keys, values, queries: float [layers, tokens, heads, d]; hidden: float [tokens, D]; by
            position.
        slots, positions: the test's own books of the row.
        decoded: decode steps since the last prefill.
        compactions: kept logical positions after each compaction.
    """

    rid: str
    state: RequestState
    prompt_tokens: int
    tokens: list[int]
    keys: Tensor
    values: Tensor
    queries: Tensor
    hidden: Tensor
    row: int = 0
    generated: int = 0
    decoded: int = 0
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    compactions: list[list[int]] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        """Sampled so far: every fed token and the next one."""
        return self.tokens[: self.generated + 1]

    def attention(self, step: int, positions: Sequence[int]) -> Tensor:
        """float64 [n], what the query at a position gave these: mean over heads and layers."""
        groups = QUERY_HEADS // KV_HEADS
        keys = self.keys[:, positions].double().repeat_interleave(groups, dim=2)
        logits = torch.einsum("lnhd,lhd->lhn", keys, self.queries[:, step].double())
        return (logits / HEAD_DIM**0.5).softmax(dim=2).mean(dim=(0, 1))


class SyntheticServer:
    """One scheduler process: rows, slots of a pool, one runtime."""

    def __init__(
        self,
        *,
        rows: int = 4,
        tracks: int = 4,
        width: int = 600,
        pool_tokens: int = 2000,
        trace: TraceWriter | None = None,
        device: torch.device | None = None,
        ranks: Ranks = ONE_RANK,
        **config: Any,
    ) -> None:
        self.device, self.ranks = device or torch.device("cpu"), ranks
        kv_heads, query_heads = KV_HEADS // ranks.size, QUERY_HEADS // ranks.size
        self.config = ServerConfig(
            **{"check_ledger": True, "query_window": 16, "kv_policy": "skipkv", **config}
        )
        on = {"device": self.device}
        self.req_to_token = torch.zeros(rows + 1, width, dtype=torch.int32, **on)
        self.pool_keys = torch.zeros(LAYERS, pool_tokens + 1, kv_heads, HEAD_DIM, **on)
        self.pool_values = torch.zeros_like(self.pool_keys)
        self.free_rows = list(range(1, rows + 1))
        self.free_slots = list(range(1, pool_tokens + 1))
        self.recorder = Recorder(
            ModelShape(LAYERS, query_heads, HEAD_DIM, HIDDEN),
            track_count=tracks,
            query_window=self.config.query_window,
            max_sentences=self.config.max_sentences,
            delimiters=Delimiters(TEXTS, VOCAB),
            dtype=self.pool_keys.dtype,
            device=self.device,
        )
        self.recorder.use_rows(rows + 1)
        centres = some_centres(LAYERS, QUERY_HEADS, HEAD_DIM, self.device)
        mean, magnitude = (self.own(part, 1) for part in (centres.mean, centres.magnitude))
        self.runtime = Runtime(
            self.config,
            recorder=self.recorder,
            scale=HEAD_DIM**-0.5,
            pool_tokens=pool_tokens,
            kv_token_bytes=KV_TOKEN_BYTES,
            trace=trace,
            centres=replace(centres, mean=mean, magnitude=magnitude),
            reach=some_reach(LAYERS, KV_HEADS, self.device),
            ranks=ranks,
        )

    def own(self, heads: Tensor, dim: int) -> Tensor:
        """This rank's part of the heads."""
        return heads.chunk(self.ranks.size, dim=dim)[self.ranks.index]

    def open(
        self,
        tokens: Sequence[int],
        *,
        prompt: Sequence[int] = (3,) * PROMPT,
        rid: str = "call",
        seed: int = 0,
        **keys: Any,
    ) -> Call:
        """A request arrives; ``keys`` are those of the API."""
        settings = resolve_request(keys, self.config)
        assert settings is not None
        total = len(prompt) + len(tokens)
        draw, other = (torch.Generator().manual_seed(one) for one in (seed, 1000 + seed))
        return Call(
            rid,
            self.runtime.open(rid, settings, prompt),
            len(prompt),
            list(tokens),
            self._heads(total, KV_HEADS, draw),
            self._heads(total, KV_HEADS, other),
            self._heads(total, QUERY_HEADS, draw),
            torch.randn(total, HIDDEN, generator=draw).to(self.device),
        )

    def prefill(self, call: Call, *, cached: int = 0, chunk: int = 10**9) -> None:
        """Admission and prefill of the prompt, or of prompt and output after a retraction.

        Args:
            cached: tokens that the radix cache already has; they are not computed.
            chunk: tokens of one prefill step.
        """
        call.row = call.row or self.free_rows.pop()
        total = call.prompt_tokens + len(call.output_ids) if call.generated else call.prompt_tokens
        self._append(call, cached)
        while len(call.slots) < total:
            first = len(call.slots)
            count = min(chunk, total - first)
            self._append(call, count)
            self.runtime.admit(call.state, call.row, total)
            self.runtime.start_recording(call.state)
            self._record_prefill(call, first, count)
        call.decoded = 0
        call.generated = total - call.prompt_tokens

    def decode(self, *calls: Call) -> None:
        """One step of a batch: compact who is due, together, then one token each."""
        self.compact_due(*calls)
        for call in calls:
            self._append(call, 1)
            call.decoded += 1
            call.generated += 1
        rows = self._tensor([call.row for call in calls])
        at = [call.positions[-1] for call in calls]
        recording = self.recorder.decode_recording(rows, self._tensor(at))
        for layer in range(LAYERS):
            q = torch.stack([call.queries[layer, p] for call, p in zip(calls, at, strict=True)])
            self.recorder.record_queries(recording, layer, q)
        ids = [call.tokens[p - call.prompt_tokens] for call, p in zip(calls, at, strict=True)]
        hidden = torch.stack([call.hidden[p] for call, p in zip(calls, at, strict=True)])
        self.recorder.record_hidden(recording, self._tensor(ids), hidden)

    def run(self, call: Call, steps: int) -> None:
        for _ in range(steps):
            self.decode(call)

    def compacting(self, call: Call, steps: int) -> Iterator[list[int]]:
        """Run these steps; at each that compacts, what was in the row before."""
        for _ in range(steps):
            before, done = call.positions.copy(), len(call.compactions)
            self.decode(call)
            if len(call.compactions) > done:
                yield before

    def compact_due(self, *calls: Call) -> list[Plan]:
        """What happens before a decode step."""
        for call in calls:
            self.runtime.observe(call.state, len(call.slots))
        running = [call for call in calls if call.decoded]
        rows = {call.state: len(call.slots) for call in running}
        work = self.runtime.compactor.work_before_step(rows)
        return self.book(self.before_step(work, running)(), running)

    def before_step(self, work: StepWork, calls: Sequence[Call]) -> Callable[[], list[Compaction]]:
        """Does this work for some of these requests. The test's own part is done already."""
        asked = {state for states in work for state in states}
        due = {call.state: self.due(call) for call in calls if call.state in asked}
        return partial(
            *(self.runtime.compactor.before_step, work, due.__getitem__, self.req_to_token)
        )

    def is_due(self, call: Call) -> bool:
        return self.runtime.compactor.due(call.state, len(call.slots))

    def plan(self, call: Call) -> Plan:
        """What a compaction would do now."""
        return self.plans([call])[0]

    def plans(self, calls: Sequence[Call]) -> list[Plan]:
        """What a compaction of several requests would do now."""
        self.read_back(calls)
        followed = [call for call in calls if call.state.settings.policy.needs_attention]
        self.runtime.compactor.follow([self.due(call) for call in followed])
        return self.runtime.compactor.planner.plan([self.due(call) for call in calls])

    def read_back(self, calls: Sequence[Call]) -> None:
        """What the last compactions kept has arrived."""
        for call in calls:
            read_back(call.state, self.runtime._trace)

    def compact(self, calls: Sequence[Call]) -> list[Plan]:
        """Compact these requests together, due or not."""
        return self.book(self.compaction_of(calls)(), calls)

    def compaction_of(self, calls: Sequence[Call]) -> Callable[[], list[Compaction]]:
        """Compacts these requests together; what that returns is to be booked."""
        states = [call.state for call in calls]
        followed = [state for state in states if state.settings.policy.needs_attention]
        return self.before_step(StepWork(states, followed, []), calls)

    def book(self, done: Sequence[Compaction], calls: Sequence[Call]) -> list[Plan]:
        """Free the slots of compactions, and hold the rows against them."""
        of_state = {id(call.state): call for call in calls}
        plans = []
        for compaction in done:
            for plan, freed in zip(compaction.plans, compaction.freed, strict=True):
                call, kept = of_state[id(plan.state)], plan.selection.kept.tolist()
                assert freed.tolist() == [call.slots[i] for i in plan.selection.evicted.tolist()]
                call.slots = [call.slots[i] for i in kept]
                call.positions = [call.positions[i] for i in kept]
                call.compactions.append(call.positions.copy())
                assert call.state.kv.last is not None
                assert call.state.kv.last.positions.tolist() == call.positions
                assert self.row_of(call) == call.slots
                self.free_slots += freed.tolist()
                plans.append(plan)
        return plans

    def due(self, call: Call) -> Due:
        return Due(
            *(call.state, len(call.slots), call.output_ids),
            *(self.cached(call, pool) for pool in (self.pool_keys, self.pool_values)),
            PagedCache.of(list(self.pool_keys), self.req_to_token, v_layers=list(self.pool_values)),
        )

    def cached(self, call: Call, pool: Tensor) -> Callable[[int], Tensor]:
        """layer -> cached keys, or values, in row order."""
        row = self.req_to_token[call.row, : len(call.slots)].long()
        return lambda layer: pool[layer][row]

    def finish(self, call: Call, reason: str = "length") -> dict[str, Any]:
        """The request ends; its row and slots go back."""
        own = len(call.slots)
        self._give_back(call)
        self.runtime.close(call.state, own, call.output_ids, reason)
        assert call.state.report.summary is not None
        return call.state.report.summary

    def retract(self, call: Call) -> None:
        """The request loses its row and will be prefilled again."""
        self._give_back(call)
        self.runtime.retract(call.state, generated=len(call.output_ids))

    def row_of(self, call: Call) -> list[int]:
        return list(self.req_to_token[call.row, : len(call.slots)].tolist())

    def assert_idle(self) -> None:
        """Everything was given back."""
        assert self.runtime.open_requests == 0
        assert len(self.recorder.free_tracks) == len(self.recorder.sentences.vectors) - 1
        assert not self.recorder.track_of_row.any()
        assert len(set(self.free_slots)) == self.pool_keys.shape[1] - 1

    def _append(self, call: Call, count: int) -> None:
        """New slots at the end of the row, with the keys of the next positions."""
        for _ in range(count):
            position = call.positions[-1] + 1 if call.positions else 0
            # The pool is shuffled by use; take from the front, as SGLang's allocator does.
            slot = self.free_slots.pop(0)
            self.pool_keys[:, slot] = call.keys[:, position]
            self.pool_values[:, slot] = call.values[:, position]
            self.req_to_token[call.row, len(call.slots)] = slot
            call.slots.append(slot)
            call.positions.append(position)

    def _record_prefill(self, call: Call, first: int, count: int) -> None:
        state = call.state
        if not state.held.track_id:
            return
        stop = first + count
        window = self.config.query_window
        wanted = range(max(first, state.records_from, stop - window), stop)
        tokens = [position - first for position in wanted]
        generated_from = max(call.prompt_tokens - first, 0)
        of_track = self._tensor([state.held.track_id]), slice(generated_from, count)
        recording = Recording(
            self._tensor([state.held.track_id] * len(tokens)),
            self._tensor([*wanted]),
            tokens=self._tensor(tokens),
            generated=(of_track,) if generated_from < count else (),
        )
        for layer in range(LAYERS):
            self.recorder.record_queries(
                recording, layer, call.queries[layer, first : first + count]
            )
        ids = [
            call.tokens[p - call.prompt_tokens] if p >= call.prompt_tokens else 3
            for p in range(first, first + count)
        ]
        self.recorder.record_hidden(
            recording, self._tensor(ids), call.hidden[first : first + count]
        )

    def _heads(self, tokens: int, heads: int, draw: torch.Generator) -> Tensor:
        drawn = torch.randn(LAYERS, tokens, heads, HEAD_DIM, generator=draw)
        return self.own(drawn, 2).to(self.device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _give_back(self, call: Call) -> None:
        self.free_slots += call.slots
        self.free_rows.append(call.row)
        call.row, call.slots, call.positions = 0, [], []


def words(*lengths: int) -> list[int]:
    """Sentences of these lengths, each ending in a delimiter."""
    return [token for length in lengths for token in [WORD] * (length - 1) + [DELIMITER]]


def served(
    server: SyntheticServer, tokens: list[int] | None = None, *, prefill: bool = True, **call: Any
) -> Call:
    """The usual call; ``call`` changes what it asks for."""
    parameters = {**PARAMETERS, **call.pop("kv_params", {})}
    keys = {"kv_budget": BUDGET, "kv_params": parameters, **call}
    opened = server.open(tokens or words(5, 3, 7, 4, 9) * 10, **keys)
    if prefill:
        server.prefill(opened)
    return opened


def unlike(
    server: SyntheticServer, asked: Sequence[tuple[str, dict[str, Any]]], **call: Any
) -> list[Call]:
    """Requests of these policies and parameters, with sentences of every length and prompts of
    several."""
    return [
        served(
            *(server, words(*(2 + (seed + i) % 7 for i in range(40)))),
            **{"rid": f"r{seed}", "seed": seed, "kv_policy": name, "kv_params": parameters},
            **{"prompt": [3] * (5 + 3 * (seed % 5)), **call},
        )
        for seed, (name, parameters) in enumerate(asked)
    ]


def decode_until_due(server: SyntheticServer, calls: Sequence[Call]) -> None:
    """All in the same step; what their last compactions kept has arrived."""
    while not all(map(server.is_due, calls)):
        assert not any(map(server.is_due, calls))
        server.decode(*calls)
    server.read_back(calls)
