"""The explorer's page as a file and as a route: complete, asks for nothing, text stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware
from transformers import AutoTokenizer

from sgl_skipkv.cli.main import main
from sgl_skipkv.explorer.page import page_of
from sgl_skipkv.patches.api.explorer import add_explorer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "reasoner"
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>&\u2028\ud800\0"


class Parts(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = True
            self.texts.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            tag, text = self.texts[-1]
            self.texts[-1] = tag, text + data

    @property
    def policy(self) -> str:
        (policy,) = [a["content"] for t, a in self.elements if t == "meta" and "http-equiv" in a]
        return policy or ""

    @property
    def data(self) -> Any:
        (at,) = [i for i, (_, a) in enumerate(self.elements) if a.get("id") == "data"]
        before = sum(t in ("script", "style") for t, _ in self.elements[:at])
        return json.loads(self.texts[before][1])


def finish(rid: str, ids: list[int], **more: Any) -> dict[str, Any]:
    summary = {"evicted_tokens": 0, "full_kv_tokens": 1, "evicted_sentences": 0, "sentences": 0}
    event = {"event": "finish", "rid": rid, "policy": "rkv", "prompt_tokens": 3, "output_ids": ids}
    return {**event, **summary, "peak_kv_tokens": 1, **more}


@pytest.fixture()
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [finish("a", [5, 6]), finish(HOSTILE, [7])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_nothing_is_loaded_and_the_policy_allows_what_is_inside() -> None:
    page = Parts(page_of({"requests": []}))
    for tag, attributes in page.elements:
        assert not {"src", "href"} & attributes.keys() or attributes == {
            "class": "skip",
            "href": "#panels",
        }, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    digests = {
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, text in page.texts
        if not text.startswith("{")
    }
    assert set(re.findall(r"'sha256-[^']+'", page.policy)) == digests and len(digests) == 9
    assert "default-src 'none'" in page.policy and "connect-src 'none'" in page.policy
    assert "unsafe" not in page.policy
    assert "connect-src 'self'" in Parts(page_of({"requests": []}, live=True)).policy


def test_the_page_is_small_and_its_sources_are_short() -> None:
    assert len(page_of({"requests": []}).encode()) < 3_000_000
    folder = ROOT / "sgl_skipkv" / "explorer"
    for source in (*folder.glob("*.js"), *folder.glob("*.css"), *folder.glob("*.html")):
        text = source.read_text()
        assert len(text.splitlines()) <= 320, source.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    assert "MIT" in (folder / "vendor" / "LICENSE.uPlot.txt").read_text()


def luminance(color: str) -> float:
    """Relative luminance of a colour as #rrggbb (WCAG 2.2)."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [":root", ':root[data-theme="dark"]'])
