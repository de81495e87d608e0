"""The made-up forward pass: it hashes what a real one would look at, and records as that one does.

Positions, tokens and steering are held against what they have to be, token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from pool_books import Books
from pool_content import (
    DELIMITER,
    HIDDEN,
    STOP,
    VOCAB,
    hidden_of,
    keys_of,
    queries_of,
    tag_after,
    values_of,
)
from pool_steering import added, strength
from pool_turns import Entry, separated


def next_token(tag: int) -> int:
    """What the model samples: delimiters often, a stop token seldom."""
    if tag % 997 == 0:
        return STOP
    return DELIMITER if tag % 6 == 0 else 3 + tag % (VOCAB - 3)


class ForwardStream:
    """A GPU's forward stream. What was launched runs at once, or at the latest that can be: when
    somebody waits for it, when something else is launched, when its results are looked at."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self._step: Callable[[], None] | None = None

    def launch(self, step: Callable[[], None]) -> None:
        self.run()
        self._step = step
        if not self.late:
            self.run()

    def follow(self, work: Callable[[], None]) -> None:
        """Something behind the step that was launched last, as a part of it."""
        step = self._step
        if step is None:
            work()
            return

        def both() -> None:
            step()
            work()

        self._step = both

    def run(self) -> None:
        """The step that was launched last ends."""
        step, self._step = self._step, None
        if step is not None:
            step()


class ScheduleStream:
    """The stream that the scheduler's own operations run on, at once."""

    def wait_stream(self, other: ForwardStream) -> None:
        other.run()


class Forward(Books):
    """Books with a forward pass."""

    def _forward(self, batch: Any) -> list[int | None]:
        """Write content for every new token, record it as a real forward would, sample."""
        from sgl_skipkv.patches.engine.forward import prepare_forward
        from sgl_skipkv.patches.engine.sampling import shift_positions

        self.forward_stream.run()  # nothing of a step begins before the one before has ended
        self._check_open_sentences()
        decode = batch.forward_mode.is_decode()
        counts = [1] * len(batch.reqs) if decode else batch.extend_lens
        ends = zip(batch.seq_lens.tolist(), counts, strict=True)
        on = {"device": self.device}
        physical = torch.cat([torch.arange(end - count, end, **on) for end, count in ends])
        forward = SimpleNamespace(
            forward_mode=batch.forward_mode,
            orig_seq_lens=batch.orig_seq_lens,
            positions=physical,
            mrope_positions=physical.repeat(3, 1),
            mm_inputs=batch.multimodal_inputs,
            req_pool_indices=batch.req_pool_indices,
            sampling_info=SimpleNamespace(sampling_seed=torch.zeros(len(counts), **on)),
        )
        prepare_forward(forward, type(self), batch, self.runner)
        assert (forward.mrope_positions == forward.positions).all(), "of text, on every axis"
        noise = forward.positions.clone() if decode else batch.seq_lens - 1
        shift_positions(None, None, forward.sampling_info, False, [], [], noise)
        positions = forward.positions.split(list(counts))
        # The device knows the token it fed; the scheduler may not have seen it yet.
        if decode:
            tokens = [req.fed_next for req in batch.reqs]
        else:
            tokens = batch.prefill_input_ids_cpu.tolist()
        factors = iter(added(self.runtime.steerer, batch, tokens, HIDDEN))
        coming = iter(tokens)
        written: list[Entry] = []
        sampled: list[int | None] = []
        for i, req in enumerate(batch.reqs):
            new, row = list(islice(coming, counts[i])), self.rows.setdefault(req.rid, [])
            if not decode:
                if not row:
                    row += self._restored(req) if req.rid in self.backed_up else self._matched(req)
                assert len(row) == req.prefix_len
            first = row[-1].position + 1 if row else 0
            logical = list(range(first, first + len(new)))
            assert positions[i].tolist() == logical, "the model's positions are the logical ones"
            assert int(noise[i]) == logical[-1], "and so are those that noise is drawn for"
            middle = not decode and req is batch.chunked_req
            if not middle:
                length = max(logical[-1] + 1, len(self.prompt_of(req)))
                assert int(batch.orig_seq_lens[i]) == length
            for offset, token in enumerate(new):
                factor = next(factors)
                self._check_fed(req, first + offset, token, factor)
                tags = [entry.tag for entry in row]
                tag = tag_after(tags, first + offset, token, separated(req), factor)
                row.append(Entry(first + offset, tag))
                self.computed.setdefault(req.rid, {})[first + offset] = tag
                written.append(row[-1])
            sampled.append(None if middle else next_token(row[-1].tag))
            req.fed_next = sampled[-1]
        slots = batch.out_cache_loc.tolist()
        assert len(slots) == len(written)
        self.content.update(zip(slots, (entry.tag for entry in written), strict=True))

        def on_device() -> None:
            self._store(slots, written)
            self._record(forward, tokens, written)

        self.forward_stream.launch(on_device)
        self.count["decode steps" if decode else "prefills"] += 1
        return sampled

    def _check_open_sentences(self) -> None:
        for req in self.owners():
            state = getattr(req, "skipkv", None)
            if state is not None and state.held.started and state.settings.policy.needs_sentences:
                self._check_open_sentence(req)

    def _check_fed(self, req: Any, position: int, token: int, factor: float) -> None:
        """Its own token, the same one every time; steered as its tokens say, or not at all."""
        at, known = position - len(self.prompt_of(req)), self.generated.setdefault(req.rid, [])
        if at < 0:
            assert token == self.prompt_of(req)[position] and not factor
            return
        if at == len(known):
            known.append(token)
        assert known[at] == token, "not the token that was fed before"
        alpha_0 = (req.sampling_params.custom_params or {}).get("steering")
        assert factor == strength(alpha_0, known[: at + 1], DELIMITER), "another strength"
        self.count["steered tokens"] += factor != 0

    def _store(self, slots: list[int], written: list[Entry]) -> None:
        kv_pool = self.token_to_kv_pool_allocator.get_kvcache()
        tags = [entry.tag for entry in written]
        kv_pool.get_key_buffer(0)[slots] = self.widened(keys_of(tags)).to(self.device)
        kv_pool.get_value_buffer(0)[slots] = self.widened(values_of(tags)).to(self.device)

    def _record(self, forward: Any, tokens: list[int], written: list[Entry]) -> None:
        """As the model's only attention layer and its logits layer do."""
        from sgl_skipkv.patches.engine.forward import record_hidden, record_queries

        recorder = self.req_to_token_pool.skipkv.runtime.recorder
        layer = SimpleNamespace(skipkv=recorder, skipkv_layer=0)
        tags = [one.tag for one in written]
        queries = self.widened(queries_of(tags)).to(self.device)
        record_queries(layer, queries, None, None, forward)
        ids = torch.tensor(tokens, device=self.device)
        record_hidden(layer, ids, hidden_of(tags).to(self.device))
