"""Why a server did not answer, in words instead of names of exceptions."""

from __future__ import annotations

from typing import Final

import requests
from requests import exceptions
from urllib3.exceptions import NewConnectionError

# The first that fits: some are subclasses of later ones.
_WORDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (exceptions.MissingSchema, "no http:// in front"),
    (exceptions.InvalidSchema, "no http:// in front"),
    (exceptions.InvalidURL, "no address"),
    (exceptions.ProxyError, "the proxy does not answer"),
    (exceptions.SSLError, "no TLS that is trusted"),
    (exceptions.Timeout, "no answer in time"),
    (exceptions.ConnectionError, "the connection failed or was closed"),
    (exceptions.JSONDecodeError, "its answer is no JSON"),
    (exceptions.TooManyRedirects, "it redirects in a circle"),
)


def why_no_answer(error: requests.RequestException) -> str:
    """What went wrong with a request."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    if type(reason).__name__ == "NameResolutionError":  # which urllib3 1 does not have
        return "no host of that name"
    if isinstance(reason, NewConnectionError):
        return "nothing listens there"
    return next((words for kind, words in _WORDS if isinstance(error, kind)), "no HTTP answer")
