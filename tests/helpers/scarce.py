"""Memory that runs out at a chosen allocation of a compaction."""

from __future__ import annotations

from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PYTORCH = str(Path(torch.__file__).parent)


class Scarce(TorchDispatchMode):
    """Fails allocations while it is open; views and in-place operations allocate nothing.

    Args:
        first: number of the first allocation that fails; -1: none.
        once: whether it is the only one.

    Attributes:
        places: operation and line of ours -> number of its last allocation.
    """

    def __init__(self, first: int = -1, *, once: bool = True) -> None:
        super().__init__()
        self.first, self.once, self.allocations = first, once, 0
        self.places: dict[tuple[str, str, int], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        in_place = schema.name.endswith(("_", "_local_scalar_dense")) or "out" in (kwargs or {})
        if not func.is_view and not in_place:
            self._allocate(schema.name)
        return func(*args, **(kwargs or {}))

    def _allocate(self, name: str) -> None:
        number, self.allocations = self.allocations, self.allocations + 1
        walk = ((frame.f_code.co_filename, line) for frame, line in walk_stack(None))
        file, line = next(place for place in walk if not place[0].startswith((PYTORCH, __file__)))
        self.places[name, file, line] = number
        fails = number == self.first if self.once else 0 <= self.first <= number
        if fails:
            raise torch.OutOfMemoryError(f"planted at allocation {number}: {name}")
