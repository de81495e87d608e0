"""Mixed chunks (``--enable-mixed-chunk``): a prefill that also runs the decode step of running
requests. They are its last rows, of one token each.

SGLang treats them as prompts of one token behind a long prefix. We treat them as a decode step.
"""

from __future__ import annotations

from typing import Any


def decoding_rows(batch: Any) -> int:
    """How many rows at the end of a prefill decode."""
    return len(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else 0
