"""The traces of a running server, as its page asks for them.

A server may have several processes that answer, each with its own ``LiveTrace``. What a page knows
is said by how far the files were read (``cursor``), so any of them can go on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sgl_skipkv.config import SettingError
from sgl_skipkv.explorer.book import Book, Decode
from sgl_skipkv.explorer.tail import TraceTail

#: requests that a live page shows; the rest is in the file
LIMIT_REQUESTS: Final = 48


class LiveTrace:
    """What the page of a server shows.

    Args:
        paths: source -> trace file; one alone has the source "".
        decode: the text of each token of an output; None: the page shows ids.
    """

    def __init__(self, paths: Mapping[str, str], decode: Decode | None) -> None:
        self._tails = {source: TraceTail(path) for source, path in paths.items()}
        self._book, self._decode = Book(LIMIT_REQUESTS), decode
        self._lock = threading.Lock()

    def data(self, cursor: str | None = None) -> dict[str, Any]:
        """The requests that changed since then, and the new cursor. Reads files: for a thread.

        Args:
            cursor: of the last answer; None: all requests.

        Raises:
            SettingError: no cursor of this server.
        """
        with self._lock:
            for source, tail in self._tails.items():
                for event, at in tail.events():
                    self._book.add(event, source, at)
            since = [-1] * len(self._tails) if cursor is None else self._since(cursor)
            known = dict(zip(self._tails, since, strict=True))
            requests = [
                request.data(self._decode)
                for request in self._book
                if request.changed > known[request.source]
            ]
            return {
                "requests": requests,
                "most": LIMIT_REQUESTS,
                "cursor": ",".join(str(tail.at) for tail in self._tails.values()),
                "unreadable": sum(tail.unreadable for tail in self._tails.values()),
            }

    def _since(self, cursor: str) -> Sequence[int]:
        parts = cursor.split(",")
        if len(parts) != len(self._tails) or not all(
            part.isascii() and part.isdigit() and len(part) < 20 for part in parts
        ):
            expected = f"{len(self._tails)} numbers with commas between them"
            raise SettingError("since", expected, cursor, "the cursor of the last answer")
        # A file that was cut off is shorter than what the page has seen of it, once it is read.
        reached = zip(map(int, parts), self._tails.values(), strict=True)
        return [at if at <= tail.at else -1 for at, tail in reached]
