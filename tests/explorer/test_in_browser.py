"""The explorer's page in a real browser: ``make explorer``. Without one these tests are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer

from bench.explorer.browser import Watched, browser, why_not
from bench.explorer.synthetic import write_trace
from bench.lib import record
from bench.lib.trace import read_trace
from sgl_skipkv.cli.server_process import claimed_port
from sgl_skipkv.cli.view import write_page
from sgl_skipkv.explorer.text import pieces
from sgl_skipkv.patches.api.explorer import add_explorer

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is one")

MODEL = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
TOKENS, BUDGET, INTERVAL = 600, 128, 32
DASH = "\N{EN DASH}"
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "\ud83c",
    "\u2028&amp;\0",
    "<a href='javascript:alert(3)'>x</a>\n",
)


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def trace(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "trace.jsonl"
    write_trace(path, tokenizer, TOKENS, kv_budget=BUDGET, interval=INTERVAL)
    return path


@pytest.fixture(scope="module")
def file(trace: Path, tokenizer: Any) -> Path:
    out = trace.with_suffix(".html")
    write_page(trace, out, partial(pieces, tokenizer))
    return out


@pytest.fixture()
def watched(running: Any, file: Path) -> Iterator[Watched]:
    page = Watched(running, f"{file.as_uri()}#2")
    yield page
    assert page.faults == [] and page.requests == []
    page.close()


def test_the_slider_shows_what_the_trace_says(watched: Watched, trace: Path) -> None:
    page = watched.page
    steps = [one for one in read_trace(trace) if one["rid"].startswith("skipkv")][:-1]
    assert page.locator("h2", has_text=f"skipkv-{TOKENS}").count() == 1
    said = page.inner_text("#now")
    assert said.startswith(f"At the end: {TOKENS} tokens generated, ")
    whole = page.inner_text(".text")
    for back, step in enumerate(reversed(steps[-3:]), start=1):
        page.keyboard.press("ArrowLeft")
        number = len(steps) + 1 - back
        expected = f"Compaction {number} of {len(steps)}: {step['generated']} tokens generated, "
        expected += f"{step['after']} KV tokens held"
        assert page.inner_text("#now").startswith(expected)
        assert page.locator("#slider").get_attribute("aria-valuetext").startswith(expected)
    assert page.locator(".later").count() > 0
    shown = page.inner_text(".text")
    assert len(shown) < len(whole), "what was not generated yet is not shown"
    gone = page.locator(".gone")
    assert gone.first.evaluate("(e) => getComputedStyle(e).textDecorationLine") == "line-through"
    page.locator("#slider").press("Home")
    first = steps[0]
    assert f"{first['generated']} tokens generated" in page.inner_text("#now")
    assert page.locator("#previous").is_disabled()


def test_a_sentence_names_the_one_that_it_repeats(watched: Watched, trace: Path) -> None:
    page = watched.page
    step = next(one for one in read_trace(trace) if one.get("similar"))
    (start, stop), (to, end, cosine) = step["evicted_sentences"][0], step["similar"][0]
    (finish,) = [
        one for one in read_trace(trace) if one["rid"] == step["rid"] and "output_ids" in one
    ]
    index = finish["sentence_spans"].index([start, stop])
    page.locator(".sentence").nth(index).hover()
    said = page.inner_text(".info")
    assert f"positions {start}{DASH}{stop - 1}" in said and "tokens are evicted" in said
    assert (
        f"Redundant to the later sentence at positions {to}{DASH}{end - 1}: cosine {cosine:.3f}"
        in said
    )
    assert page.locator(".sentence.partner").count() == 1
    page.locator(".sentence[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    assert "positions" in page.inner_text(".info")
    assert page.evaluate("document.activeElement.dataset.sentence") == "1"


def test_without_the_policys_word_the_page_counts_itself(running: Any, file: Path) -> None:
    watched = Watched(running, f"{file.as_uri()}#1")
    sentences = watched.page.locator(".sentence")
    told = []
    for i in range(sentences.count() - 1):
        sentences.nth(i).dispatch_event("mouseover")
        told.append(watched.page.inner_text(".info"))
    shares = [one for one in told if "of its tokens with the later sentence" in one]
    assert shares and all("the policy did not" in one for one in shares)
    assert not [one for one in told if "cosine" in one]
    watched.close()


def test_requests_side_by_side(watched: Watched) -> None:
    page = watched.page
    for name in ("random", "streaming"):
        page.get_by_label(f"Show {name}-{TOKENS} side by side").check()
    assert page.locator(".panel").count() == 3
    tops = {round(page.locator(".map").nth(i).bounding_box()["y"]) for i in range(3)}
    assert len(tops) == 1, "drawings begin at the same height"
    page.keyboard.press("Tab")
    page.locator("#previous").click()
    assert page.inner_text("#now").startswith("After ")
    assert page.url.endswith("#2,1,3")
    page.locator(".pick").first.click()
    assert page.locator(".panel").count() == 1


def test_numbers_side_by_side_are_each_requests_own(running: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [finish(rid, [*range(n)]) for rid, n in (("a", 9), ("b", 20), ("c", 9))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(path, path.with_suffix(".html"), None, ["a", "b", "c"])
    watched = Watched(running, f"{path.with_suffix('.html').as_uri()}#1,2,3")
    expected = "9 / 20 / 9 tokens generated, 13 / 24 / 13 KV tokens held, a full cache 13 / 24 / 13"
    assert watched.page.inner_text("#now") == f"At the end: {expected}"
    assert "no compaction" in watched.page.locator(".read").first.inner_text()
    watched.close()
    watched = Watched(running, f"{path.with_suffix('.html').as_uri()}#1,3")
    expected = "9 tokens generated, 13 KV tokens held, a full cache 13"
    assert watched.page.inner_text("#now") == f"At the end: {expected}"
    watched.close()


def test_what_was_not_generated_yet_is_not_told(watched: Watched) -> None:
    page, sentences = watched.page, watched.page.locator(".sentence")
    page.locator("#slider").press("Home")
    sentences.last.dispatch_event("mouseover")
    assert page.inner_text(".info").endswith("not generated yet.")
    assert page.locator(".partner").count() == 0
    unborn = page.locator(".sentence:has(> .later)")
    visible = sentences.count() - unborn.count()
    assert 0 < visible < sentences.count()
    for i in range(visible):
        sentences.nth(i).dispatch_event("mouseover")
        assert page.locator(".partner .later").count() == 0
    sentences.nth(0).focus()
    for _ in range(visible + 5):
        page.keyboard.press("ArrowDown")
    reached = int(page.evaluate("document.activeElement.dataset.sentence"))
    assert reached == visible  # the one that had begun, or the last whole one
    page.locator("#slider").press("End")
    assert "tokens are" in page.inner_text(".info")


def test_arrows_step_behind_a_click_on_a_control(watched: Watched) -> None:
    page = watched.page
    for control in ("#theme", ".pick >> nth=1", "#previous"):
        page.locator("#slider").press("End")
        page.locator(control).click()
        before = page.locator("#slider").input_value()
        page.keyboard.press("ArrowLeft")
        assert int(page.locator("#slider").input_value()) == int(before) - 1, control


def test_the_slider_fits_a_phone(running: Any, file: Path) -> None:
    watched = Watched(running, f"{file.as_uri()}#2", viewport={"width": 390, "height": 800})
    boxes = [watched.page.locator(one).bounding_box() for one in ("#previous", "#slider", "#next")]
    middles = {round((box["y"] + box["height"] / 2) / 8) for box in boxes}
    assert len(middles) == 1 and watched.page.locator(".slider").bounding_box()["height"] < 110
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    watched.close()


def test_map_and_chart_lead_to_a_compaction(watched: Watched) -> None:
    page = watched.page
    page.locator(".frame").click(position={"x": 200, "y": 2})
    assert page.inner_text("#now").startswith("Compaction 1 of ")
    assert page.inner_text(".read").startswith("Position ")
    page.locator(".u-over").click(position={"x": 300, "y": 50})
    assert not page.inner_text("#now").startswith("Compaction 1 of ")
    assert "token positions" in page.locator(".map canvas").get_attribute("aria-label")


def test_dark_light_and_marks(running: Any, file: Path) -> None:
    for scheme, expected in (("dark", "rgb(20, 22, 25)"), ("light", "rgb(253, 253, 251)")):
        watched = Watched(running, file, color_scheme=scheme)
        page, paper = watched.page, "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(paper) == expected
        page.locator("#theme").click()
        assert page.evaluate(paper) != expected
        page.get_by_label("underlined").check()
        line = "getComputedStyle(document.querySelector('.gone')).textDecorationLine"
        assert page.evaluate(line) == "underline"
        page.get_by_label("faded").check()
        assert page.evaluate(line) == "none"
        assert watched.faults == []
        watched.close()


def test_the_bench_and_the_figure(file: Path, tmp_path: Path) -> None:
    """In processes of their own: one has one driver of a browser."""
    environment = {**os.environ, record.FOLDER: str(tmp_path)}
    picture = tmp_path / "explorer.png"
    for name, arguments in (
        ("explorer", ("--tokens", "300", "--record")),
        ("explorer.figure", (str(file), "--step", "2", "--out", str(picture))),
    ):
        command = [sys.executable, "-m", f"bench.{name}", *arguments]
        subprocess.run(command, cwd=record.ROWS.parents[1], env=environment, check=True)
    rows = (tmp_path / "explorer.csv").read_text().splitlines()
    assert len(rows) == 3 and rows[0].startswith("tokens,side_by_side,page_bytes,data_bytes,")
    assert picture.read_bytes().startswith(b"\x89PNG")


def finish(rid: str, ids: list[int], **more: Any) -> dict[str, Any]:
    summary = {"evicted_tokens": 0, "full_kv_tokens": 1, "evicted_sentences": 0, "sentences": 0}
    event = {"event": "finish", "rid": rid, "policy": "rkv", "prompt_tokens": 5, "output_ids": ids}
    return {**event, **summary, "peak_kv_tokens": 1, **more}


def test_hostile_text_runs_nothing(running: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ids = [*range(len(HOSTILE))]
    spans = [[5, 5 + len(ids)], [0, 1 << 40], [9, 3]]
    lines = [
        finish(one, ids, policy=one, finish_reason=one, sentence_spans=spans) for one in HOSTILE
    ]
    lines.append(
        finish(
            "x" * 1_000_000, ids, kv_reuse=HOSTILE[0], continues={"rid": HOSTILE[1], "tokens": 3}
        )
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(path, path.with_suffix(".html"), lambda ids: [HOSTILE[i] for i in ids])
    for number in range(1, len(lines) + 1):
        watched = Watched(running, f"{path.with_suffix('.html').as_uri()}#{number}")
        page = watched.page
        text = page.locator(".text").text_content()
        for one in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[5].strip()):
            assert one in text
        assert page.locator(".text img, .text script, .text a, nav img").count() == 0
        page.locator(".sentence").first.hover()
        page.wait_for_timeout(100)
        assert watched.faults == [] and watched.requests == []
        watched.close()


def test_turns_and_branches(running: Any, tmp_path: Path) -> None:
    """Each shows the text that it goes on from, and what was evicted before."""
    path = tmp_path / "trace.jsonl"
    kept = {"before": 13, "after": 9, "kept": [*range(5), 9, 10, 11, 12], "evicted_sentences": []}
    same = {"policy": "rkv", "prompt_tokens": 5, "generated": 8}
    first = [
        {"event": "compact", "rid": "first", **same, **kept},
        finish("first", [*range(9)], kv_reuse="budget"),
    ]
    more = {"prompt_tokens": 20, "kv_reuse": "budget", "continues": {"rid": "first", "tokens": 13}}
    branches = [finish(rid, [100, 101], **more) for rid in ("one", "two")]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*first, *branches]))
    write_page(path, path.with_suffix(".html"), lambda ids: [f"t{i} " for i in ids])
    watched = Watched(running, f"{path.with_suffix('.html').as_uri()}#3")
    page = watched.page
    assert page.locator("nav ul ul .entry").count() == 2
    text = page.locator(".text").text_content()
    assert "t0 t1 " in text and "t7 " in text and "t8 " not in text and "t100 " in text
    assert "Next turn: 7 tokens" in text
    assert page.locator(".gone").all_text_contents() == ["t0 t1 t2 t3 "]
    assert "13 tokens continue first, 4 of them evicted before" in page.inner_text(".note")
    page.locator(".note button").click()
    assert page.locator("h2", has_text="first").count() == 1
    assert watched.faults == []
    watched.close()


def test_a_live_page_follows_its_server(running: Any, tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(finish("first", [5])) + "\n")
    app = FastAPI()
    add_explorer(app, {"": str(path)}, tokenizer, has_key=False)
    with claimed_port() as held:
        port = held.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            watched = Watched(running, f"http://127.0.0.1:{port}/skipkv")
            page = watched.page
            assert page.inner_text("#live") == "Live" and page.locator(".entry").count() == 1
            with path.open("a") as file:
                file.write(json.dumps(finish("second", [6])) + "\n")
            page.locator(".rid", has_text="second").wait_for(timeout=20_000)
            assert page.locator("h2", has_text="first").count() == 1, "what is shown stays"
            assert page.inner_text(".rid >> nth=0") == "second", "the newest first"
            page.get_by_label("Show second side by side").check()
            page.locator(".panel:has-text('first') .sentence").focus()
            said = page.locator(".info").all_inner_texts()
            with path.open("a") as file:
                file.write(json.dumps(finish("second", [6, 7, 8])) + "\n")
            page.locator(".pick small", has_text="3 tokens").wait_for(timeout=20_000)
            page.wait_for_timeout(100)
            assert page.evaluate("document.activeElement.className").startswith("sentence")
            assert page.locator(".info").all_inner_texts() == said
            assert watched.faults == []
            asked = [url for url in watched.requests if "/skipkv/trace?since=" not in url]
            assert asked == []
            watched.close()
        finally:
            server.should_exit = True
            thread.join()
