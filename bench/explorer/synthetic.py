"""A trace of a length that no bundled model writes, in the format of a server's."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PROMPT_TOKENS: Final = 120
SINK_TOKENS, RECENT_TOKENS = 4, 64
NAMES: Final = ("Ann", "Ben", "Dan", "Ivy", "Joan", "Otto", "Paul", "Ruth")


def sentences(tokenizer: Any, tokens: int, seed: int = 0) -> list[list[int]]:
    """Token ids of sentences as the bundled model writes them, so many in all."""
    draw, found, total = random.Random(seed), list[list[int]](), 0
    while total < tokens:
        one, other, third = draw.sample(NAMES, 3)
        a, b = draw.randrange(1, 20), draw.randrange(1, 20)
        text = (
            f"{len(found) % 40}. {one}: {other} = {a} and {third} = {b}, {a} + {b} = {a + b}.\n\n"
        )
        if found and draw.random() < 0.4:
            text = f"Wait, let me check {one} again.\n"
        found.append(tokenizer.encode(text)[: tokens - total])
        total += len(found[-1])
    return found


def write_trace(
    path: Path, tokenizer: Any, tokens: int, *, kv_budget: int, interval: int = 128
) -> None:
    """Append a request per kind of eviction: single tokens at random, which is the most work for a
    page, whole sentences, and the oldest tokens."""
    written = sentences(tokenizer, tokens)
    spans, at = list[tuple[int, int]](), PROMPT_TOKENS
    for sentence in written:
        spans.append((at, at + len(sentence)))
        at += len(sentence)
    ids = [token_id for sentence in written for token_id in sentence]
    with path.open("a", encoding="utf-8") as file:
        for policy in ("random", "skipkv", "streaming"):
            for event in _request(policy, ids, spans, kv_budget, interval):
                file.write(json.dumps(event, separators=(",", ":")) + "\n")


def _request(
    policy: str,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    kv_budget: int,
    interval: int,
) -> list[dict[str, Any]]:
    draw, rid = random.Random(1), f"{policy}-{len(ids)}"
    prompt, live, evicted_whole, events = [*range(PROMPT_TOKENS)], list[int](), 0, []
    same = {"rid": rid, "policy": policy, "prompt_tokens": PROMPT_TOKENS}
    alive = dict(enumerate(spans))
    for generated in range(kv_budget + interval, len(ids), interval):
        first_new = live[-1] + 1 if live else PROMPT_TOKENS
        live += range(first_new, PROMPT_TOKENS + generated)
        kept = _kept(policy, live, kv_budget, draw)
        rest, closed = set(kept), PROMPT_TOKENS + generated
        gone = [i for i, (a, b) in alive.items() if b <= closed and rest.isdisjoint(range(a, b))]
        similar = [[*spans[min(i + 1, len(spans) - 1)], 0.96] for i in gone]
        for i in gone:
            del alive[i]
        events.append(
            {
                **{"event": "compact", **same, "generated": generated},
                **{"before": PROMPT_TOKENS + len(live), "after": PROMPT_TOKENS + len(kept)},
                **{"kept": [*prompt, *kept], "evicted_sentences": [spans[i] for i in gone]},
                **({"similar": similar} if policy == "skipkv" else {}),
            }
        )
        evicted_whole += len(gone)
        live = kept
    held = len(live) + interval
    finish = {
        **{"event": "finish", **same, "output_ids": ids, "finish_reason": "length"},
        **{"kv_params": {"tau": 0.95} if policy == "skipkv" else {}, "sentence_spans": spans},
        **{"kv_budget": kv_budget, "compactions": len(events), "sentences": len(spans)},
        **{"evicted_tokens": len(ids) - held, "kv_tokens": held, "full_kv_tokens": len(ids) - 1},
        **{"peak_kv_tokens": kv_budget + interval, "evicted_sentences": evicted_whole},
    }
    return [*events, finish]


def _kept(policy: str, live: Sequence[int], kv_budget: int, draw: random.Random) -> list[int]:
    recent = live[-RECENT_TOKENS:]
    old = live[SINK_TOKENS:-RECENT_TOKENS]
    room = kv_budget - SINK_TOKENS - RECENT_TOKENS
    if policy == "random":
        chosen = sorted(draw.sample(old, room))
    elif policy == "streaming":
        chosen = [*old[-room:]]
    else:  # stretches of about a sentence
        pieces = [old[i : i + 24] for i in range(0, len(old), 24)]
        draw.shuffle(pieces)
        chosen = sorted([position for piece in pieces for position in piece][:room])
    return [*live[:SINK_TOKENS], *chosen, *recent]
