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


# Every kind of file that is refused: name -> (how to make it, a word of the message).
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    # what a hand or a crash leaves behind
    "missing": (lambda p: None, "No such file"),
    "a folder": (lambda p: p.mkdir(), "a regular file"),
    "empty": (lambda p: p.write_bytes(b""), "a safetensors file"),
    "text": (lambda p: p.write_text("alpha: 1"), "a safetensors file"),
    "a pickle": (lambda p: torch.save({"vector": GOOD}, p), "a safetensors file"),
    "truncated header": (lambda p: with_header(p, b'{"vec', 4000), "a safetensors file"),
    "header longer than the file": (lambda p: with_header(p, b"{}", 2**40), "a safetensors file"),
    "header is no JSON": (lambda p: with_header(p, b"not json"), "a safetensors file"),
    "data missing": (
        lambda p: with_header(
            p,
            json.dumps(
                {"vector": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}
            ).encode(),
        ),
        "a safetensors file",
    ),
    "too large": (lambda p: p.open("wb").truncate(FILE_LIMIT_BYTES + 1), "at most"),
    "another tensor": (lambda p: write(p, {"v": GOOD}), "one tensor named vector"),
    "two tensors": (lambda p: write(p, {"vector": GOOD, "w": GOOD + 1}), "one tensor named vector"),
    "integers": (lambda p: write(p, {"vector": GOOD.long()}), "got 'I64"),
    "doubles": (lambda p: write(p, {"vector": GOOD.double()}), "got 'F64"),
    "not a number": (lambda p: write(p, {"vector": GOOD / 0 * 0}), "finite"),
    "infinite": (lambda p: write(p, {"vector": GOOD / 0}), "finite"),
    "all zero": (lambda p: write(p, {"vector": GOOD * 0}), "not all of them 0"),
    "another width": (lambda p: write(p, {"vector": torch.ones(7)}), "shape [5]"),
    "two dimensions": (lambda p: write(p, {"vector": GOOD[None]}), "shape [5]"),
    "no metadata": (lambda p: write(p, {"vector": GOOD}, None), "metadata"),
    "no layer": (lambda p: write(p, {"vector": GOOD}, without("layer")), "layer"),
    "a layer in words": (
        lambda p: write(p, {"vector": GOOD}, METADATA | {"layer": "two"}),
        "layer",
    ),
    "a negative layer": (lambda p: write(p, {"vector": GOOD}, METADATA | {"layer": "-1"}), "layer"),
    "an unknown preset": (
        lambda p: write(p, {"vector": GOOD}, METADATA | {"delimiters": "lines"}),
        "delimiters",
    ),
    "another format": (lambda p: write(p, {"vector": GOOD}, METADATA | {"format": "v2"}), "format"),
    "an unknown name": (lambda p: write(p, {"vector": GOOD}, METADATA | {"code": "x"}), "code"),
    # what only a hostile hand writes
    "a link into nothing": (lambda p: p.symlink_to("/no/such/file"), "No such file"),
    "a link to itself": (lambda p: p.symlink_to(p), "Too many levels"),
    "a link out of the folder, to text": (lambda p: p.symlink_to("/etc/passwd"), "/etc/passwd"),
    "a link out of the folder, to a right file": (lambda p: link_out(p), "a link within its"),
    "a link to a device": (lambda p: p.symlink_to("/dev/zero"), "a link within its folder"),
    "a pipe": (os.mkfifo, "a regular file"),
    "a socket": (listening, "a regular file"),
    "a header deeper than any parser": (
        lambda p: with_header(p, b'{"vector":' * 20_000),
        "a safetensors file",
    ),
    "a header of no length": (lambda p: with_header(p, b"", 0), "a safetensors file"),
    "a header of negative length": (
        lambda p: p.write_bytes(b"\xff" * 8 + b"{}"),
        "a safetensors file",
    ),
    "more numbers than the file has": (
        lambda p: with_data(p, header(shape=[2**60])),
        "a safetensors file",
    ),
    "a shape that overflows": (
        lambda p: with_data(p, header(shape=[2**62, 2**62])),
        "a safetensors file",
    ),
    "a negative shape": (lambda p: with_data(p, header(shape=[-5])), "a safetensors file"),
    "offsets before the data": (
        lambda p: with_data(p, header(data_offsets=[-20, 0])),
        "a safetensors file",
    ),
    "offsets behind the data": (
        lambda p: with_data(p, header(data_offsets=[20, 40])),
        "a safetensors file",
    ),
    "a type that does not exist": (
        lambda p: with_data(p, header(dtype="O8")),
        "a safetensors file",
    ),
    "no numbers": (
        lambda p: with_data(p, header(shape=[0], data_offsets=[0, 0]), b""),
        "shape [5]",
    ),
    "one number that is not finite": (
        lambda p: with_data(p, header(), struct.pack("<5f", 1, 2, float("nan"), 4, 5)),
        "finite",
    ),
    "metadata that is no text": (
        lambda p: with_data(p, header().replace(b'"layer": "1"', b'"layer": 1')),
        "a safetensors file",
    ),
    "a layer of forty digits": (
        lambda p: write(p, {"vector": GOOD}, METADATA | {"layer": "9" * 40 + "x"}),
        "layer",
    ),
    "a flood of metadata": (
        lambda p: write(p, {"vector": GOOD}, METADATA | {"n" * 10**6: "x" * 10**6}),
        "got",
    ),
}


def one_line(message: str, field: str, word: str) -> None:
    """The message of a wrong setting: field, expectation, value and choices, in one short line."""
    assert message.startswith(f"{field}: expected ") and "; choices: " in message, message
    assert word in message and "\n" not in message and len(message) < 500, message
