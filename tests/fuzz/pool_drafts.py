"""Speculative decoding, of a ``World``: SGLang's own slots for drafts, lengths and results.

A step verifies a chain: the last token, and drafts of those behind it. It writes all of them to the
row's tail, and some are right. With the overlap scheduler only the device knows how many: the step
publishes the row's new length, and the scheduler learns it with the result, when the next step runs
already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from pool_beside import WorldBeside
from pool_content import DELIMITER, keys_of, tag_after, values_of
from pool_draft_books import DraftBooks
from pool_forward import next_token
from pool_turns import Entry, separated
from torch import Tensor

#: what the model says behind each token of a chain, and how much of that is accepted
Step = tuple[list[int], int]


@contextmanager
def draft_flags(
    chain_tokens: int = 4, page_tokens: int = 1, algorithm: str = "STANDALONE"
) -> Iterator[None]:
    """A published configuration; SGLang's own checks of what is published, and none of its kernels.

    Args:
        chain_tokens: of a verify step: one that is known, and drafts.
    """
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache import allocation
    from sglang.srt.runtime_context import get_schedule, get_spec

    from sgl_skipkv.cpu.speculation import _gather_rows, _write_rows

    settings = {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": chain_tokens - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": chain_tokens,
        "max_speculative_num_draft_tokens": None,
    }
    with ExitStack() as ends:
        ends.enter_context(get_spec().override(**settings))
        ends.enter_context(get_schedule().override(page_size=page_tokens))
        for module, name, instead in (
            (allocation, "assign_req_to_token_pool_func", _write_rows),
            (overlap_utils, "gather_spec_extras", _gather_rows),
            (overlap_utils, "_DEBUG_ASSERT", True),
            (overlap_utils, "_assert_nonneg_and_invalidate", _read_once),
        ):
            ends.enter_context(patch.object(module, name, instead))
        yield


def _read_once(values: Tensor, buffer: Tensor, rows: Tensor) -> None:
    """SGLang's check that every published number is read once, without its kernel."""
    assert (values >= 0).all(), "a length or a token that no step has published"
    buffer[rows] = -1


class Published:
    """The event behind a step's new lengths. Who waits for it sees what was there when it was
    recorded, and nothing newer."""

    def __init__(self, world: DraftWorld) -> None:
        self.world = world
        self.lengths = torch.empty(0)

    def record(self) -> None:
        self.lengths = self.world.future_map.new_seq_lens_buf.clone()

    def wait(self) -> None:
        self.world.forward_stream.run()


class CopyStream:
    """A stream of its own that copies published lengths to the CPU, as early as it may."""

    def __init__(self, world: DraftWorld) -> None:
        self.world = world

    def wait_event(self, event: Published) -> None:
        event.wait()

    def synchronize(self) -> None:
        published = self.world.future_map.publish_ready
        self.world.future_map.new_seq_lens_cpu_pinned.copy_(published.lengths)


