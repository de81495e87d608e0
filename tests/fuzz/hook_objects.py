"""What hooks are called with: a scheduler without a model in the middle of its life, and requests.

Requests, batches, pools and trees are SGLang's own (``pool_world.py``). Some requests hold rows;
the others never will, so they may have any length and any past.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from hook_values import Draw
from pool_content import CONTEXT, HEAD_DIM, POOL, STOP, VOCAB
from pool_world import World

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.metrics import Metrics
from sgl_skipkv.offload.backup import Backup
from sgl_skipkv.offload.host_memory import HostCopies, HostMemory
from sgl_skipkv.patches.api.gate import Gate
from sgl_skipkv.patches.engine.binding import Binding, state_of
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.request.settings import RequestSettings, resolve_request

DETACHED = 12  # requests that never get a row
PLAIN = ServerConfig(query_window=4)
CONFIGS = (
    PLAIN,
    ServerConfig(kv_budget=64, kv_policy="rkv", kv_params={"threshold": 0.25}),
    ServerConfig(steering_vector="v.safetensors", steering=1.0, kv_budget_max=50),
)


class HookObjects:
    """One scheduler after another, and requests with and without a state."""

    world: World

    def __init__(self, seed: int) -> None:
        self.draw = Draw(seed)
        unready, ready = (Readiness(reasons, enabled=False) for reasons in (("page size 16",), ()))
        binding = Binding(PLAIN, unready, None, None, Metrics())
        self.unavailable = SimpleNamespace(skipkv=binding)
        gates = [{"skipkv": Gate(config, ready)} for config in CONFIGS]
        gates += [{"skipkv": Gate(PLAIN, unready)}, {}]
        preferred = (None, {}, {"custom_params": {"theirs": 1}})
        model_config = SimpleNamespace(vocab_size=6)
        self.managers = [
            SimpleNamespace(**gate, preferred_sampling_params=one, model_config=model_config)
            for gate in gates
            for one in preferred
        ]

    def new_world(self) -> None:
        """A scheduler in the middle of its life, and requests that have not begun theirs."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        draw = self.draw
        self.world = World(
            tree_core=draw.one("rust", "python"),
            overlap=draw.chance(0.5),
            chunk=draw.one(None, 5),
            backup_bytes=draw.one(0, 1 << 20),
            work_bytes=draw.one(0, 96 << 20),
        )
        params = [SamplingParams(max_new_tokens=10) for _ in range(DETACHED)]
        for one in params:
            one.normalize(None)
        self.detached = [
            Req(f"d{i}", "", array("q", [5]), one, eos_token_ids={STOP}, vocab_size=VOCAB)
            for i, one in enumerate(params)
        ]
        for i in range(draw.count(6) + 1):
            keys = draw.one({}, {"kv_budget": 8, "kv_policy": draw.one("skipkv", "streaming")})
            parameters = {"kv_params": {"interval": 8, "window": 2, "sink": 1}} if keys else {}
            self.world.arrive([5, 6, 7, 8 + i], draw.one(2, 40, 90), **keys, **parameters)
        for _ in range(draw.random.randrange(60)):
            self.world.retract_now = len(self.world.owners()) > 1 and draw.chance(0.05)
            self.world.step()
        for _ in range(16 if draw.chance(0.5) else 0):
            reqs = [req for req in self.world.running_batch.reqs if state_of(req)]
            if any(
                self.world.runtime.compactor.due(req.skipkv, req.kv.kv_allocated_len)
                for req in reqs
            ):
                break
            self.world.step()

    def _fresh(self) -> Any:
        """A request that was received just now, of any length and with any state."""
        draw, req = self.draw, self.draw.one(*self.detached)
        vars(req).pop("skipkv", None)
        req.to_finish, req.is_retracted, req.prefix_len = None, draw.chance(0.3), 0
        req.origin_input_ids = array("q", [5]) * (draw.count(CONTEXT) + 1)
        req.output_ids = array("q", [6]) * (draw.count(CONTEXT) if req.is_retracted else 0)
        params = req.sampling_params
        params.max_new_tokens = draw.one(0, 1, 5, POOL, 2**31, 2**62)
        params.min_new_tokens, params.ignore_eos = draw.one(0, 1, 2**40), draw.chance(0.5)
        return req

    def _opened(self) -> Any:
        """The same with a state, mostly; perhaps one that has a past."""
        draw, req = self.draw, self._fresh()
        settings = self._settings()
        if settings is None or settings.steers:
            return req
        state = self.world.runtime.open(req.rid, settings, req.origin_input_ids)
        req.skipkv = state
        if req.is_retracted:
            state.offloaded.waiting_with, state.failure = (
                len(req.output_ids),
                draw.one(None, "planted"),
            )
            state.kv.evicted_tokens = draw.count(CONTEXT)
            memory = HostMemory(1 << 20, pinned=False)
            memory.reserve()
            copies = HostCopies(memory)
            kv = [copies.add(torch.zeros(draw.count(CONTEXT), 1, HEAD_DIM))] * 2
            state.offloaded.backup = draw.one(None, Backup(kv, None))
        return req

    def _settings(self) -> RequestSettings | None:
        name = self.draw.one("full", "skipkv", "rkv", "streaming", "random", "h2o", "lazy", None)
        if name is None:
            return None
        parameters = {"interval": 8, "window": 2, "sink": 1, "count_prompt": self.draw.chance(0.3)}
        parameters["protect_prompt"] = self.draw.chance(0.5)
        budget = self.draw.one(4, 16, 10**6, 2**31 - 1)
        return resolve_request(
            {"kv_budget": budget, "kv_policy": name, "kv_params": parameters}, PLAIN
        )

    def _any(self) -> Any:
        """A request with or without a row, with or without a state."""
        owners = self.world.owners()
        return self.draw.one(*owners) if owners and self.draw.chance(0.5) else self._opened()
