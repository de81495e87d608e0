"""SGLang's entry point (``sglang.srt.plugins``): called once in every process of a server."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Check every seam and register the hooks; a wrong setting in the environment, or a wrong
    steering file that it names, ends the process.

    SGLang logs and swallows whatever a plugin raises, except ``SystemExit``.
    """
    import sglang

    from sgl_skipkv.config import SettingError, load_server_config
    from sgl_skipkv.patches import seams
    from sgl_skipkv.steering_vector import SteeringVector

    try:
        config = load_server_config()
        if config.steering_vector is not None:
            SteeringVector.load(config.steering_vector)
    except SettingError as error:
        raise SystemExit(f"sgl_skipkv: {error}") from error
    seams.install(sglang.__version__)
    if config.asked and (problems := seams.problems_before()):
        raise SystemExit("sgl_skipkv: refused: " + "; ".join(problems))
