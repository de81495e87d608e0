"""The port of a server that binds it only when its model is loaded."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from sgl_skipkv.cli.server_process import claimed_port

CLAIM = "from sgl_skipkv.cli.server_process import claimed_port as f; f([{port}])"


def test_no_port_is_given_twice_or_to_outgoing_connections() -> None:
    """Found by a run of all tests in which a client had been given a server's port meanwhile."""
    with contextlib.ExitStack() as claims:
        ports = {claims.enter_context(claimed_port()).getsockname()[1] for _ in range(100)}
        assert len(ports) == 100 and max(ports) < 32_768


def test_a_held_port_is_its_servers_alone() -> None:
    """Neither this process nor another gets it."""
    with claimed_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"expected a free one in {port} to {port}"):
            claimed_port([port])
        other = subprocess.run(
            [sys.executable, "-c", CLAIM.format(port=port)], capture_output=True, text=True
        )
        assert other.returncode == 1 and "expected a free one" in other.stderr
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port)) as client:
                assert client.getpeername()[1] == port


def test_a_port_on_which_somebody_listens_is_left_out() -> None:
    with socket.socket() as listening, claimed_port() as free:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken, port = listening.getsockname()[1], free.getsockname()[1]
        free.close()
        with claimed_port([taken, port]) as found:
            assert found.getsockname()[1] == port
