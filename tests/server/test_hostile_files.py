"""Files that are not what they are said to be: one line that names the cause, and no start.

``vector_files.py`` has the vectors that are refused and ``test_config.py`` the wrong settings.
Here are names that lead elsewhere, settings that only a hostile hand writes, and one real start.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import Server
from vector_files import GOOD, listening, one_line, with_header, write

from sgl_skipkv.config import (
    CONFIG_FILE_LIMIT_BYTES,
    ServerConfig,
    SettingError,
    load_server_config,
)
from sgl_skipkv.request.settings import resolve_request
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
    with pytest.raises(SettingError) as caught:
        SteeringVector.load(name)
    one_line(str(caught.value), "steering_vector", "got")


def test_a_link_within_its_folder_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "v1.safetensors", {"vector": GOOD})
    (tmp_path / "latest.safetensors").symlink_to("v1.safetensors")
    loaded = SteeringVector.load(str(tmp_path / "latest.safetensors"))
    assert torch.equal(loaded.values, GOOD)


@pytest.mark.parametrize("name", ["", "/no/such/folder/t", "/", "t\0", "t\ud800", "x" * 5000])
def test_a_trace_that_cannot_be_written(name: str) -> None:
    with pytest.raises(SettingError) as caught:
        TraceWriter(name)
    one_line(str(caught.value), "trace", "a file that can be appended to")


@pytest.mark.parametrize("value", ["../../v.safetensors", "/etc/passwd", "https://x", ["v"], {}])
def test_a_call_can_name_no_file(value: Any) -> None:
    """Only the operator names files: a request gives a number, or false."""
    with pytest.raises(SettingError, match="false or a number"):
        resolve_request({"steering": value}, ServerConfig(steering_vector="v.safetensors"))


CONFIGS: dict[str, Callable[[Path], Any]] = {
    "a link into nothing": lambda p: p.symlink_to("/no/such/file"),
    "a link to itself": lambda p: p.symlink_to(p),
    "a link out of the folder, to text": lambda p: p.symlink_to("/etc/passwd"),
    "a socket": listening,
    "zeros": lambda p: p.write_bytes(bytes(100)),
    "two objects": lambda p: p.write_text('{"kv_budget": 64}{"kv_budget": 65}'),
    "a comment": lambda p: p.write_text('{"kv_budget": 64} // tokens'),
    "YAML": lambda p: p.write_text("kv_budget: 64\n"),
    "half a surrogate": lambda p: p.write_text('{"kv_policy": "\\ud800"}'),
    "a name with a line break": lambda p: p.write_text('{"kv_budget\\nok": 64}'),
    "a file that grows": lambda p: p.write_text("{}" + " " * CONFIG_FILE_LIMIT_BYTES),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hostile_settings_file_is_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    CONFIGS[kind](path)
    with pytest.raises(SettingError) as caught:
        config = load_server_config(config_file=str(path), environ={})
        resolve_request({"kv_budget": 64}, config)
    message = str(caught.value)
    assert ": expected " in message and "; choices: " in message
    assert "\n" not in message and len(message) < 1000


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
@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_malformed_vector_ends_the_start(how: str, model_folder: Any, tmp_path: Path) -> None:
    """Exit status, one line, nothing left behind, and no model was loaded for it."""
    path = with_header(tmp_path / "v.safetensors", b'{"vec', 4000)
    flags = ["--steering-vector", str(path)] if how == "flag" else []
    config = json.dumps({"steering_vector": str(path)})
    env = {"SGL_SKIPKV_CONFIG": config} if how == "environment" else {}
    started, before = time.monotonic(), user_s()
    server = Server(model_folder("qwen2"), tmp_path / "run", flags, trace=False, env=env)
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
