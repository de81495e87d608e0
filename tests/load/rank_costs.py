"""What a compaction on two ranks gathers, and starts on the device, beside one on a single rank."""

from __future__ import annotations

from typing import Any

from launches import CALLS, POLICIES, Launches
from rank_world import on_ranks
from synthetic import SyntheticServer, decode_until_due, served

from sgl_skipkv.ranks import ONE_RANK, Ranks

BUDGET = 64


class LaunchesAndGathers(Launches):
    """Counts gathers, and the bytes that this rank sends, apart from what is started otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.startswith("c10d::"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.gathers += 1
        self.sent_bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def second_compaction(ranks: Ranks, policy: str, count: int) -> tuple[int, int, int, int]:
    """Operations, gathers, bytes sent, and the row's tokens, of requests that are due together."""
    memory = {"retraction_backup_bytes": 1 << 16, "kv_reuse_bytes": 1 << 16}
    shape = {"rows": count, "tracks": count, "pool_tokens": 400 * count, "check_ledger": False}
    server = SyntheticServer(**shape, ranks=ranks, **memory)
    asked = {"kv_policy": policy, "kv_budget": BUDGET}
    calls = [served(server, seed=seed, **asked) for seed in range(count)]
    decode_until_due(server, calls)
    server.decode(*calls)
    decode_until_due(server, calls)
    counted, row_tokens = LaunchesAndGathers(), server.due(calls[0]).row_tokens
    compact = server.compaction_of(calls)
    with counted:
        compact()
    return counted.names.total(), counted.gathers, counted.sent_bytes, row_tokens


def costs() -> list[dict[str, Any]]:
    """A row per policy and number of due requests. Statistics of attention are brought up to date
    in the same compaction."""
    rows = []
    for policy in POLICIES:
        for count in CALLS:
            one = second_compaction(ONE_RANK, policy, count)
            two = on_ranks(2, second_compaction, policy, count)[0]
            rows.append(
                {
                    "policy": policy,
                    "due": count,
                    "row_tokens": two[3],
                    "gathers": two[1],
                    "sent_bytes": two[2],
                    "operations": two[0],
                    "operations_one_rank": one[0],
                }
            )
    return rows
