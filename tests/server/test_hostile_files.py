"""Files that are not what they are said to be: one line that names the cause, and no start.

``vector_files.py`` has the vectors that are refused and ``test_config.py`` the wrong settings.
Here are names that lead elsewhere, a pipe without an end, and one real start.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import assert_refused
from servers import Server
from vector_files import GOOD, with_header, write

from sgl_skipkv.config import CONFIG_FILE_LIMIT_BYTES, SettingError, load_server_config
from sgl_skipkv.request.trace import TraceWriter
from sgl_skipkv.steering.vector import SteeringVector


@pytest.mark.parametrize(
    "name",
    [
        "https://example.org/v.safetensors",
        "file:///etc/passwd",
        "hf://owner/model/v.safetensors",
        "../" * 40 + "etc/shadow-of-nothing",
        "vectors/../v.safetensors",
        "~/v.safetensors",
        "x" * 5000,
        "v\0.safetensors",
        "v\ud800.safetensors",
        "",
    ],
    ids=lambda name: repr(name)[:20],
)
def test_a_name_is_a_path_and_nothing_else(name: str) -> None:
    """Nothing is fetched, expanded or searched for."""
    with assert_refused("steering_vector"):
        SteeringVector.load(name)


def test_a_link_within_its_folder_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "v1.safetensors", {"vector": GOOD})
    (tmp_path / "latest.safetensors").symlink_to("v1.safetensors")
    loaded = SteeringVector.load(str(tmp_path / "latest.safetensors"))
    assert torch.equal(loaded.values, GOOD)


@pytest.mark.parametrize("name", ["", "/no/such/folder/t", "/", "t\0", "t\ud800", "x" * 5000])
def test_a_trace_that_cannot_be_written(name: str) -> None:
    with assert_refused("trace", "a file that can be appended to"):
        TraceWriter(name)


def test_a_settings_file_without_an_end_is_not_read_for_ever(tmp_path: Path) -> None:
    """A pipe or a device has no size; what is read of it has a bound all the same."""
    path, written = tmp_path / "settings.json", 0
    os.mkfifo(path)

    def feed() -> None:
        nonlocal written
        with contextlib.suppress(BrokenPipeError), path.open("wb", buffering=0) as pipe:
            while written < 16 * CONFIG_FILE_LIMIT_BYTES:
                written += pipe.write(b" " * 65536)

    thread = threading.Thread(target=feed)
    thread.start()
    with pytest.raises(SettingError, match="at most"):
        load_server_config(config_file=str(path), environ={})
    thread.join(timeout=60)
    assert not thread.is_alive() and written < 2 * CONFIG_FILE_LIMIT_BYTES


@pytest.mark.server
def test_a_malformed_vector_ends_the_start(model_folder: Any, tmp_path: Path) -> None:
    """Exit status, one line, nothing left behind, and no model was loaded for it."""
    path = with_header(tmp_path / "v.safetensors", b'{"vec', 4000)
    env = {"SGL_SKIPKV_CONFIG": json.dumps({"steering_vector": str(path)})}
    started, before = time.monotonic(), user_s()
    server = Server(model_folder("qwen2"), tmp_path / "run", trace=False, env=env)
    try:
        assert server.wait_exit() != 0
        last = server.log.strip().splitlines()[-1]
        assert last.startswith("sgl_skipkv: steering_vector: expected a safetensors file")
        assert "fired up" not in server.log and "Load weight" not in server.log
        assert server.wait_gone(20)
    finally:
        server.stop()
    # The wall clock also counts what else the machine does.
    assert min(time.monotonic() - started, user_s() - before) < 60


def user_s() -> float:
    """Seconds of a core that ended child processes have computed."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
