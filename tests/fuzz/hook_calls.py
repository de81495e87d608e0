"""Every hook that a request can reach, called with requests and arguments that make no sense.

They are called in any order on what ``hook_objects.py`` holds. Only what rewrites rows is left to
the scheduler's own steps, because SGLang's lengths are all that it can go by.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import torch
from hook_objects import CONFIGS, HookObjects
from pool_content import CONTEXT

from sgl_skipkv.patches.api import tokenizer
from sgl_skipkv.patches.engine import admission, backup, batch, forward, release, retraction
from sgl_skipkv.patches.engine.binding import state_of
from sgl_skipkv.patches.engine.scheduler import open_request
from sgl_skipkv.request.settings import resolve_request, take_keys

# What is a refusal where it says so, and an end of the scheduler everywhere else.
REFUSING = ("resolve_request", "check_prompt", "move_keys")
WRONG = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration),
    TypeError,
)


class Escaped(Exception):
    """What would have ended the scheduler, or told a caller nothing."""


class HookCalls(HookObjects):
    """Requests of every hook.

    Attributes:
        requests: hook -> how often it was called; refused: how often with a refusal, as it should.
        seen: what came of the others, so that a test can tell an empty run.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.calls, self.refused, self.seen = Counter[str](), Counter[str](), Counter[str]()
        self.checked: Any = None
        hooks: tuple[Callable[[], None], ...] = (
            *(self.take_keys, self.resolve_request, self.check_prompt, self.move_keys),
            *(self.open_request, self.bound_new_tokens, self.refuse_unrecomputable),
            *(self.limit_prefix_match, self.limit_insert, self.order_victims, self.shorten_input),
            *(self.add_one_req, self.add_chunked_req, self.preempt_to_schedule),
            *(self.running_total, self.compact_due_requests, self.prepare_forward),
        )
        self.hooks = {hook.__name__: hook for hook in hooks}

    def run(self, calls: int, part: int = 3000) -> None:
        """So many requests, all hooks alike; a new scheduler for each part.

        Raises:
            Escaped: with hook and cause.
        """
        while calls > 0:
            self.new_world()
            for _ in range(min(part, calls)):
                name = self.draw.one(*self.hooks)
                self.calls[name] += 1
                try:
                    self.hooks[name]()
                except ValueError as error:
                    if name not in REFUSING:
                        raise Escaped(f"{name}: {error!r:.300}") from error
                    self._read(name, str(error))
                except WRONG as error:
                    raise Escaped(f"{name}: {error!r:.300}") from error
            calls -= part

    def _read(self, name: str, message: str) -> None:
        """A refusal is for its reader."""
        if ": expected " not in message or "x" * 81 in message or len(message) > 1000:
            raise Escaped(f"{name}: {message[:300]}")
        self.refused[name] += 1

    # -- what a request says

    def take_keys(self) -> None:
        holder = self.draw.keys()
        rest, ours = take_keys(holder)
        if {**rest, **ours} != {k: v for k, v in holder.items() if k in rest or v is not None}:
            raise Escaped(f"take_keys lost something of {holder!r:.200}")

    def resolve_request(self) -> None:
        resolve_request(take_keys(self.draw.keys())[1], self.draw.one(*CONFIGS))

    def check_prompt(self) -> None:
        settings = self._settings()
        if settings is not None:
            settings.check_prompt(self.draw.one(0, 1, self.draw.count(CONTEXT), 2**40))

    def move_keys(self) -> None:
        """In the main process, where a refusal is a ``ValueError``."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        params = self.draw.keys()
        if self.draw.chance(0.5):
            params["custom_params"] = self.draw.custom_params()
            if self.draw.chance(0.2):
                params["custom_params"] = dict(params)
        obj = GenerateReqInput(
            sampling_params=params if self.draw.chance(0.95) else self.draw.odd()
        )
        ids = self.draw.one(None, [], [5] * self.draw.count(CONTEXT), [5, self.draw.odd()])
        tokenizer.move_keys(self.draw.one(*self.managers), obj, "", ids)

    def open_request(self) -> None:
        """In the scheduler: whatever arrives becomes a state, nothing, or an aborted request."""
        req, draw = self._fresh(), self.draw
        req.sampling_params.custom_params = draw.custom_params()
        received = SimpleNamespace(
            sampling_params=req.sampling_params,
            session_params={} if draw.chance(0.05) else None,
            session_id="s" if draw.chance(0.05) else None,
            return_routed_experts=draw.chance(0.1),
            return_indexer_topk=False,
        )
        open_request(req, draw.one(self.world, self.world, self.unavailable, object()), received)
        req.sampling_params.custom_params = None
        if req.to_finish is not None:
            if req.to_finish.status_code != HTTPStatus.BAD_REQUEST:
                raise Escaped(f"open_request: {req.to_finish.message}")
            self._read("open_request", req.to_finish.message)
        self.seen["opened"] += hasattr(req, "skipkv")

    # -- the queue

    def bound_new_tokens(self) -> None:
        from sglang.srt.managers.scheduler import Scheduler

        req = self._opened()
        if self.draw.chance(0.2):
            req.sampling_params.max_new_tokens = None
        Scheduler.init_req_max_new_tokens(self.world, req)
        if req.sampling_params.max_new_tokens is not None:  # None: it ends before it begins
            assert 0 <= req.sampling_params.max_new_tokens < CONTEXT

    def refuse_unrecomputable(self) -> None:
        from sglang.srt.managers.scheduler import Scheduler

        req, before = self._opened(), len(self.world.waiting_queue)
        Scheduler._add_request_to_queue(self.world, req, is_retracted=req.is_retracted)
        if len(self.world.waiting_queue) > before:
            assert self.world.waiting_queue.pop() is req
        else:
            self.seen["ended in the queue"] += 1

    def limit_prefix_match(self) -> None:
        req, tokens = self._any(), self.draw.count(2 * CONTEXT)
        found = req._compute_max_prefix_len(tokens)
        assert 0 <= found <= tokens
        retraction.limit_prefix_match(self.draw.one(0, tokens, 2**40), req, tokens)

    def limit_insert(self) -> None:
        known = self.draw.one(None, 0, self.draw.count(CONTEXT))
        finished = self.draw.chance(0.5)
        limit = release.limit_insert(known, None, self._any(), None, 5, is_finished=finished)
        assert limit is None or known is None or limit <= known

    def order_victims(self) -> None:
        reqs = [self._any() for _ in range(self.draw.count(9))]
        order = self.draw.random.sample(range(len(reqs)), len(reqs))
        found = retraction.order_victims(order, reqs)
        self.seen["victims in order"] += found is not None
        assert found is None or sorted(found) == sorted(order)

    def shorten_input(self) -> None:
        req = self._opened()
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        backup.shorten_input(None, req)

    # -- admission

    def _adder(self, *chunks: int | None) -> Any:
        from sglang.srt.managers.scheduler import Scheduler

        self.world.runtime.has_opened = True  # somebody has asked: the adder is ours
        cls = Scheduler.get_prefill_adder_class(self.world)
        assert issubclass(cls, admission._BudgetedAdder)
        return cls(
            1,
            self.world.tree_cache,
            self.world.token_to_kv_pool_allocator,
            self.world.running_batch,
            self.draw.one(0.02, 0.5, 1.0),
            self.draw.one(1, 10_000),
            self.draw.one(1, 5, *chunks),
        )

    def _candidate(self) -> Any:
        req = self._opened()
        req.priority = self.draw.one(-5, 0, 5)
        req.init_next_round_input(self.world.tree_cache)
        return req

    def add_one_req(self) -> None:
        adder = self._adder(None)
        for _ in range(self.draw.count(4) + 1):
            chunked = adder.new_chunked_req is not None
            adder.add_one_req(self._candidate(), chunked, None)
        self.seen["admitted"] += len(adder.can_run_list)

    def add_chunked_req(self) -> None:
        req = self._candidate()
        req.is_retracted, req.output_ids = False, array("q")
        self._adder().add_chunked_req(req)

    def preempt_to_schedule(self) -> None:
        for req in self.world.running_batch.reqs:
            req.priority = self.draw.one(-5, 0, 5)
        self.seen["preempted"] += self._adder(None).preempt_to_schedule(self._candidate())

    def running_total(self) -> None:
        found = self._adder(None)._get_running_request_total_token_offset(self._any())
        assert float(found) == found

    # -- the step

    def compact_due_requests(self) -> None:
        some = self.draw.one([], [0], list(range(self.draw.count(9))))
        if self.checked is not self.world:  # of the whole batch once: SGLang decodes before another
            some, self.checked = None, self.world
        states = [state for req in self.world.running_batch.reqs if (state := state_of(req))]
        before = sum(state.report.compactions for state in states)
        batch.compact_due_requests(self.world.running_batch, some)
        self.seen["compacted"] += sum(state.report.compactions for state in states) - before

    def prepare_forward(self) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        running = self.world.running_batch
        mode = self.draw.one(ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.EXTEND)
        if running.is_empty() or running.seq_lens is None:
            return
        running.prefix_lens = [self.draw.count(CONTEXT) for _ in running.reqs]
        running.extend_lens = [self.draw.count(9) for _ in running.reqs]
        tokens = len(running.reqs) if mode.is_decode() else sum(running.extend_lens)
        result = SimpleNamespace(
            forward_mode=mode,
            orig_seq_lens=running.orig_seq_lens,
            positions=torch.arange(tokens),
            mrope_positions=self.draw.one(None, torch.arange(tokens).repeat(3, 1)),
            mm_inputs=running.multimodal_inputs,
            req_pool_indices=running.req_pool_indices,
            sampling_info=self.draw.one(None, SimpleNamespace(sampling_seed=None)),
        )
        forward.prepare_forward(result, type(self), running, SimpleNamespace())
        recorder = self.world.recorder
        self.seen["recorded"] += recorder.records_decode or recorder.current is not None
        assert result.positions.shape[0] == tokens
