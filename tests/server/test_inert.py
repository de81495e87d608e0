"""Invariant 1: with the plugin loaded and no budget anywhere, a server is the one without it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fleet import Fleet
from servers import Server, logprob_gap, output_logprobs
from tiny_models import VOCAB_SIZE

from sgl_skipkv.cli.main import main

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def plain_server(fleet: Fleet) -> Iterator[Server]:
    """The session's server, and SGLang never loads the plugin."""
    yield fleet.ready("plain")
    fleet.stop("plain")


@pytest.mark.smoke
def test_the_plain_server_has_no_plugin(plain_server: Server) -> None:
    assert "skipkv" not in plain_server.get("/server_info")
    assert "sgl_skipkv: " not in plain_server.log  # a checkout may have that name


def test_doctor_finds_no_budget_there(
    plain_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--url", plain_server.url]) == 1
    printed = capsys.readouterr().out
    # Where SGLang drops unknown names; /generate refuses them in SGLang's own words.
    assert printed.count("dropped") == 8
    assert "status 400" in printed and "budgets arrive nowhere" in printed


@pytest.mark.smoke
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
        assert logprob_gap(ours, output_logprobs(theirs)) <= 1e-4
        assert "skipkv" not in ours["meta_info"]
