"""Random lives of a decode server (PD disaggregation), see ``pool_decode.py``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pool_content import POOL
from pool_decode import DecodeWorld, decode_flags
from pool_machine import (
    APART,
    HOW,
    PAGES,
    PARAMETERS,
    PROMPT,
    SHARED,
    STOPS,
    TOKENS,
    Apart,
    Asked,
    PoolMachine,
)

# What a request may ask for whose prompt is computed elsewhere; and a few that are refused.
BUDGETED = st.fixed_dictionaries(
    {
        "kv_budget": st.integers(4, 16),
        "kv_policy": st.sampled_from(
            ["skipkv", "skipkv", "rkv", "streaming", "random", "h2o", "gkv", "crystal"]
        ),
        "kv_params": st.sampled_from(
            [
                *(PARAMETERS, PARAMETERS, {**PARAMETERS, "window": 1, "sink": 0}),
                *({**PARAMETERS, "fraction": 0.5}, {**PARAMETERS, "coverage": 0.75}),
            ]
        ),
    }
)
STEERED = st.builds(lambda keys: {**keys, "steering": 1.5}, BUDGETED)
REFUSED: list[Asked] = [
    {"kv_budget": 9, "kv_params": {**PARAMETERS, "protect_prompt": False}},
    {"kv_budget": 9, "kv_params": PARAMETERS, "kv_reuse": "keep"},
]
ASKED = st.one_of(
    *(BUDGETED, BUDGETED, BUDGETED, STEERED, st.just({})),
    st.sampled_from([{}, {"kv_policy": "full"}, {"steering": 1.5}, {"steering": -2.0}, *REFUSED]),
)
#: what such a life may be like
DECODE_HOW = {
    **{name: HOW[name] for name in ("tree_core", "overlap", "late", "newest_first")},
    **{name: HOW[name] for name in ("backup_bytes", "work_bytes")},
    "page_tokens": st.sampled_from(PAGES),
    "radix": st.booleans(),
    "running": st.sampled_from([2, 3, 3, 4]),
    "reserved": st.sampled_from([1, 4, 12]),
    "network": st.integers(0, 10_000),
    "only_budgets": st.sampled_from([False, False, True]),
    "sglang_backup": st.sampled_from(["cpu_tensor", "cpu_tensor", "none"]),
}


def waits_for_few(machine: DecodePoolMachine) -> bool:
    return len(machine.world.waiting()) < 5


class DecodePoolMachine(PoolMachine):
    """The same of a decode server. No request continues another one's row there."""

    world: DecodeWorld

    @initialize(**DECODE_HOW)
    def start(self, **how: Any) -> None:
        PoolMachine.lives += 1
        self.ends = ExitStack()
        self.only_budgets = how.pop("only_budgets")
        flags = {name: how[name] for name in ("radix", "reserved")}
        flags["sglang_backup"] = how.pop("sglang_backup")
        self.ends.enter_context(decode_flags(**flags))
        self.world = DecodeWorld(**how)

    @precondition(waits_for_few)
    @rule(calls=st.lists(st.tuples(PROMPT, TOKENS, STOPS, ASKED, APART), min_size=1, max_size=4))
    def arrive(self, calls: list[tuple[list[int], int, bool, Asked, Apart]]) -> None:
        for prompt, max_new_tokens, ignore_eos, keys, apart in calls:
            if self.only_budgets and "kv_budget" not in keys:
                continue
            self.world.arrive(prompt, max_new_tokens, ignore_eos=ignore_eos, **apart, **keys)

    @precondition(lambda self: self.world.finished and waits_for_few(self))
    @rule(data=st.data(), more=st.lists(st.integers(3, 6), min_size=1, max_size=4), keys=ASKED)
    def follow_up(self, data: st.DataObject, more: list[int], keys: Asked) -> None:
        """The next turn: a finished request's whole text and a few tokens."""
        text = self._text(data)
        if "kv_budget" in keys or not self.only_budgets:
            self.world.arrive((text + more)[:60], 20, **keys)

    def turn(self, *arguments: Any, **named: Any) -> None:
        """No rule here."""

    fork = turn

    @precondition(lambda self: not self.world.owners() and not self.world.waiting())
    @rule(asked=st.lists(BUDGETED, min_size=2, max_size=3), more_steps=st.integers(0, 16))
    def outgrow(self, asked: list[Asked], more_steps: int) -> None:
        """Requests grow longer than the pool."""
        for keys in asked:
            self.world.arrive(SHARED[:4], 300, **keys)
        self.run_steps(POOL + more_steps)

    @precondition(lambda self: len(self.world.owners()) > 1 and not self.only_budgets)
    @rule(keys=BUDGETED, prompt=PROMPT)
    def crowd(self, keys: Asked, prompt: list[int]) -> None:
        """The pool gets full: for those without a budget SGLang keeps too little."""
        self.world.arrive(prompt, 300, **keys)
        for _ in range(2):
            self.world.arrive([*prompt, 3] * 3, 90)
        self.run_steps(40)

    @precondition(lambda self: len(self.world.live()) > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Wherever the request is."""
        self.world.abort(data.draw(st.sampled_from(self.world.live())))

    @precondition(lambda self: len(self.world.owners()) > 1)
    @rule(steps=st.sampled_from([2, 5, 9, 15, 40]), times=st.integers(1, 4), aborts=st.booleans())
    def retract(self, steps: int, times: int, aborts: bool) -> None:
        """As in SGLang's own test mode: full pool or not; and whoever has to wait may end."""
        for _ in range(times):
            self.run_steps(steps)
            self.world.retract_now = True
            self.world.step()
            self.world.check()
        waiting = self.world.disagg_decode_prealloc_queue.retracted_queue
        if aborts and waiting:
            self.world.abort(waiting[0])

    @precondition(lambda self: len(self.world.owners()) > 1)
    @rule(
        mode=st.sampled_from(["retract", "in_place"]),
        now=st.booleans(),
        data=st.data(),
        flushes=st.booleans(),
        aborts=st.booleans(),
    )
    def pause(self, mode: str, now: bool, data: st.DataObject, flushes: bool, aborts: bool) -> None:
        """And go on, with what may come between."""
        if not now:
            return
        self.world.pause(mode)
        self.world.check()
        live = [req for req in self.world.live() if req not in self._held()]
        if aborts and live:
            self.world.abort(data.draw(st.sampled_from(live)))
        if flushes:
            self.world.flush()
        self.world.check()
        self.world.resume()

    def _held(self) -> list[Any]:
        """Requests that SGLang cannot abort while it is paused."""
        held: list[Any] = self.world.disagg_decode_prealloc_queue.held_rebootstrap_reqs
        return held

    def teardown(self) -> None:
        if hasattr(self, "ends"):
            with self.ends:
                super().teardown()
