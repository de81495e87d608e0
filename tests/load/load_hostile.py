"""The load job that asks for what cannot be: wrong bodies, wrong values, wrong starts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hostile_bodies import judge
from hostile_client import answers_to_values, drawn, p99_ms, wrongly_answered
from load_calls import POOL_TOKENS
from load_rows import Findings
from load_server import SETTINGS, LoadServer
from servers import Server
from test_bad_input import WRONG
from vector_files import with_header

from sgl_skipkv.cli.progress import track
from sgl_skipkv.config import ServerConfig

REFUSED_WITHIN_MS, ENDED_WITHIN_S = 50, 60
ROUNDS = 4
#: what an operator can get wrong: flags, and the word that the last line has to have
WRONG_STARTS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "a setting that does not exist": ({"kv_bugdet": 64}, (), "kv_bugdet"),
    "a value out of range": ({"kv_budget": 0}, (), "kv_budget"),
    "a steering file that is none": ({}, ("--steering-vector", "v.safetensors"), "steering_vector"),
    "a server that cannot evict": ({"kv_budget": 64}, ("--page-size", "8"), "page size 8"),
}


def hostile(model: Path, folder: Path, findings: Findings) -> None:
    """L4: 2,000 bodies that hypothesis draws, 8 at once; every wrong value of
    ``test_bad_input.py``, one at a time; servers that are started wrongly. A server without the
    plugin gets the wrong values where SGLang lets foreign keys through."""
    start = time.perf_counter()
    with LoadServer(model, folder / "ours", pool_tokens=POOL_TOKENS, vector=True) as ours:
        ours.ready(findings)
        answer_bodies(ours, findings)
        refuse_values(ours, findings)
        ours.report_clean(findings)
    start_wrongly(model, folder, findings)
    findings.at_most("seconds", time.perf_counter() - start, 300)
    plain = findings.plain()
    with LoadServer(model, folder / "base", pool_tokens=POOL_TOKENS, plugin=False) as base:
        base.ready(plain)
        refuse_values(base, plain)
        base.report_clean(plain)


def answer_bodies(server: LoadServer, findings: Findings) -> None:
    """Each as the schema says."""
    sent = drawn(findings.count(2000, 50))
    settings = ServerConfig(steering_vector="v.safetensors", **SETTINGS)
    verdicts = [judge(body, settings) for body in sent]
    wrong = wrongly_answered(server, sent, verdicts)
    findings.note("bodies", len(sent))
    findings.exactly("bodies answered otherwise than the schema says", len(wrong), 0)
    for text in wrong[:3]:
        print(text)
    findings.happened("bodies refused", sum(bool(one.names) for one in verdicts), 900)
    budgeted = [one for one in verdicts if not one.names and one.settings is not None]
    findings.happened("bodies that bring a budget", len(budgeted), 300)


def refuse_values(server: LoadServer, findings: Findings) -> None:
    """Every wrong value some times, in ``custom_params``, where SGLang looks at nothing itself."""
    answers = answers_to_values(server, [{"custom_params": keys} for _, keys in WRONG * ROUNDS])
    findings.note("wrong values sent", len(answers))
    not_refused = sum(answer.status != 400 for answer in answers)
    findings.exactly("wrong values not refused with 400", not_refused, 0)
    findings.at_most("p99 of an answer to a wrong value, ms", p99_ms(answers), REFUSED_WITHIN_MS)


def start_wrongly(model: Path, folder: Path, findings: Findings) -> None:
    """Each ends by itself, soon, with one line that names the cause, and nothing is left."""
    right, slowest_s = 0, 0.0
    for name, (settings, flags, word) in track(
        WRONG_STARTS.items(), "L4 wrong starts", len(WRONG_STARTS)
    ):
        place = folder / name.replace(" ", "-")
        place.mkdir(parents=True)
        with_header(place / "v.safetensors", b'{"vec', 4000)
        (place / "skipkv.json").write_text(json.dumps(settings))
        arguments = [*flags, "--skipkv-config", "skipkv.json"]
        begun = time.perf_counter()
        server = Server(model, place, arguments, trace=False)
        try:
            status = server.wait_exit()
            slowest_s = max(slowest_s, time.perf_counter() - begun)
            last = server.log.strip().splitlines()[-1]
            ended = status != 0 and last.startswith("sgl_skipkv: ") and word in last
            right += ended and server.wait_gone(20)
        finally:
            server.stop()
    findings.exactly("wrong starts that end with one line", right, len(WRONG_STARTS))
    findings.at_most("slowest of them, seconds", slowest_s, ENDED_WITHIN_S)
