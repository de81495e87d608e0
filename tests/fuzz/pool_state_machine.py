"""Random lives of a model some of whose layers have a state instead of KV, see
``pool_states.py``."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pool_beside import branching
from pool_content import POOL, ROWS
from pool_machine import (
    BUDGETED,
    HOW,
    PARAMETERS,
    PROMPT,
    Asked,
)
from pool_states import StateWorld, state_flags, states_per_row

STEERED = st.builds(lambda keys: {**keys, "steering": 1.5}, BUDGETED)
REFUSED: Asked = {"kv_budget": 20, "kv_params": PARAMETERS, "kv_reuse": "keep"}
ASKED = st.one_of(
    *(BUDGETED, BUDGETED, STEERED, st.just({}), st.just({})),
    st.sampled_from([{}, {"kv_policy": "full"}, {"steering": 1.5}, {"steering": -2.0}, REFUSED]),
)
LONG_PROMPT = st.builds(lambda prompt, times: prompt * times, PROMPT, st.sampled_from([1, 1, 2, 3]))
#: who gives states to the tree: requests, or steps that copy them (beside a running step, or not)
STRATEGIES = ((False, False), (True, True), (True, True), (True, False))
#: what such a life may be like
STATE_HOW = {
    **{name: HOW[name] for name in ("tree_core", "late", "newest_first")},
    **{name: HOW[name] for name in ("token_ratio", "work_bytes")},
    "chunk": st.sampled_from([None, 5, 5, 16]),
    "strategy": st.sampled_from(STRATEGIES),
    "paged": st.booleans(),
    "state_chunk": st.sampled_from([2, 4, 8]),
    "interval": st.sampled_from([8, 16]),
    "unlocks": st.booleans(),
    "spare": st.sampled_from([0, 0, 20]),
}
#: what the tree loses: tokens, states
EVICTED = st.sampled_from([(0, 0), (POOL, 40), (0, 40), (0, 40), (5, 0), (0, 1)])
#: the tree has their prompt, and they can be recomputed; of these, who needs one of few tracks
SHARING = st.builds(lambda keys: {**keys, "kv_params": PARAMETERS}, BUDGETED)
TRACKED = st.builds(lambda keys: {**keys, "kv_policy": "rkv"}, SHARING)


class StatePoolMachine(branching(LONG_PROMPT, ASKED)):  # type: ignore[misc]
    """The same with states. No request continues another one's history there."""

    world: StateWorld

    @initialize(**STATE_HOW)
    def start(self, **how: Any) -> None:
        self.begin()
        copies, overlap = how.pop("strategy")
        page_tokens = 16 if how.pop("paged") and copies else 1
        flags = {name: how.pop(name) for name in ("interval", "unlocks")}
        flags |= {"copies": copies, "state_chunk": how["state_chunk"]}
        self.ends.enter_context(state_flags(page_tokens=page_tokens, **flags))
        per_row = states_per_row(copies=copies, overlap=overlap, unlocks=flags["unlocks"])
        slots = ROWS * per_row + how.pop("spare")
        self.world = StateWorld(
            copies=copies, overlap=overlap, page_tokens=page_tokens, state_slots=slots, **how
        )

    @precondition(lambda self: not self.world.owners() and not self.world.waiting_queue)
    @rule(asked=st.lists(BUDGETED, min_size=2, max_size=3), more_steps=st.integers(0, 16))
    def outgrow(self, asked: list[Asked], more_steps: int) -> None:
        """Requests grow longer than the pool."""
        self.grow_out(asked, more_steps)

    @precondition(lambda self: not self.world.waiting_queue)
    @rule(
        calls=st.lists(st.tuples(LONG_PROMPT, SHARING), min_size=2, max_size=3),
        other=st.tuples(LONG_PROMPT, ASKED),
        steps=st.sampled_from([1, 1, 2, 7, 12, 20]),
        times=st.integers(2, 4),
        evicted=EVICTED,
    )
    def come_back(
        self,
        calls: list[tuple[list[int], Asked]],
        other: tuple[list[int], Asked],
        steps: int,
        times: int,
        evicted: tuple[int, int],
    ) -> None:
        """Requests are retracted, and the tree loses what they shared while they wait."""
        for prompt, keys in [*calls, other]:
            self.world.arrive(prompt, 60, **keys)
        self.retract_and_evict(steps, times, evicted)
        self.run_steps(3)

    @precondition(lambda self: not self.world.waiting_queue and len(self.world.owners()) < 3)
    @rule(
        first=LONG_PROMPT,
        others=st.lists(st.tuples(LONG_PROMPT, TRACKED), min_size=2, max_size=3),
        more=st.lists(st.integers(3, 6), max_size=6),
        asked=st.tuples(TRACKED, ASKED),
        steps=st.sampled_from([1, 1, 2, 5, 20]),
        evicted=EVICTED,
    )
    def queue_for_a_track(
        self,
        first: list[int],
        others: list[tuple[list[int], Asked]],
        more: list[int],
        asked: tuple[Asked, Asked],
        steps: int,
        evicted: tuple[int, int],
    ) -> None:
        """Whoever needs no track passes who has matched a prefix and needs one."""
        self.world.arrive(first, 2)
        self.run_steps(3)
        for prompt, keys in others:
            self.world.arrive(prompt, 30, **keys)
        for keys in asked:
            self.world.arrive(first + more, 20, **keys)
        for _ in range(3):
            self.run_steps(steps)
            self.world.evict_tree(*evicted)
        self.run_steps(20)

    @rule(tokens=st.integers(0, POOL), states=st.integers(0, 20))
    def evict_tree(self, tokens: int, states: int) -> None:
        self.world.evict_tree(tokens, states)

    @precondition(lambda self: self.world.is_idle())
    @rule(tokens=st.integers(1, 40))
    def measure(self, tokens: int) -> None:
        self.world.measure(tokens)
