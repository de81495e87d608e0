"""What lives share in which something beside KV may run out: windows with a pool of their own, or
states."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from hypothesis.strategies import SearchStrategy
from pool_content import POOL
from pool_machine import (
    APART,
    SHARED,
    SOME_STEPS,
    STOPS,
    TOKENS,
    Apart,
    Asked,
    PoolMachine,
)
from pool_world import World

Texts = SearchStrategy[list[int]]
#: how much of an earlier text begins another one, what follows, how many more, what is asked for
Branch = tuple[int, list[int], int, Asked]
#: steps in which nothing runs, while somebody waits
PATIENCE = 3


class WorldBeside(World):
    """A world whose requests may wait for something else than KV.

    Attributes:
        idle_steps: in which nothing ran, one after the other.
    """

    idle_steps = 0

    def step(self) -> None:
        launched = self.count["prefills"] + self.count["decode steps"]
        super().step()
        moved = self.count["prefills"] + self.count["decode steps"] > launched
        waits = self.waiting_queue or self.chunked_req is not None
        self.idle_steps = 0 if moved or self.result_queue or not waits else self.idle_steps + 1
        assert self.idle_steps < PATIENCE, "everybody waits, and nobody runs who could make room"


class MachineBeside(PoolMachine):
    """Lives in such a world, under settings of SGLang that end with them.

    Attributes:
        ends: of the settings.
    """

    world: Any

    def begin(self) -> None:
        PoolMachine.lives += 1
        self.ends = ExitStack()

    def grow_out(self, asked: list[Asked], more_steps: int) -> None:
        """Requests grow longer than the pool."""
        for keys in asked:
            self.world.arrive(SHARED[:4], 300, **keys)
        self.run_steps(POOL + more_steps)

    def retract_and_evict(self, steps: int, times: int, evicted: tuple[int, ...]) -> None:
        """Requests are retracted, and the tree loses what they shared while they wait."""
        for _ in range(times):
            self.run_steps(steps)
            if len(self.world.owners()) > 1:
                self.world.retract_now = True
                self.run_steps(1)
            self.world.evict_tree(*evicted)

    def branch(self, text: list[int], branches: list[Branch], steps: int) -> None:
        """Texts that begin as one that was there."""
        for cut, more, max_new_tokens, keys in branches:
            self.world.arrive(text[:cut] + more, max_new_tokens, **keys)
        self.run_steps(steps)

    def teardown(self) -> None:
        if hasattr(self, "ends"):
            with self.ends:
                super().teardown()


def branching(prompt: Texts, asked: SearchStrategy[Asked]) -> type[MachineBeside]:
    """Lives in which texts arrive, also such as begin like earlier ones.

    Args:
        prompt: how a text is drawn that begins like none.
        asked: what its request asks for.
    """
    branch = st.tuples(
        st.integers(1, 60),
        st.lists(st.integers(3, 6), min_size=1, max_size=12),
        st.sampled_from([1, 2, 9, 20, 40]),
        asked,
    )

    class Branching(MachineBeside):
        @precondition(lambda self: len(self.world.waiting_queue) < 4)
        @rule(
            calls=st.lists(st.tuples(prompt, TOKENS, STOPS, asked, APART), min_size=1, max_size=4)
        )
        def arrive(self, calls: list[tuple[list[int], int, bool, Asked, Apart]]) -> None:
            for prompt, max_new_tokens, ignore_eos, keys, apart in calls:
                self.world.arrive(prompt, max_new_tokens, ignore_eos=ignore_eos, **apart, **keys)

        @precondition(lambda self: self.world.finished and len(self.world.waiting_queue) < 4)
        @rule(data=st.data(), more=st.lists(st.integers(3, 6), min_size=1, max_size=4), keys=asked)
        def follow_up(self, data: st.DataObject, more: list[int], keys: Asked) -> None:
            """The next turn: a finished request's whole text and a few tokens."""
            self.world.arrive((self._text(data) + more)[:60], 20, **keys)

        @precondition(lambda self: self.world.finished and len(self.world.waiting_queue) < 4)
        @rule(data=st.data(), branch=branch, steps=SOME_STEPS)
        def turn(self, data: st.DataObject, branch: Branch, steps: int) -> None:
            """Another text that begins as one that was there."""
            self.branch(self._text(data), [branch], steps)

        @precondition(lambda self: self.world.finished and len(self.world.waiting_queue) < 3)
        @rule(data=st.data(), branches=st.lists(branch, min_size=2, max_size=3), steps=SOME_STEPS)
        def fork(self, data: st.DataObject, branches: list[Branch], steps: int) -> None:
            """Several at once."""
            self.branch(self._text(data), branches, steps)

    return Branching
