"""``skipkv doctor``: versions, platform, every hook's state, every capability, one verdict."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata

import pytest

from sgl_skipkv.cli.main import main
from sgl_skipkv.patches.registry import HOOKS
from sgl_skipkv.patches.startup.capabilities import CAPABILITIES


@pytest.fixture(scope="module")
def doctor() -> subprocess.CompletedProcess[str]:
    command = "import sys; from sgl_skipkv.cli.main import main; sys.exit(main(['doctor']))"
    return subprocess.run(
        [sys.executable, "-P", "-c", command],
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_names_everything(doctor: subprocess.CompletedProcess[str]) -> None:
    assert doctor.returncode == 0, doctor.stderr[-2000:]
    for package in ("sglang", "torch", "transformers"):
        assert metadata.version(package) in doctor.stdout
    assert "skipkv_cpu" in doctor.stdout
    lines = doctor.stdout.splitlines()
    for hook in HOOKS:
        line = next(line for line in lines if hook.target in line and hook.why in line)
        assert " ok " in line
    for row in CAPABILITIES:
        line = next(line for line in lines if row.name in line and row.why in line)
        assert f" {row.supported} " in line
    assert "ready" in doctor.stdout


class _Proxy(BaseHTTPRequestHandler):
    """Something on the way that lists a model for whoever has its key, and then answers nothing."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer secret"
        body = b'{"data": [{"id": "m"}]}' if allowed else b"{}"
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.send_error(503 if "Authorization" in self.headers else 401)


def test_an_endpoint_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        assert main(["doctor", "--url", url + "/", "--api-key", "secret"]) == 1
        assert capsys.readouterr().out.count("status 503") == 9
        _assert_no_endpoint(url, "status 401", capsys)
        proxy.shutdown()
    _assert_no_endpoint(url, "ConnectionError", capsys)
    _assert_no_endpoint("127.0.0.1", "MissingSchema", capsys)


def _assert_no_endpoint(url: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--url", url])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "url: expected the address of a running server or router" in message
    assert f"got '{url} ({why})'; choices: " in message


def test_every_seam_names_what_uses_it() -> None:
    """Hooks are resolved when they are installed; those of the kind "use" only here."""
    for hook in HOOKS:
        assert callable(pkgutil.resolve_name(f"sgl_skipkv.patches.{hook.function}")), hook


def test_the_matrix_covers_what_sglang_offers() -> None:
    names = " ".join(row.name.lower() for row in CAPABILITIES)
    for feature in (
        *("backend", "page size", "mla", "sliding window", "hybrid / mamba", "speculative"),
        *("mixed chunk", "disaggregation", "pd multiplexing"),
        *("tensor parallel", "data parallel", "pipeline", "dp attention", "expert parallel"),
        *("hicache", "lmcache"),
        *("hisparse", "session", "beam", "canary", "quantised kv"),
    ):
        assert feature in names, feature
    assert all(row.why for row in CAPABILITIES)
    assert {row.supported for row in CAPABILITIES} == {"yes", "no", "per request"}
