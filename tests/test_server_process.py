"""The port of a server that binds it only when its model is loaded."""

from __future__ import annotations

import socket

import pytest

from sgl_skipkv import server_process
from sgl_skipkv.server_process import free_port


def test_no_port_is_given_twice_or_to_outgoing_connections() -> None:
    """Found by a run of all tests in which a client had been given a server's port meanwhile."""
    ports = {free_port() for _ in range(100)}
    assert len(ports) == 100 and max(ports) < 32_768


def test_a_port_on_which_somebody_listens_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken, free = listening.getsockname()[1], free_port()
        monkeypatch.setattr(server_process, "_PORTS", iter([taken, free]))
        assert free_port() == free
        with pytest.raises(RuntimeError, match="expected a free one"):
            free_port()
