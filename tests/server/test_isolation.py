"""What a request says does not depend on who runs beside it: evicting, steered, aborted requests.

The model computes in float32 on one thread; two batches of other sizes differ by rounding only,
and no score of these requests is that close to another.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers import HTTPFailure, Server, logprob_gap, output_logprobs
from tiny_models import prompt_ids

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS, NEIGHBOURS = 160, 12
POLICIES = ("skipkv", "rkv", "streaming", "h2o")


def budget(policy: str) -> dict[str, Any]:
    return {"kv_budget": 24, "kv_policy": policy, "kv_params": {"interval": 8}}


TARGETS: list[dict[str, Any]] = [
    {},
    {"kv_policy": "full"},
    budget("skipkv"),
    budget("random"),
    {"steering": 1.5},
    {**budget("rkv"), "steering": -1.5},
]


def neighbour(server: Server, seed: int, stop: threading.Event) -> int:
    """Requests with budgets and steering, one after the other, most of them aborted; how many
    were."""
    rng, aborted = random.Random(seed), 0
    while not stop.is_set():
        rid = f"neighbour-{seed}-{rng.random()}"
        timer = threading.Timer(
            rng.uniform(0.05, 0.6), server.post, ("/abort_request", {"rid": rid})
        )
        timer.start()
        keys = {**budget(rng.choice(POLICIES)), **rng.choice([{}, {"steering": 2.0}])}
        try:
            answer = server.generate(prompt_ids(seed, rng.randrange(5, 90)), 2000, rid=rid, **keys)
            aborted += answer["meta_info"]["finish_reason"]["type"] == "abort"
        except HTTPFailure as failure:
            assert failure.status in (400, 499, 500, 503), failure.body
            aborted += 1
        timer.join()
    return aborted


def test_neighbours_change_nothing(server: Server) -> None:
    calls = [
        {"input_ids": prompt_ids(400 + i, 30 + 11 * i), "tokens": TOKENS, **keys}
        for i, keys in enumerate(TARGETS)
    ]
    alone = [server.generate(**call) for call in calls]
    stop = threading.Event()
    with ThreadPoolExecutor(NEIGHBOURS) as pool:
        running = [pool.submit(neighbour, server, 500 + i, stop) for i in range(NEIGHBOURS)]
        time.sleep(1)
        among = server.generate_all([{**call, "rid": f"among-{i}"} for i, call in enumerate(calls)])
        stop.set()
        aborted = sum(one.result() for one in running)
    for keys, before, after in zip(TARGETS, alone, among, strict=True):
        assert after["output_ids"] == before["output_ids"], keys
        assert logprob_gap(after, output_logprobs(before)) <= 1e-4, keys
        evicts = "kv_budget" in keys
        assert not evicts or after["meta_info"]["skipkv"]["compactions"] >= 10
    assert aborted >= NEIGHBOURS
    server.assert_clean()