def test_text_has_contrast(theme: str) -> None:
    """4.5 to 1 for every text on whatever is behind it, evicted text included."""
    css = (ROOT / "sgl_skipkv" / "explorer" / "page.css").read_text()
    block = css[css.index(theme + " {") :].partition("}")[0]
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))
    pairs = [(ink, paper) for ink in ("ink", "quiet", "accent") for paper in ("paper", "raised")]
    pairs += [(ink, paper) for ink in ("ink", "faded") for paper in ("paper", "chosen", "partner")]
    for ink, paper in pairs:
        low, high = sorted(map(luminance, (colors[ink], colors[paper])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)


def test_hostile_text_is_data(trace: Path) -> None:
    assert main(["view", str(trace)]) == 0
    html = trace.with_suffix(".html").read_bytes().decode()
    page = Parts(html)
    tags = [tag for tag, _ in page.elements]
    assert "img" not in tags and tags.count("script") == 8
    assert [one["rid"] for one in page.data["requests"]] == ["a", HOSTILE]
    start = html.index('type="application/json">')
    assert html[start : html.index("</script>", start)].isascii()


def test_texts_ids_and_named_requests(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace.parent / "page.html"
    assert main(["view", str(trace), "--model-path", str(MODEL), "--rid", "a", "-o", str(out)]) == 0
    assert f"{out} (1 of 2 requests, 0.1 MB)" in capsys.readouterr().out.replace("\n", "")
    data = Parts(out.read_text()).data
    (request,) = data["requests"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert "".join(request["text"]) == tokenizer.decode([5, 6]) and request["ids"] == [5, 6]
    assert data["side_by_side"] == [request["number"]] and data["live"] is False


def test_a_line_of_ten_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ids = [100_000] * 1_500_000
    path.write_text(json.dumps(finish("x" * 1_000_000, ids)) + "\n")
    assert path.stat().st_size > 10_000_000
    assert main(["view", str(path)]) == 0
    assert path.with_suffix(".html").stat().st_size < 3_000_000


WRONG = (
    (["--rid", "b"], "rid: expected a request of the trace, got 'b'; choices: 'a', "),
    (["-o", "/no/such/folder/x.html"], "out: expected a file that can be written, got "),
    (["-o", "x\0"], "out: expected a file that can be written, got "),
    (["--model-path", "/no/such"], "model-path: expected a folder or name of a model"),
)


@pytest.mark.parametrize(("more", "message"), WRONG)
def test_wrong_arguments(
    more: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["view", str(trace), *more])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file: expected at least one request"),
        ("{", "file: expected a trace, JSON lines"),
        (json.dumps(finish("a", ["x"])), "trace.jsonl, line 1: finish.output_ids.0"),
        (json.dumps({**finish("a", [1]), "kv_budget": -1}), "finish.kv_budget"),
    ],
)
def test_a_file_that_is_no_trace(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["view", str(path)])
    assert message in capsys.readouterr().err


# -- the route, behind SGLang's own middleware


def client_of(trace: Path, **keys: str | None) -> TestClient:
    app = FastAPI()
    tokenizer, has_key = AutoTokenizer.from_pretrained(MODEL), any(keys.values())
    add_explorer(app, {"": str(trace)}, tokenizer, has_key=has_key)
    add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None, **keys})
    return TestClient(app)


def test_the_route_serves_the_page_and_what_is_new(trace: Path) -> None:
    client = client_of(trace)
    answer = client.get("/skipkv")
    page = Parts(answer.text)
    assert page.data["live"] is True and len(page.data["requests"]) == 2
    assert answer.headers["cache-control"] == "no-store"
    since = page.data["cursor"]
    assert client.get("/skipkv/trace", params={"since": since}).json()["requests"] == []
    with trace.open("a") as file:
        file.write(json.dumps(finish("new", [8])) + "\n")
    (new,) = client.get("/skipkv/trace", params={"since": since}).json()["requests"]
    assert new["rid"] == "new" and len(new["text"]) == 1
    wrong = client.get("/skipkv/trace", params={"since": "x"})
    assert wrong.status_code == 400 and "since: expected 1 numbers" in wrong.text


@pytest.mark.parametrize("path", ["/skipkv", "/skipkv/trace?since=0"])
def test_who_may_read(path: str, trace: Path) -> None:
    """The administrator where SGLang knows one, else who has the key; no page of another site."""

    def status(client: TestClient, key: str | None, **more: str) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return client.get(path, headers={**headers, **more}).status_code

    one = client_of(trace, api_key="k")
    assert [status(one, key) for key in (None, "x", "k")] == [401, 401, 200]
    both = client_of(trace, api_key="k", admin_api_key="a")
    assert [status(both, key) for key in (None, "k", "a")] == [401, 401, 200]
    assert status(one, "k", Origin="http://elsewhere.example") == 403
    # A site whose name leads to this server has no key; the server's own name may be any.
    hosts = ("evil.example:30000", "127.0.0.1:30000", "[::1]:30000", "localhost", "gpu-box:30000")
    found = [status(client_of(trace), None, Host=host) for host in hosts]
    assert found == [403, 200, 200, 200, 200]
    assert status(one, "k", Host="llm.example") == 200
