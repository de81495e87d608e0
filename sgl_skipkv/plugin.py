"""SGLang's entry point (``sglang.srt.plugins``): called once in every process of a server."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def register() -> None:
    """Check and register the hooks.

    A wrong setting in the environment, or a malformed steering file named there, ends the process
    by ``SystemExit``: SGLang logs and swallows every other exception of a plugin.
    """
    import sglang

    from sgl_skipkv.config import ENV_CONFIG, copy_of

    try:
        from sgl_skipkv.patches import registry
        from sgl_skipkv.patches.startup.flags import settings_or_exit
    except ModuleNotFoundError as error:
        if error.name != "sgl_skipkv.patches":
            raise
        folder = os.path.dirname(__file__)
        raise SystemExit(f"sgl_skipkv: {folder} lacks the link patches; install it") from error

    if ENV_CONFIG in os.environ:
        # SGLang's copy would stay when a trainer takes the variable away for its next engine.
        os.environ.pop(copy_of(ENV_CONFIG), None)
    config = settings_or_exit()
    problems = registry.install(sglang.__version__)
    os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", "sgl_skipkv.patches.api.worker_app:app")
    if config.enabled and problems:
        raise SystemExit("sgl_skipkv: refused: " + "; ".join(problems))
