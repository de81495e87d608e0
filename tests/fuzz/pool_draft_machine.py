"""Random lives with speculative decoding, see ``pool_drafts.py``."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pool_beside import branching
from pool_content import POOL
from pool_drafts import DraftWorld, draft_flags
from pool_machine import (
    BRANCH,
    HOW,
    OPENING,
    PAGES,
    PARAMETERS,
    PROMPT,
    REUSING,
    SHARED,
    SOME_STEPS,
    Asked,
    Branch,
    Opening,
)

BUDGETED = st.fixed_dictionaries(
    {
        "kv_budget": st.integers(6, 16),
        "kv_policy": st.sampled_from(
            ["streaming", "random", "keydiff", "distinct", "skipkv", "skipkv", "rkv", "h2o", "gkv"]
        ),
        "kv_params": st.sampled_from(
            [
                *(PARAMETERS, PARAMETERS, {**PARAMETERS, "interval": 2}),
                *({**PARAMETERS, "window": 1, "sink": 0}, {**PARAMETERS, "fraction": 0.5}),
                *({**PARAMETERS, "window": 4}, {**PARAMETERS, "coverage": 0.75}),
                {**PARAMETERS, "protect_prompt": False},
                {**PARAMETERS, "protect_prompt": False, "count_prompt": True},
                {**PARAMETERS, "protect_prompt": False, "count_prompt": True, "fraction": 0.25},
            ]
        ),
    }
)
ASKED = st.one_of(
    *(BUDGETED, BUDGETED, REUSING, st.just({})),
    st.sampled_from([{}, {}, {"kv_policy": "full"}]),
)
#: what such a life may be like
DRAFT_HOW = {
    **{name: HOW[name] for name in ("tree_core", "overlap", "late", "newest_first")},
    **{name: HOW[name] for name in ("chunk", "token_ratio", "work_bytes", "backup_bytes")},
    **{name: HOW[name] for name in ("reuse_bytes", "drops")},
    "algorithm": st.sampled_from(["STANDALONE", "EAGLE"]),
    "page_tokens": st.sampled_from(PAGES),
    "chain_tokens": st.sampled_from([2, 3, 4, 4, 6]),
    "right_of_ten": st.sampled_from([0, 3, 6, 9, 10]),
    "reads_lengths": st.booleans(),
}


class DraftPoolMachine(branching(PROMPT, ASKED)):  # type: ignore[misc]
    """The same with drafts. No request is steered there."""

    world: DraftWorld

    @initialize(**DRAFT_HOW)
    def start(self, **how: Any) -> None:
        self.begin()
        flags = (how[name] for name in ("chain_tokens", "page_tokens", "algorithm"))
        self.ends.enter_context(draft_flags(*flags))
        self.world = DraftWorld(**how)

    @precondition(lambda self: len(self.world.waiting_queue) < 3)
    @rule(
        data=st.data(),
        opening=OPENING,
        branches=st.lists(BRANCH, min_size=1, max_size=3),
        steps=SOME_STEPS,
    )
    def converse(
        self, data: st.DataObject, opening: Opening, branches: list[Branch], steps: int
    ) -> None:
        """The next turns of a conversation, at once; its first turn if there is none."""
        unsteered = [
            (*drawn, {key: changes[key] for key in changes if key != "steering"})
            for *drawn, changes in branches
        ]
        self.go_on(data, opening, unsteered, steps)

    @precondition(lambda self: not self.world.owners() and not self.world.waiting_queue)
    @rule(
        asked=st.lists(BUDGETED | REUSING, min_size=2, max_size=4),
        prompt_tokens=st.integers(4, 20),
        steps=st.sampled_from([20, 60, POOL]),
    )
    def outgrow(self, asked: list[Asked], prompt_tokens: int, steps: int) -> None:
        """Requests grow longer than the pool, and share little."""
        for i, keys in enumerate(asked):
            self.world.arrive([20 + i] * prompt_tokens, 300, **keys)
        self.run_steps(steps)

    @precondition(lambda self: not self.world.waiting_queue)
    @rule(prompt_tokens=st.integers(POOL - 40, POOL), keys=ASKED, steps=SOME_STEPS)
    def fill(self, prompt_tokens: int, keys: Asked, steps: int) -> None:
        """A prompt that leaves little room."""
        self.world.arrive((SHARED * POOL)[:prompt_tokens], 60, **keys)
        self.run_steps(steps)

    @precondition(lambda self: not self.world.waiting_queue)
    @rule(
        calls=st.lists(st.tuples(PROMPT, BUDGETED), min_size=2, max_size=3),
        other=st.tuples(PROMPT, ASKED),
        steps=st.sampled_from([1, 1, 2, 5, 9]),
        times=st.integers(2, 4),
        evicted=st.sampled_from([0, 5, POOL]),
    )
    def come_back(
        self,
        calls: list[tuple[list[int], Asked]],
        other: tuple[list[int], Asked],
        steps: int,
        times: int,
        evicted: int,
    ) -> None:
        """Requests are retracted, and the tree loses what they shared while they wait."""
        for prompt, keys in [*calls, other]:
            self.world.arrive(prompt, 60, **keys)
        self.retract_and_evict(steps, times, (evicted,))
        self.run_steps(3)
