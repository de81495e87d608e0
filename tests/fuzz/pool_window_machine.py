"""Random lives with window layers in a pool of their own, see ``pool_windows.py``."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pool_beside import MachineBeside
from pool_content import POOL
from pool_machine import (
    APART,
    BRANCH,
    HOW,
    PAGES,
    PARAMETERS,
    PROMPT,
    SOME_STEPS,
    STOPS,
    TOKENS,
    Apart,
    Asked,
    Branch,
    Opening,
)
from pool_windows import WindowWorld, window_flags, window_pool_tokens

# Some budgets are smaller than the window allows, and refused.
BUDGETED = st.fixed_dictionaries(
    {
        "kv_budget": st.integers(7, 20),
        "kv_policy": st.sampled_from(
            ["skipkv", "rkv", "streaming", "random", "h2o", "gkv", "crystal"]
        ),
        "kv_params": st.sampled_from(
            [
                *(PARAMETERS, PARAMETERS, {**PARAMETERS, "window": 1, "sink": 0}),
                *({**PARAMETERS, "interval": 2}, {**PARAMETERS, "protect_prompt": False}),
                {**PARAMETERS, "protect_prompt": False, "count_prompt": True},
                *({**PARAMETERS, "fraction": 0.5}, {**PARAMETERS, "coverage": 0.75}),
            ]
        ),
    }
)
STEERED = st.builds(lambda keys: {**keys, "steering": 1.5}, BUDGETED)
REFUSED: Asked = {"kv_budget": 20, "kv_params": PARAMETERS, "kv_reuse": "budget"}
# What a request asks for that takes part in a conversation.
KEEPING = st.builds(lambda keys: {**keys, "kv_params": PARAMETERS, "kv_reuse": "keep"}, BUDGETED)
ASKED = st.one_of(
    *(BUDGETED, BUDGETED, KEEPING, STEERED, st.just({})),
    st.sampled_from([{}, {"kv_policy": "full"}, {"steering": 1.5}, {"steering": -2.0}, REFUSED]),
)
OPENING = st.tuples(PROMPT, st.integers(16, 40), KEEPING, APART)
LONG_PROMPT = st.builds(lambda prompt, times: prompt * times, PROMPT, st.sampled_from([1, 1, 1, 3]))
#: what such a life may be like
WINDOW_HOW = {
    **{name: HOW[name] for name in ("tree_core", "overlap", "late", "newest_first")},
    **{name: HOW[name] for name in ("token_ratio", "work_bytes")},
    "backup_bytes": st.sampled_from([0, 1 << 20, 1 << 20]),
    "chunk": st.sampled_from([None, 5, 5, 16]),
    "window_tokens": st.sampled_from([2, 3, 5, 8]),
    "running": st.sampled_from([1, 1, 2]),
    "radix": st.sampled_from([True, True, False]),
    "every": st.sampled_from([1, 4, 4, 128]),
    "unlocks": st.booleans(),
    "page_tokens": st.sampled_from(PAGES),
}


class WindowPoolMachine(MachineBeside):
    """The same with two pools. No request evicts from another one's row there."""

    world: WindowWorld

    @initialize(**WINDOW_HOW)
    def start(self, **how: Any) -> None:
        self.begin()
        flags = {name: how[name] for name in ("radix", "chunk")}
        flags |= {name: how.pop(name) for name in ("every", "unlocks")}
        self.ends.enter_context(window_flags(**flags))
        how["window_pool"] = window_pool_tokens(
            *(how["window_tokens"], how["chunk"], flags["every"], how.pop("running")),
            how["page_tokens"],
        )
        self.world = WindowWorld(**how)

    @precondition(lambda self: len(self.world.waiting_queue) < 4)
    @rule(
        calls=st.lists(st.tuples(LONG_PROMPT, TOKENS, STOPS, ASKED, APART), min_size=1, max_size=4)
    )
    def arrive(self, calls: list[tuple[list[int], int, bool, Asked, Apart]]) -> None:
        for prompt, max_new_tokens, ignore_eos, keys, apart in calls:
            self.world.arrive(prompt, max_new_tokens, ignore_eos=ignore_eos, **apart, **keys)

    @precondition(lambda self: self.world.finished and len(self.world.waiting_queue) < 4)
    @rule(data=st.data(), more=st.lists(st.integers(3, 6), min_size=1, max_size=4), keys=ASKED)
    def follow_up(self, data: st.DataObject, more: list[int], keys: Asked) -> None:
        """The next turn: a finished request's whole text and a few tokens."""
        self.world.arrive((self._text(data) + more)[:60], 20, **keys)

    @precondition(lambda self: len(self.world.waiting_queue) < 4)
    @rule(data=st.data(), opening=OPENING, branch=BRANCH, steps=SOME_STEPS)
    def turn(self, data: st.DataObject, opening: Opening, branch: Branch, steps: int) -> None:
        """The next turn of a conversation; its first turn if there is none."""
        self.go_on(data, opening, [branch], steps)

    @precondition(lambda self: len(self.world.waiting_queue) < 3)
    @rule(
        data=st.data(),
        opening=OPENING,
        branches=st.lists(BRANCH, min_size=2, max_size=3),
        steps=SOME_STEPS,
    )
    def fork(
        self, data: st.DataObject, opening: Opening, branches: list[Branch], steps: int
    ) -> None:
        """Several next turns of one conversation at once."""
        self.go_on(data, opening, branches, steps)

    @precondition(lambda self: not self.world.owners() and not self.world.waiting_queue)
    @rule(asked=st.lists(BUDGETED, min_size=2, max_size=3), more_steps=st.integers(0, 16))
    def outgrow(self, asked: list[Asked], more_steps: int) -> None:
        """Requests grow longer than the pool: only host memory can bring them back."""
        self.grow_out(asked, more_steps)

    @precondition(lambda self: not self.world.waiting_queue)
    @rule(
        calls=st.lists(st.tuples(LONG_PROMPT, BUDGETED), min_size=2, max_size=3),
        steps=st.sampled_from([1, 2, 7, 20]),
        times=st.integers(1, 4),
        evicted=st.sampled_from([(0, 0), (0, 0), (POOL, POOL), (0, POOL), (5, 0)]),
    )
    def come_back(
        self,
        calls: list[tuple[list[int], Asked]],
        steps: int,
        times: int,
        evicted: tuple[int, int],
    ) -> None:
        """Requests are retracted, and the tree loses what they shared while they wait."""
        for prompt, keys in calls:
            self.world.arrive(prompt, 60, **keys)
        self.retract_and_evict(steps, times, evicted)

    @rule(tokens=st.integers(0, POOL), windows=st.integers(0, POOL))
    def evict_tree(self, tokens: int, windows: int) -> None:
        self.world.evict_tree(tokens, windows)
