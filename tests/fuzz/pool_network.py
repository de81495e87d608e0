"""The network between a prefill server and a ``DecodeWorld``: prompts arrive some steps later.

It writes into the slots that SGLang has told it, what a prefill would have computed.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from pool_content import full_tags
from pool_forward import next_token
from pool_turns import Entry, separated

ADDRESS = {"bootstrap_host": "prefill", "bootstrap_port": 8998}


class Manager:
    """What SGLang's queue reads of its own of the network: one prefill server is known."""

    enable_deferred_decode_kv_release = False

    def __init__(self) -> None:
        self.kv_args = SimpleNamespace(state_types=())
        self.prefill_info_table = {"prefill:8998": SimpleNamespace(dp_size=1)}

    def submit_prefill_recompute(self, receiver: Receiver, payload: dict[str, Any]) -> None:
        receiver.recomputed = payload["input_ids"]


class Receiver:
    """One request's.

    Attributes:
        conclude_state: as SGLang's own have it; None as long as it is on its way.
        recomputed: tokens that the prefill server was told to compute again; None: its prompt.
    """

    abort_notified = require_staging = supports_host_destination = False

    def __init__(self, world: Any, req: Any) -> None:
        self.world, self.req, self.kv_mgr = world, req, Manager
        self.conclude_state: Any = None
        self.recomputed: list[int] | None = None
        self.handshake, self.transfer, self.failing = 0, 1, ""
        if world.network is not None:
            draw = random.Random(f"{world.network} {req.rid} {req.retraction_count}")
            self.handshake = draw.choice([0, 0, 0, 1, 4])
            # Longer than a step that still runs and writes to slots that a request has let go.
            self.transfer = draw.choice([1, 1, 2, 5, 12])
            self.failing = draw.choice([*[""] * 20, "handshake", "transfer"])
        self.since = world.steps
        self.destination: tuple[list[int], int, int] | None = None

    def init(self, prefill_dp_rank: int) -> None:
        assert prefill_dp_rank == 0

    def send_metadata(
        self, pages: Any, aux_index: int, state_indices: Any = None, decode_prefix_len: int = 0
    ) -> None:
        """The prompt may come: to these pages, behind what the tree has."""
        self.destination = (pages.tolist(), aux_index, decode_prefix_len)
        self.since = self.world.steps

    def poll(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.conclude_state is not None:
            return self.conclude_state
        waited = self.world.steps - self.since
        stage, lasts = "handshake", self.handshake
        if self.destination is not None:
            stage, lasts = "transfer", self.transfer
        if waited < lasts:
            return KVPoll.Bootstrapping if stage == "handshake" else KVPoll.Transferring
        if self.failing == stage:
            self.abort()
            self.world.count[f"failed, {stage}"] += 1
        elif self.destination is None:
            return KVPoll.WaitingForInput
        else:
            self._write(*self.destination)
            self.conclude_state = KVPoll.Success
        return self.conclude_state

    def _write(self, pages: list[int], aux_index: int, prefix_len: int) -> None:
        req, world = self.req, self.world
        text = [*req.origin_input_ids, *req.output_ids]
        assert self.recomputed in (None, text), "other tokens are computed again"
        tags = full_tags(text, separated(req))
        page = world.page_size
        slots = [first * page + i for first in pages for i in range(page)]
        slots = slots[: len(text) - prefix_len]
        assert slots == world._row(req)[prefix_len:], "the row is somewhere else"
        world._store(slots, [Entry(at, tag) for at, tag in enumerate(tags)][prefix_len:])
        buffers = world.metadata_buffers
        buffers.output_ids[aux_index, 0] = next_token(tags[-1])
        buffers.bootstrap_room[aux_index, 0] = req.bootstrap_room

    def abort(self) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.conclude_state = KVPoll.Failed

    def clear(self) -> None:
        pass

    def failure_exception(self) -> None:
        raise RuntimeError("the network has failed")

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        pass
