"""Invariant 1: with the plugin loaded and no budget anywhere, a server is the one without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from servers import Server, output_logprobs
from tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def plain_server(model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same server, and SGLang never loads the plugin."""
    server = Server(
        model_folder("qwen2"),
        tmp_path_factory.mktemp("plain"),
        ["--chunked-prefill-size", "64", "--max-running-requests", "64"],
        plugin=False,
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def test_the_plain_server_has_no_plugin(plain_server: Server) -> None:
    assert "skipkv" not in plain_server.get("/server_info")
    assert "sgl_skipkv" not in plain_server.log


def test_tokens_and_logprobs_are_the_same(server: Server, plain_server: Server) -> None:
    rng = random.Random(11)
    calls = [
        {
            "input_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 150))],
            "tokens": 128,
        }
        for _ in range(64)
    ]
    with_plugin, without = (
        [answer for at in range(0, 64, 16) for answer in one.generate_all(calls[at : at + 16])]
        for one in (server, plain_server)
    )
    for ours, theirs in zip(with_plugin, without, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        pairs = zip(output_logprobs(ours), output_logprobs(theirs), strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 1e-4
        assert "skipkv" not in ours["meta_info"]
