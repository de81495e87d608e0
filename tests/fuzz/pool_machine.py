"""Random lives of many requests: the machine that tests, fuzzing and planted bugs drive.

``World`` (pool_world.py) is one scheduler without a model, on SGLang's real pools and tree. The
machine gives it arrivals, follow-up turns, aborts, retractions, tree evictions and flushes, and
checks every invariant after every rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pool_content import DELIMITER, POOL
from pool_world import World

MACHINE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
SHARED = [5, 6, 7, 8, 9, 10, 11, 12]  # prompts begin alike, so that they share
PARAMETERS = {"interval": 8, "window": 2, "sink": 1}

PROMPT = st.builds(
    lambda shared, own: SHARED[:shared] + own,
    st.integers(1, len(SHARED)),
    st.lists(st.integers(3, 6), max_size=6),
)
TOKENS = st.sampled_from([1, 2, 40, 90, 150, 300])
STOPS = st.sampled_from([False, False, True])
# What a request may ask for; most requests have a budget.
BUDGETED = st.fixed_dictionaries(
    {
        "kv_budget": st.integers(4, 16),
        "kv_policy": st.sampled_from(["skipkv", "rkv", "streaming", "random"]),
        "kv_params": st.sampled_from(
            [
                PARAMETERS,
                {**PARAMETERS, "window": 1, "sink": 0},
                {**PARAMETERS, "protect_prompt": False},
                {**PARAMETERS, "protect_prompt": False, "count_prompt": True},
                {**PARAMETERS, "fraction": 0.5},
                {**PARAMETERS, "coverage": 0.75},
                {**PARAMETERS, "protect_prompt": False, "count_prompt": True, "fraction": 0.25},
            ]
        ),
    }
)
# What a request asks for that takes part in a conversation.
REUSING = st.fixed_dictionaries(
    {
        "kv_budget": st.integers(5, 16),
        "kv_policy": st.sampled_from(
            ["skipkv", "skipkv", "rkv", "streaming", "random", "h2o", "gkv", "crystal"]
        ),
        "kv_params": st.sampled_from(
            [
                *(PARAMETERS, {**PARAMETERS, "window": 4, "sink": 0}),
                *({**PARAMETERS, "fraction": 0.25}, {**PARAMETERS, "fraction": 0.625}),
                *({**PARAMETERS, "coverage": 0.6}, {**PARAMETERS, "window": 4, "coverage": 0.9}),
            ]
        ),
        "kv_reuse": st.sampled_from(["keep", "budget"]),
    }
)
STEERED = st.builds(
    lambda keys, alpha_0: {**keys, "steering": alpha_0}, BUDGETED | REUSING, st.just(1.5)
)
ASKED = st.one_of(
    *(BUDGETED, BUDGETED, REUSING, REUSING, STEERED, st.just({})),
    st.sampled_from([{}, {"kv_policy": "full"}, {"steering": 1.5}, {"steering": -2.0}]),
)
APART = st.sampled_from([{}, {}, {}, {"extra_key": "a"}, {"cache_salt": "a"}])
TEXT = st.lists(st.sampled_from([DELIMITER, 3, 4, 5, 6]), max_size=9)
# What a branch may ask for that its history does not have.
CHANGES = st.sampled_from(
    [
        *({"kv_policy": "skipkv"}, {"kv_policy": "rkv"}, {"kv_policy": "h2o"}, {"kv_budget": 9}),
        *({"kv_reuse": "keep"}, {"kv_reuse": "budget"}, {"kv_reuse": False}, {"kv_budget": None}),
        *({"steering": 1.5}, {"steering": None}, {"cache_salt": "a"}, {"extra_key": "a"}),
    ]
)
# A branch of a conversation: how many tokens of its history are left out, new text, how many more.
BRANCH = st.tuples(
    st.sampled_from([0, 0, 0, 0, 1, 2, 5, 12]),
    *(TEXT, st.sampled_from([1, 2, 9, 20, 40]), STOPS),
    st.just({}) | st.just({}) | st.just({}) | CHANGES,
)
OPENING = st.tuples(PROMPT, st.integers(16, 40), REUSING, APART)
SOME_STEPS = st.sampled_from([1, 3, 12, 30])
Asked = dict[str, Any]
Apart = dict[str, str]
Branch = tuple[int, list[int], int, bool, Asked]
Opening = tuple[list[int], int, Asked, Apart]
LONGEST_HISTORY = 75
PAGES = (1, 1, 2, 4, 8, 16)
#: what a life may be like
HOW = {
    "tree_core": st.sampled_from(["rust", "python"]),
    "overlap": st.booleans(),
    "late": st.booleans(),
    "newest_first": st.booleans(),
    "chunk": st.sampled_from([None, None, 5]),
    "token_ratio": st.sampled_from([0.02, 0.5]),
    "backup_bytes": st.sampled_from([0, 2000, 1 << 20]),
    "work_bytes": st.sampled_from([0, 96 << 20]),
    "reuse_bytes": st.sampled_from([2000, 20_000, 1 << 20, 1 << 20, 1 << 20]),
    "drops": st.sampled_from([False, False, True]),
}


class PoolMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler's memory, in any order."""

    seen: ClassVar[Counter[str]] = Counter()
    lives: ClassVar[int] = 0

    @initialize(**HOW)
    def start(self, **how: Any) -> None:
        PoolMachine.lives += 1
        self.world = self.new_world(**how)

    def new_world(self, **how: Any) -> World:
        return World(**how)

    @precondition(lambda self: len(self.world.waiting_queue) < 4)
    @rule(calls=st.lists(st.tuples(PROMPT, TOKENS, STOPS, ASKED, APART), min_size=1, max_size=4))
    def arrive(self, calls: list[tuple[list[int], int, bool, Asked, Apart]]) -> None:
        for prompt, max_new_tokens, ignore_eos, keys, apart in calls:
            self.world.arrive(prompt, max_new_tokens, ignore_eos=ignore_eos, **apart, **keys)

    @precondition(lambda self: self.world.finished and len(self.world.waiting_queue) < 4)
    @rule(data=st.data(), more=st.lists(st.integers(3, 6), min_size=1, max_size=4), keys=ASKED)
    def follow_up(self, data: st.DataObject, more: list[int], keys: dict[str, Any]) -> None:
        """The next turn: a finished request's whole text and a few tokens."""
        text = self._text(data)
        self.world.arrive((text + more)[:60], 20, **keys)

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

    def go_on(
        self, data: st.DataObject, opening: Opening, branches: list[Branch], steps: int
    ) -> None:
        if not self._conversations():
            prompt, max_new_tokens, keys, apart = opening
            self.world.arrive(prompt, max_new_tokens, **apart, **keys)
            self.run_steps(max_new_tokens + 2)
        if not self._conversations():
            return
        earlier = data.draw(st.sampled_from(self._conversations()[-4:]))
        apart = {"extra_key": earlier.extra_key, "cache_salt": earlier.cache_salt}
        text = self.world.next_text(earlier)
        for cut, more, max_new_tokens, ignore_eos, changes in branches:
            keys = {**earlier.sampling_params.custom_params, **apart, **changes}
            prompt = text[: max(len(text) - cut, 1)] + more
            self.world.arrive(prompt, max_new_tokens, ignore_eos=ignore_eos, **keys)
        self.run_steps(steps)

    @rule(steps=st.sampled_from([1, 2, 5, 15, 40, 80]))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()
            self.world.check()

    @precondition(lambda self: not self.world.owners() and not self.world.waiting_queue)
    @rule(asked=st.lists(BUDGETED | REUSING, min_size=2, max_size=2), more_steps=st.integers(0, 16))
    def outgrow(self, asked: list[dict[str, Any]], more_steps: int) -> None:
        """Two requests grow longer than the pool: only host memory can bring them back."""
        for keys in asked:
            self.world.arrive(SHARED[:4], 300, **keys)
        self.run_steps(POOL + more_steps)

    @precondition(lambda self: len(self.world.owners()) + len(self.world.waiting_queue) > 2)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted([*self.world.owners(), *self.world.waiting_queue], key=lambda req: req.rid)
        self.world.abort(data.draw(st.sampled_from(live)))

    @precondition(lambda self: len(self.world.owners()) > 1)
    @rule(steps=st.sampled_from([2, 5, 9, 15, 40]), times=st.integers(1, 4), pauses=st.booleans())
    def retract(self, steps: int, times: int, pauses: bool) -> None:
        """As in SGLang's own test mode, every so many steps: full pool or not.

        Sometimes the scheduler then looks at who waits, finds no room, and is told to pause.
        """
        for _ in range(times):
            self.run_steps(steps)
            self.world.retract_now = True
            self.world.step()
            self.world.check()
        if pauses:
            self.world.look_at_waiting()
            self.world.pause()

    @precondition(lambda self: len(self.world.owners()) > 1)
    @rule(now=st.sampled_from([False, False, True]))
    def pause(self, now: bool) -> None:
        """Everybody is retracted, in the middle of a chunked prompt too."""
        if now:
            self.world.pause()

    @rule(tokens=st.integers(1, POOL))
    def evict_tree(self, tokens: int) -> None:
        self.world.evict_tree(tokens)

    @precondition(lambda self: self.world.finished)
    @rule(data=st.data())
    def probe(self, data: st.DataObject) -> None:
        """Whatever the tree has of a finished text is that text's KV."""
        assert self.world.probe(self._text(data)) >= 0
        self.world.probe_histories()

    @rule()
    def flush(self) -> None:
        self.world.flush()

    def _conversations(self) -> list[Any]:
        """Requests that left a history, and whose text leaves room for a next turn."""
        turns = [(req, len(self.world.next_text(req))) for req in self.world.turns]
        return [req for req, length in turns if length <= LONGEST_HISTORY]

    def _text(self, data: st.DataObject) -> list[int]:
        req = data.draw(st.sampled_from(self.world.finished[-4:]))
        return [*req.origin_input_ids, *req.output_ids]

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            PoolMachine.seen += self.world.count


