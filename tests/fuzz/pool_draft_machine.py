"""Random lives with speculative decoding, see ``pool_drafts.py``."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pool_beside import branching
from pool_content import POOL
from pool_drafts import DraftWorld, draft_flags
from pool_machine import (
    HOW,
    PAGES,
    PARAMETERS,
    PROMPT,
    SHARED,
    SOME_STEPS,
    Asked,
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
#: what nobody gets there
REFUSED = {"kv_budget": 20, "kv_params": PARAMETERS, "kv_reuse": "keep"}
ASKED = st.one_of(
    *(BUDGETED, BUDGETED, BUDGETED, st.just({})),
    st.sampled_from([{}, {}, {"kv_policy": "full"}, REFUSED]),
)
#: what such a life may be like
DRAFT_HOW = {
    **{name: HOW[name] for name in ("tree_core", "overlap", "late", "newest_first")},
    **{name: HOW[name] for name in ("chunk", "token_ratio", "work_bytes", "backup_bytes")},
    "page_tokens": st.sampled_from(PAGES),
    "chain_tokens": st.sampled_from([2, 3, 4, 4, 6]),
    "right_of_ten": st.sampled_from([0, 3, 6, 9, 10]),
    "reads_lengths": st.booleans(),
}


class DraftPoolMachine(branching(PROMPT, ASKED)):  # type: ignore[misc]
    """The same with drafts. No request continues another one's history there, and none is
    steered."""

    world: DraftWorld

    @initialize(**DRAFT_HOW)
    def start(self, **how: Any) -> None:
        self.begin()
        self.ends.enter_context(draft_flags(how["chain_tokens"], how["page_tokens"]))
        self.world = DraftWorld(**how)

    @precondition(lambda self: not self.world.owners() and not self.world.waiting_queue)
    @rule(
        asked=st.lists(BUDGETED, min_size=2, max_size=4),
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
