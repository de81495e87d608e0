"""The routes of the explorer: ``GET /skipkv``, the page, and what it asks for."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any, Final

from fastapi import HTTPException, Request
from fastapi.responses import HTMLResponse, Response

from sgl_skipkv.config import SettingError, brief
from sgl_skipkv.explorer.live import LiveTrace
from sgl_skipkv.explorer.page import page_of
from sgl_skipkv.explorer.text import pieces

PAGE: Final = "/skipkv"
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_explorer(app: Any, paths: Mapping[str, str], tokenizer: Any, *, has_key: bool) -> None:
    """Serve the page of these trace files, by the names of their replicas.

    SGLang's middleware asks for its API key here as for every route: for that of an administrator
    where one is set, because the text is of all clients. FastAPI runs functions that are not
    asynchronous in threads, so no request waits while a file is read. Without a tokenizer
    (``--skip-tokenizer-init``) the page shows token ids.

    Args:
        has_key: whether SGLang asks for a key.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    decode = None if tokenizer is None else partial(pieces, tokenizer)
    trace = LiveTrace(paths, decode)

    def page(request: Request) -> HTMLResponse:
        refuse_other_sites(request, has_key)
        return HTMLResponse(page_of(trace.data(), live=True), headers=_HEADERS)

    def news(request: Request, since: str) -> Response:
        refuse_other_sites(request, has_key)
        try:
            data = trace.data(since)
        except SettingError as error:
            raise HTTPException(400, str(error)) from error
        # In ASCII, as a request id of a client may have a lone surrogate, which has no UTF-8.
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        return Response(text, media_type="application/json", headers=_HEADERS)

    for path, endpoint in ((PAGE, page), (f"{PAGE}/trace", news)):
        guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)
        app.add_api_route(path, guarded, methods=["GET"], include_in_schema=False)


def refuse_other_sites(request: Request, has_key: bool) -> None:
    """SGLang lets pages of any site read its answers; text of other people is not for them.

    A browser names the origin when a page of another site asks, and not for its own. To that site
    this server is its own if the site's name leads to this address for a while (DNS rebinding);
    such a page has no key.
    """
    if "origin" in request.headers:
        raise HTTPException(403, "the explorer answers its own page only")
    if not (has_key or _names_no_site(request.url.hostname or "")):
        said = "without --api-key the explorer answers only to an address, or a name without a dot"
        raise HTTPException(403, f"{said}, not to {brief(request.url.hostname)}")


def _names_no_site(host: str) -> bool:
    """An address, this machine's own name, or one without a dot, which no site has."""
    try:
        ip_address(host)
    except ValueError:
        return "." not in host or host == socket.gethostname().lower()
    return True
