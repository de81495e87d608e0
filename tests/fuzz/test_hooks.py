"""Thousands of senseless calls of our hooks: nothing may get out; and proof that it would be seen.

``python tests/fuzz/fuzz_hooks.py`` makes a million of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hook_calls import WRONG, Escaped, HookCalls
from planted_bugs import plant


@pytest.fixture(scope="module", autouse=True)
def quiet(plugin_loaded: None) -> Iterator[None]:
    """Requests that hooks refuse are not news."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_nothing_gets_out_of_a_hook() -> None:
    hooks = HookCalls(seed=0)
    hooks.run(8000, part=200)
    assert min(hooks.calls[name] for name in hooks.hooks) > 300
    # an empty run proves nothing
    wanted = {"opened": 25, "admitted": 200, "preempted": 5, "compacted": 3, "recorded": 10}
    wanted |= {"ended in the queue": 5, "victims in order": 20}
    assert {name: n for name, n in hooks.seen.items() if n < wanted[name]} == {}, hooks.seen
    for name in ("resolve_request", "check_prompt", "move_keys", "open_request"):
        assert 5 < hooks.refused[name] < hooks.calls[name]


def bugs() -> list[tuple[Callable[..., Any], str, str]]:
    """Our function, a piece of its source, and what somebody may have written there instead."""
    from sgl_skipkv import config
    from sgl_skipkv.patches.api import gate
    from sgl_skipkv.patches.engine import forward, future_kv, retraction, scheduler, waiting
    from sgl_skipkv.request import settings

    return [
        (scheduler.open_request, "isinstance(params, dict)", "params is not None"),
        (scheduler.bound_new_tokens, " if bound is not None else limit", ""),
        (waiting.is_stranded, "len(req.output_ids)", "state.sentences.table[0]"),
        (gate.collect_keys, "isinstance(custom, Mapping)", "custom"),
        (settings._check_budget, "type(kv_budget) is not int or ", ""),
        (settings._resolve_steering, "isinstance(value, int | float) and ", ""),
        (config.brief, "text if len(text) <= 80 else text[:77] + '...'", "str(value)"),
        (retraction.limit_prefix_match, "min(max_prefix_len, shareable)", "shareable - 1"),
        (retraction.order_victims, "reqs[i] in staying", "reqs[i + 1] in staying"),
        (future_kv.restored_tokens, "0 if state.offloaded.backup is None else ", ""),
        (
            forward.prepare_forward,
            "0 if state is None else state.kv.evicted_tokens",
            "state.held.track_id",
        ),
    ]


@pytest.mark.parametrize("number", range(11))
def test_a_planted_mistake_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function, piece, instead = bugs()[number]
    plant(monkeypatch, function, piece.replace("'", '"'), instead)
    with pytest.raises((Escaped, *WRONG)):
        HookCalls(seed=1).run(20_000, part=200)
