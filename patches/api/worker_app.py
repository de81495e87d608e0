"""SGLang's HTTP app in the worker processes of ``--tokenizer-worker-num``.

They import the app and nothing else, so no plugin would be loaded there and our keys, which such a
server cannot serve, would be dropped instead of refused. SGLang imports this module in its place
(``SGLANG_HTTP_SERVER_APP_PATH``).
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402  plugins change what it imports

__all__ = ["app"]