class PagedPoolMachine(PoolMachine):
    """The same, with pages of any size."""

    @initialize(**HOW, page_tokens=st.sampled_from(PAGES))
    def start(self, **how: Any) -> None:
        PoolMachine.lives += 1
        self.world = self.new_world(**how)


class HostPoolMachine(PoolMachine):
    """The same, with HiCache behind the pool."""

    @initialize(
        **HOW,
        page_tokens=st.sampled_from(PAGES),
        host_ratio=st.sampled_from([0.5, 2.0, 8.0, 8.0]),
        write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    )
    def start(self, **how: Any) -> None:
        PoolMachine.lives += 1
        self.world = self.new_world(**how)


@contextmanager
def own_draws() -> Iterator[None]:
    """The same runs, whatever else has been imported.

    Hypothesis likes to draw constants that it finds in the modules of the project that are loaded,
    so how often something happens in a run would depend on the rest of the session.
    """
    nothing, before = providers.Constants(), providers._get_local_constants
    providers._get_local_constants = lambda: nothing
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        providers._get_local_constants = before
        providers.CONSTANTS_CACHE.cache.clear()


def run_machine(examples: int, *, steps: int, seed: int, kind: type[PoolMachine]) -> Counter[str]:
    """Drive so many lives; what happened in them. The same seed draws the same lives.

    Raises:
        AssertionError: an invariant does not hold; or whatever a broken scheduler raises.
    """
    PoolMachine.seen, PoolMachine.lives = Counter(), 0
    machine = hypothesis.seed(seed)(type("SeededPoolMachine", (kind,), {}))
    chosen = settings(
        MACHINE,
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=False,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    with own_draws():
        run_state_machine_as_test(machine, settings=chosen)
    return PoolMachine.seen
