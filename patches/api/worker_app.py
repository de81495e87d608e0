"""SGLang's HTTP app in the worker processes of ``--tokenizer-worker-num``.

Those processes import only the app, so they would load no plugin, and our keys would be dropped.
SGLang imports this module instead (``SGLANG_HTTP_SERVER_APP_PATH``).
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402  plugins change what it imports

__all__ = ["app"]
