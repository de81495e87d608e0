"""Random lives where a GPU's rules about memory hold: what is copied arrives late, nobody waits."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
from pool_machine import PagedPoolMachine, run_machine
from pool_world import World
from stand_in_gpu import gpu, stand_in_gpu

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plugin_loaded")]

#: the delimiters' table, copied at a server's first request that needs sentences
FIRST_REQUEST = "sgl_skipkv/recording/sentence_table.py"


class GpuPoolMachine(PagedPoolMachine):
    """Every life has a GPU of its own. SGLang's tree in Rust does not take its tensors."""

    waits: ClassVar[Counter[str]] = Counter()

    def new_world(self, **how: Any) -> World:
        self.ends = ExitStack()
        self.stand_in = self.ends.enter_context(stand_in_gpu())
        how = {**how, "tree_core": "python", "check_ledger": False}
        world = World(**how, device=gpu())
        self.stand_in.waits.clear()  # of the start
        return world

    def teardown(self) -> None:
        if hasattr(self, "ends"):
            with self.ends:
                super().teardown()
                self.waits.update(at for _, at in self.stand_in.waits)


def test_memory_stays_sound_on_a_gpu() -> None:
    seen = run_machine(8, steps=50, seed=1, kind=GpuPoolMachine)
    assert min(seen["backups"], seen["restored"], seen["copied"], seen["demands"]) > 0
    assert seen["compactions"] > 200 and seen["compactions in pages"] > 30
    waits = [at for at in GpuPoolMachine.waits if not at.startswith(FIRST_REQUEST)]
    assert not waits, "a running server waits for its GPU"
