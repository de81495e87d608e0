"""What lives share in which something beside KV may run out: windows with a pool of their own, or
states."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from pool_content import POOL
from pool_machine import SHARED, Asked, PoolMachine
from pool_world import World

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
