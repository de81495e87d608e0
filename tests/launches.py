"""What a compaction starts on the device, and copies there: for one due request and for many.

    python tests/launches.py             # one table
    python tests/launches.py --record    # and rows

Every operation is a launch, and while the CPU starts launches no decode step begins. The operations
of a GPU server are counted without a GPU: the kernels run interpreted and count as one each.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.extend([str(ROOT), str(ROOT / "tests" / "helpers")])

from device_ops import host_read
from kernels_on_cpu import as_one_each, on_triton
from row_table import show
from synthetic import SyntheticServer, decode_until_due, served
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_skipkv.cli.progress import track
from sgl_skipkv.policy import names

POLICIES = tuple(name for name in names() if name != "full")
CALLS = (1, 2, 16)


class Launches(TorchDispatchMode):
    """Counts what is started on the device while it is open.

    A view and an empty tensor start nothing; ``lift_fresh`` is a list of numbers on its way there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        read = host_read(func, args, kwargs)
        assert read is None, f"{read} waits for the device"
        if name == "lift_fresh" or not (func.is_view or name.startswith(("empty", "new_empty"))):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def launches(*names: str) -> Counter[str]:
    """Of the second compaction of requests of these policies that are due in the same step."""
    server = SyntheticServer(rows=len(names), tracks=len(names), check_ledger=False)
    asked = [{"seed": seed, "kv_policy": name, "kv_budget": 20} for seed, name in enumerate(names)]
    opened = [served(server, **keys) for keys in asked]
    decode_until_due(server, opened)
    server.decode(*opened)  # the first one, in plain torch
    decode_until_due(server, opened)
    counted = Launches()
    with on_triton(), as_one_each(lambda name, again: counted.names.update([name])):
        compact = server.compaction_of(opened)
        with counted:
            compact()
    return counted.names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to bench/rows")
    arguments = parser.parse_args()
    rows = []
    for name in track(POLICIES, "policies"):
        counts = [launches(*[name] * calls).total() for calls in CALLS]
        columns = {f"operations_{calls}": count for calls, count in zip(CALLS, counts, strict=True)}
        rows.append({"policy": name, **columns})
    title = "operations on the device, by requests that are due together"
    show(rows, title, record="launches" if arguments.record else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