class DraftWorld(DraftBooks, WorldBeside):
    """A world with drafts, under ``draft_flags``.

    Args:
        chain_tokens: as there.
        right_of_ten: how many of ten drafts are right.
        reads_lengths: whether attention needs the lengths on the CPU.
        algorithm: as there.
    """

    def __init__(
        self,
        *,
        chain_tokens: int = 4,
        right_of_ten: int = 6,
        reads_lengths: bool = True,
        algorithm: str = "STANDALONE",
        **how: Any,
    ) -> None:
        from sglang.srt.managers.scheduler_components.batch_result_processor import (
            SchedulerBatchResultProcessor,
        )

        self.chain_tokens, self.right_of_ten = chain_tokens, right_of_ten
        self.drafts_with, self.boundary_tokens = algorithm, int(algorithm == "EAGLE")
        super().__init__(**how)
        self.draft_pool = self._allocator().get_kvcache()
        runner = SimpleNamespace(token_to_kv_pool=self.draft_pool)
        self.draft_worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=runner))
        self.future_map = self.spec_algorithm.create_future_map(
            self.device, self.req_to_token_pool, needs_cpu_seq_lens=reads_lengths
        )
        self.future_map.publish_ready = Published(self)
        self.future_map.fwd_prepare_d2h_stream = CopyStream(self)
        self.future_map.new_seq_lens_cpu_pinned = self.future_map.new_seq_lens_buf.clone()
        parts = dict.fromkeys(field.name for field in fields(SchedulerBatchResultProcessor))
        reporter = SimpleNamespace(snapshot_spec_decode_metrics=lambda batch, result: None)
        worker = SimpleNamespace(on_verify_complete_cpu=lambda drafts, batch_size: None)
        parts |= {"metrics_reporter": reporter, "model_worker": worker}
        self.processor = SchedulerBatchResultProcessor(**parts)

    def _bind(self, **given: Any) -> None:
        from sgl_skipkv.patches.engine.speculation import boundary_tokens, reserved_tokens
        from sgl_skipkv.patches.startup.draft_kinds import reuse_of_pairs

        super()._bind(**given)
        self.recorder.chain_tokens = self.chain_tokens
        reason = reuse_of_pairs(self)
        limits = replace(self.skipkv.limits, without_reuse=() if reason is None else (reason,))
        self.skipkv = self.req_to_token_pool.skipkv = replace(self.skipkv, limits=limits)
        self.runtime.reserved_tokens = reserved_tokens(self)
        self.runtime.boundary_tokens = boundary_tokens(self)
        self.runtime._kv_token_bytes *= 2  # two pools

    # -- the forward pass

    def _store(self, slots: list[int], written: list[Entry]) -> None:
        """Both models write it, to the same slots of two pools."""
        super()._store(slots, written)
        tags = [entry.tag for entry in written]
        self.draft_pool.get_key_buffer(0)[slots] = self.widened(keys_of(tags)).to(self.device)
        self.draft_pool.get_value_buffer(0)[slots] = self.widened(values_of(tags)).to(self.device)

    def _check_stored(self, slots: list[int], tags: Sequence[int]) -> None:
        super()._check_stored(slots, tags)
        keys = self.draft_pool.get_key_buffer(0)[slots].cpu()
        values = self.draft_pool.get_value_buffer(0)[slots].cpu()
        assert torch.equal(keys, self.widened(keys_of(tags))), "the draft model's keys"
        assert torch.equal(values, self.widened(values_of(tags))), "the draft model's values"

    def _forward(self, batch: Any) -> list[Any]:
        if batch.forward_mode.is_decode():
            return self._verify(batch)
        tokens = super()._forward(batch)
        self._relay(batch, batch.seq_lens, [token or 0 for token in tokens])
        return tokens

    def _verify(self, batch: Any) -> list[Step]:
        """A chain of each request. SGLang's own lengths, rows and last tokens say where it begins,
        as of the moment in which it is launched."""
        from sglang.srt.managers.overlap_utils import resolve_forward_inputs

        self.forward_stream.run()  # nothing of a step begins before the one before has ended
        self._check_open_sentences()
        if self.overlap:
            self.future_map.resolve_seq_lens_cpu(batch)
        resolve_forward_inputs(batch, self.future_map)
        starts = [len(self.rows[req.rid]) for req in batch.reqs]
        assert batch.seq_lens.tolist() == starts, "published lengths, without what was evicted"
        if batch.seq_lens_cpu is not None:
            assert batch.seq_lens_cpu.tolist() == starts, "the same on the CPU"
        verified, fed = self._check_positions(batch), list[int]()
        seen, slots, written = list[tuple[list[int], list[int]]](), list[int](), list[Entry]()
        steps: list[Step] = []
        tokens = batch.spec_info.bonus_tokens.tolist()
        for req, start, token in zip(batch.reqs, starts, tokens, strict=True):
            assert token == req.fed_next, "another request's token"
            row_slots, end = self._row(req), start + self.chain_tokens
            assert end <= len(row_slots), "a draft has no slot"
            seen.append((row_slots[:start], [entry.tag for entry in self.rows[req.rid]]))
            slots += row_slots[start:end]
            chain, fed_here, step = self._chain(req, token)
            written += chain
            fed += fed_here
            steps.append(step)
            req.fed_next = step[0][step[1] - 1]
        self.content.update(zip(slots, (entry.tag for entry in written), strict=True))

        def on_device() -> None:
            for row_slots, tags in seen:
                self._check_stored(row_slots, tags)
            self._store(slots, written)
            self._record(verified, fed, written)

        self.forward_stream.launch(on_device)
        self.count["decode steps"] += 1
        accepted = torch.tensor([right for _, right in steps], device=self.device)
        self._relay(batch, batch.seq_lens + accepted, [req.fed_next for req in batch.reqs])
        return steps

    def _chain(self, req: Any, token: int) -> tuple[list[Entry], list[int], Step]:
        """What a request's verify step writes, of which tokens, what the model says behind each of
        them, and how many of these are accepted: the tokens before were right."""
        row, first, right = self.rows[req.rid], self.rows[req.rid][-1].position + 1, True
        tags = [entry.tag for entry in row]
        said, fed, accepted, chain = list[int](), list[int](), 0, list[Entry]()
        self.in_sentences.discard(req.rid)
        for at in range(first, first + self.chain_tokens):
            fed.append(token)
            tags.append(tag_after(tags, at, token, separated(req)))
            chain.append(Entry(at, tags[-1]))
            if right:
                accepted += 1
                self._check_fed(req, at, token, 0.0)
                self.computed[req.rid][at] = tags[-1]
            said.append(next_token(tags[-1]))
            right = right and tags[-1] // 7 % 10 < self.right_of_ten
            wrong = DELIMITER if said[-1] != DELIMITER and tags[-1] % 4 else 3 + said[-1] % 3
            token = said[-1] if right else wrong
        row += chain[:accepted]
        self.running.setdefault(req.rid, []).append(accepted)
        self.last_step[req.rid] = accepted
        self.rejected[req.rid] = [entry.tag for entry in chain[accepted:]]
        self.count["right drafts"] += accepted - 1
        self.count["wrong drafts"] += len(chain) - accepted
        return chain, fed, (said, accepted)

    def _relay(self, batch: Any, lengths: Tensor, tokens: list[int]) -> None:
        """What the step leaves for the next one: each row's length, and the last token."""
        from sglang.srt.managers.overlap_utils import RelayPayload
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        drafts = torch.zeros(len(tokens), 1, dtype=torch.int64, device=self.device)
        left = EagleDraftInput(
            topk_p=drafts.float(),
            topk_index=drafts,
            bonus_tokens=torch.tensor(tokens, device=self.device),
        )
        batch.input_ids, batch.spec_info = None, left
        if not self.overlap:
            self.forward_stream.run()
            batch.seq_lens = lengths
            batch.seq_lens_cpu, batch.seq_lens_sum = lengths.cpu(), int(lengths.sum())
            return
        rows = left.future_indices = batch.req_pool_indices
        payload = RelayPayload.from_draft_input(left)

        def publish() -> None:
            self.future_map.publish(rows, lengths)
            self.future_map.stash(rows, payload)

        self.forward_stream.follow(publish)

    def _check_positions(self, batch: Any) -> Any:
        """Those of a step's three passes are logical: of drafts, of the draft model's pass behind
        what is verified, and of that; which is returned and comes last, because it records."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        from sgl_skipkv.patches.engine.forward import prepare_forward
        from sgl_skipkv.patches.engine.speculation import place_draft

        firsts = [self.rows[req.rid][-1].position + 1 for req in batch.reqs]
        for mode, count in (
            (ForwardMode.DECODE, 1),
            (ForwardMode.DRAFT_EXTEND_V2, self.chain_tokens),
            (ForwardMode.TARGET_VERIFY, self.chain_tokens),
        ):
            steps = torch.arange(count, device=self.device)
            physical = (batch.seq_lens[:, None] + steps).flatten()
            forward = SimpleNamespace(
                forward_mode=mode,
                positions=physical,
                req_pool_indices=batch.req_pool_indices,
                sampling_info=SimpleNamespace(),
            )
            runner = self.runner if mode.is_target_verify() else SimpleNamespace()
            prepare_forward(forward, type(self), batch, runner)
            if mode.is_decode():
                assert torch.equal(forward.positions, physical), "attention reads them as lengths"
                place_draft(None, forward)
            logical = [first + step for first in firsts for step in range(count)]
            assert forward.positions.tolist() == logical, "the model's positions"
        return forward

    # -- the scheduler's loop

    def _decode_batch(self, batch: Any) -> Any:
        """Whoever has a budget has been admitted with all that it can ever hold."""
        states = [getattr(req, "skipkv", None) for req in self.owners()]
        bounded = all(state is not None and state.settings.evicts for state in states)
        full = self.count["retractions, pool full"]
        decode = super()._decode_batch(batch)
        is_full = self.count["retractions, pool full"] > full
        assert not (bounded and is_full), "no room for what was admitted"
        return decode

    def _finish_decode(self, batch: Any, steps: list[Any]) -> None:
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.mem_cache import common

        result = GenerationBatchResult(
            next_token_ids=torch.tensor([token for said, _ in steps for token in said]),
            accept_lens=torch.tensor([accepted for _, accepted in steps]),
            speculative_num_draft_tokens=self.chain_tokens,
        )
        new = self.processor._resolve_spec_v2_tokens(result, batch)
        for req, tokens in zip(batch.reqs, new, strict=True):
            if self.overlap and (req.finished() or req.is_retracted):
                continue
            assert self.running[req.rid].pop(0) == len(tokens)
            req.output_ids.extend(tokens)
            req.update_finish_state(len(tokens))
            if req.finished():
                stopped = req.finished_len is not None and req.finished_len < len(req.output_ids)
                self.count["stopped within a step"] += stopped
                self._note_length(req)
                slots = self._row(req)
                common.release_kv_cache(req, self.tree_cache, checkpoint=True)
                self._check_summary(req)
                self._forget(req, slots)

    def _forget(self, req: Any, slots: Any = ()) -> None:
        self._leave_running_step(req)
        super()._forget(req, slots)
        self._forget_step(req)
