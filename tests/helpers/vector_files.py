"""Steering vectors for tests: a right one, and every wrong file with a word of its error."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgl_skipkv.steering.vector import FILE_LIMIT_BYTES, Origin

WIDTH = 5


def origin(**changes: Any) -> Origin:
    """Where a vector of ``WIDTH`` numbers comes from, but for what a test changes."""
    values: dict[str, Any] = {
        **{"model": "m", "hidden_size": WIDTH, "layer": 1, "keywords": "Wait,again"},
        **{"delimiters": "math", "traces": 3, "execution_thoughts": 4, "nonexecution_thoughts": 5},
        **{"split_cosine": 0.5, "separation": 1.5, "date": "2026-11-21"},
    }
    return Origin.model_validate({**values, **changes})


METADATA = {key: str(value) for key, value in origin().model_dump().items()}
GOOD = torch.arange(1.0, WIDTH + 1)


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: Any = METADATA) -> Path:
    save_file(tensors, path, metadata)
    return path


def with_header(path: Path, header: bytes, length: int | None = None) -> Path:
    """A file that says how long its header is, rightly or not, and has no data."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    return path


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in METADATA.items() if key != name}


def header(**entry: Any) -> bytes:
    """The header of a file with one tensor named vector, and right metadata."""
    whole = {"dtype": "F32", "shape": [5], "data_offsets": [0, 20], **entry}
    return json.dumps({"__metadata__": METADATA, "vector": whole}).encode()


def with_data(path: Path, head: bytes, data: bytes = bytes(20)) -> None:
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def listening(path: Path) -> None:
    """A socket: it is there, and even root cannot open it as a file."""
    place = os.open(path.parent, os.O_RDONLY)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(f"/proc/self/fd/{place}/{path.name}")
    finally:
        os.close(place)


def link_out(path: Path) -> None:
    folder = path.parent / "elsewhere"
    folder.mkdir()
    path.symlink_to(write(folder / path.name, {"vector": GOOD}))


def told(**changes: str) -> Callable[[Path], Any]:
    """A right vector with other metadata."""
    return lambda p: write(p, {"vector": GOOD}, METADATA | changes)


def stated(**entry: Any) -> Callable[[Path], Any]:
    """A file of 20 bytes whose header says something else of its tensor."""
    return lambda p: with_data(p, header(**entry))


NO_METADATA = json.dumps({"vector": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}})
# Every kind of file that is refused: a word of the message -> name -> how to make it.
_BY_WORD: dict[str, dict[str, Callable[[Path], Any]]] = {
    "a safetensors file": {
        # what a hand or a crash leaves behind
        "empty": lambda p: p.write_bytes(b""),
        "text": lambda p: p.write_text("alpha: 1"),
        "a pickle": lambda p: torch.save({"vector": GOOD}, p),
        "truncated header": lambda p: with_header(p, b'{"vec', 4000),
        "header longer than the file": lambda p: with_header(p, b"{}", 2**40),
        "header is no JSON": lambda p: with_header(p, b"not json"),
        "data missing": lambda p: with_header(p, NO_METADATA.encode()),
        # what only a hostile hand writes
        "a header deeper than any parser": lambda p: with_header(p, b'{"vector":' * 20_000),
        "a header of no length": lambda p: with_header(p, b"", 0),
        "a header of negative length": lambda p: p.write_bytes(b"\xff" * 8 + b"{}"),
        "more numbers than the file has": stated(shape=[2**60]),
        "a shape that overflows": stated(shape=[2**62, 2**62]),
        "a negative shape": stated(shape=[-5]),
        "offsets before the data": stated(data_offsets=[-20, 0]),
        "offsets behind the data": stated(data_offsets=[20, 40]),
        "a type that does not exist": stated(dtype="O8"),
        "metadata that is no text": lambda p: with_data(
            p, header().replace(b'"layer": "1"', b'"layer": 1')
        ),
    },
    "a regular file": {"a folder": lambda p: p.mkdir(), "a pipe": os.mkfifo, "a socket": listening},
    "No such file": {
        "missing": lambda p: None,
        "a link into nothing": lambda p: p.symlink_to("/no/such/file"),
    },
    "a link within its": {
        "a link to a device": lambda p: p.symlink_to("/dev/zero"),
        "a link out of the folder, to a right file": link_out,
    },
    "/etc/passwd": {"a link out of the folder, to text": lambda p: p.symlink_to("/etc/passwd")},
    "Too many levels": {"a link to itself": lambda p: p.symlink_to(p)},
    "at most": {"too large": lambda p: p.open("wb").truncate(FILE_LIMIT_BYTES + 1)},
    "one tensor named vector": {
        "another tensor": lambda p: write(p, {"v": GOOD}),
        "two tensors": lambda p: write(p, {"vector": GOOD, "w": GOOD + 1}),
    },
    "got 'I64": {"integers": lambda p: write(p, {"vector": GOOD.long()})},
    "got 'F64": {"doubles": lambda p: write(p, {"vector": GOOD.double()})},
    "finite": {
        "not a number": lambda p: write(p, {"vector": GOOD / 0 * 0}),
        "infinite": lambda p: write(p, {"vector": GOOD / 0}),
        "one number that is not finite": lambda p: with_data(
            p, header(), struct.pack("<5f", 1, 2, float("nan"), 4, 5)
        ),
    },
    "not all of them 0": {"all zero": lambda p: write(p, {"vector": GOOD * 0})},
    "shape [5]": {
        "another width": lambda p: write(p, {"vector": torch.ones(7)}),
        "two dimensions": lambda p: write(p, {"vector": GOOD[None]}),
        "no numbers": lambda p: with_data(p, header(shape=[0], data_offsets=[0, 0]), b""),
    },
    "metadata": {"no metadata": lambda p: write(p, {"vector": GOOD}, None)},
    "layer": {
        "no layer": lambda p: write(p, {"vector": GOOD}, without("layer")),
        "a layer in words": told(layer="two"),
        "a negative layer": told(layer="-1"),
        "a layer of forty digits": told(layer="9" * 40 + "x"),
    },
    "delimiters": {"an unknown preset": told(delimiters="lines")},
    "format": {"another format": told(format="v2")},
    "code": {"an unknown name": told(code="x")},
    "got": {"a flood of metadata": told(**{"n" * 10**6: "x" * 10**6})},
}
WRONG = {name: (make, word) for word, made in _BY_WORD.items() for name, make in made.items()}
