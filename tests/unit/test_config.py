"""What an operator may set: every wrong value is refused in four parts, and who wins over whom."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import assert_refused
from vector_files import listening

from sgl_skipkv.config import (
    BUDGET_LIMIT_TOKENS,
    CONFIG_FILE_LIMIT_BYTES,
    ENV_CONFIG,
    ServerConfig,
    SettingError,
    brief,
    build,
    load_server_config,
    name_of,
)
from sgl_skipkv.request.settings import check_server_defaults

BIG = 10**40
ENV_COPY = "SGLANG_SKIPKV_CONFIG"
LONG = "x" * 100_000


# field, value: each wrong by itself, all else left out
WRONG: list[tuple[str, Any]] = [
    *(("kv_budget", v) for v in (True, "128", 0, -5, 1.5, 128.0, math.nan, math.inf, BIG, LONG)),
    *(("kv_budget", v) for v in (BUDGET_LIMIT_TOKENS + 1, [1, 2], {"tokens": 1})),
    *(("kv_policy", v) for v in (5, None, ["skipkv"])),
    *(("kv_params", v) for v in ([["tau", 0.9]], "tau=0.9", None, {1: 2})),
    *(("kv_interval", v) for v in (7, 65537, True, 128.0, None, -BIG)),
    *(("kv_interval_min", v) for v in (7, 65537, "8", None)),
    *(("kv_budget_max", v) for v in (0, BUDGET_LIMIT_TOKENS + 1, "2048", None)),
    *(("kv_reuse", v) for v in (True, 1, "", "Keep", "false", None, ["keep"])),
    *(("kv_reuse_bytes", v) for v in (-1, 1.5, "1 GiB")),
    *(("protect_prompt", v) for v in (1, "true", None)),
    *(("count_prompt", v) for v in (0, "no")),
    *(("delimiters", v) for v in (3, ["math"])),
    *(("steering_vector", v) for v in (3, Path("v.safetensors"))),
    *(("steering", v) for v in ("1", True, math.nan, 1.0)),  # the last one: without a vector
    *(("steering_gamma", v) for v in (-0.1, 10.5, None)),
    *(("steering_max", v) for v in (-1, math.inf)),
    *(("steering_capture", 3), ("trace", True), ("trace", 5)),
    *(("explorer", 1), ("explorer", "yes")),
    *(("query_window", v) for v in (0, 1025, 16.0)),
    *(("query_text", v) for v in (7, True)),
    *(("max_sentences", v) for v in (7, 65537)),
    *(("max_tracked_requests", v) for v in (-1, 65537)),
    *(("compaction_work_bytes", -1), ("retraction_backup_bytes", -1)),
    *(("retraction_backup_bytes", 1.5e9), ("check_ledger", "yes")),
    ("check_agreement", "yes"),
    *(("poison_evicted", 1), ("required", 1)),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda item: repr(item)[:30])
def test_wrong_server_setting(field: str, value: Any) -> None:
    with assert_refused(field):
        build(ServerConfig, {field: value})


def test_corpus_covers_every_setting_and_is_large() -> None:
    assert {field for field, _ in WRONG} == set(ServerConfig.model_fields)
    assert len(WRONG) >= 40


# What pydantic cannot know: it depends on the policy and on other settings.
WRONG_TOGETHER: list[tuple[str, dict[str, Any]]] = [
    *(("kv_policy", {"kv_policy": name}) for name in ("no-such", LONG, "")),
    ("kv_params.taus", {"kv_params": {"taus": 0.9}}),
    *(("kv_params.tau", {"kv_params": {"tau": value}}) for value in (2, math.nan, "0.9")),
    ("kv_params.tau", {"kv_policy": "rkv", "kv_params": {"tau": 0.9}}),
    *(
        ("kv_params.kernel", {"kv_policy": "skipkv", "kv_params": {"kernel": value}})
        for value in (4, 7.0)
    ),
    ("kv_params.window", {"kv_policy": "skipkv", "kv_params": {"window": 17}}),
    ("kv_params.interval", {"kv_params": {"interval": 7}}),
    *(("kv_params.window", {"kv_params": {"window": value}}) for value in (1025, True)),
    ("kv_params.seed", {"kv_policy": "random", "kv_params": {"seed": -1}}),
    ("kv_params.delimiters", {"kv_params": {"delimiters": "lines"}}),
    ("kv_budget", {"kv_budget": 12}),
    ("explorer", {"explorer": True}),
    ("kv_budget", {"kv_budget": 20, "kv_params": {"sink": 12}}),
    ("kv_budget", {"kv_budget": 200, "kv_budget_max": 100}),
    ("steering", {"steering_vector": "v.safetensors", "steering": 3, "steering_max": 2}),
    # by the name that the operator wrote, not the parameter or the budget that it becomes
    *(("delimiters", {"delimiters": "lines"}), ("kv_budget_max", {"kv_budget_max": 5})),
]


@pytest.mark.parametrize(("field", "values"), WRONG_TOGETHER, ids=lambda item: repr(item)[:40])
def test_wrong_server_defaults(field: str, values: dict[str, Any]) -> None:
    with assert_refused(field):
        check_server_defaults(build(ServerConfig, values), 0)


@pytest.mark.parametrize("name", ["kv_bugdet", "KV_BUDGET", "", LONG, "kv-budget"])
def test_unknown_setting_lists_the_known_ones(name: str) -> None:
    with pytest.raises(SettingError) as caught:
        build(ServerConfig, {name: 128})
    assert caught.value.expected == "a known name"
    assert set(ServerConfig.model_fields) <= set(caught.value.choices.split(", "))
    assert "x" * 81 not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kv_budget": None},
        {"kv_budget": 13},
        {"kv_budget": 64, "kv_policy": "streaming", "kv_params": {"window": 32, "sink": 0}},
        {"kv_policy": "full"},
        {"kv_budget": 128, "kv_budget_max": 128, "kv_interval": 8, "delimiters": "paper"},
        {"protect_prompt": False, "count_prompt": True, "query_window": 1024},
        {"kv_policy": "skipkv", "kv_params": {"tau": 1, "sigma": 0.5}},
        {"kv_params": {"power": 2, "recent": 0}},
    ],
)
def test_right_settings_are_taken(values: dict[str, Any]) -> None:
    config = build(ServerConfig, values)
    check_server_defaults(config, 0)
    assert {name: getattr(config, name) for name in values} == values


def test_defaults_of_the_contract() -> None:
    config = ServerConfig()
    assert (config.kv_budget, config.kv_policy, config.kv_interval) == (None, "distinct", 128)
    assert (config.protect_prompt, config.count_prompt, config.delimiters) == (True, False, "math")


@pytest.mark.parametrize("value", [LONG, list(range(10**6)), {LONG: LONG}, BIG, [[[[[[]]]]]]])
def test_brief_never_floods(value: Any) -> None:
    assert 0 < len(brief(value)) <= 80


# -- where settings come from


def write(folder: Path, text: str) -> str:
    path = folder / "settings.json"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("environ", [{}, *({ENV_CONFIG: text} for text in ("", "  ", "\n"))])
def test_nothing_given_asks_for_nothing(environ: dict[str, str]) -> None:
    config = load_server_config(environ=environ)
    assert config == ServerConfig() and not config.enabled


@pytest.mark.parametrize("flags", [{"kv_budget": 64}, {"kv_policy": "skipkv"}, {"trace": "t"}])
def test_any_flag_asks_even_with_the_default_value(flags: dict[str, Any]) -> None:
    assert load_server_config(flags, environ={}).enabled


@pytest.mark.parametrize("text", ["{}", ' {"kv_interval": 128} ', '{"required": true}'])
def test_any_object_asks(text: str, tmp_path: Path) -> None:
    by_file = load_server_config(config_file=write(tmp_path, text), environ={})
    assert by_file.enabled and load_server_config(environ={ENV_CONFIG: text}).enabled
    assert text != "{}" or by_file.required


def test_an_object_that_requires_nothing_asks_for_nothing() -> None:
    assert not load_server_config(environ={ENV_CONFIG: '{"required": false}'}).enabled


def test_environment_holds_json_or_a_path(tmp_path: Path) -> None:
    inline = load_server_config(environ={ENV_CONFIG: '{"kv_budget": 77}'})
    path = write(tmp_path, '{"kv_budget": 77}')
    assert inline.kv_budget == load_server_config(environ={ENV_CONFIG: path}).kv_budget == 77


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CONFIG, '{"kv_budget": 78}')
    assert load_server_config().kv_budget == 78


def test_the_name_that_sglang_copies_it_to_is_read() -> None:
    """SGLang asks for that name in a warning. After its copy a process may have set ours anew."""
    copied = {ENV_COPY: '{"kv_budget": 79}'}
    assert load_server_config(environ=copied).kv_budget == 79
    assert load_server_config(environ={**copied, ENV_CONFIG: '{"kv_budget": 78}'}).kv_budget == 78
    with pytest.raises(SettingError, match=f"{ENV_COPY}: expected a JSON object"):
        load_server_config(environ={ENV_COPY: "{"})


def test_flags_win_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    environ = {ENV_CONFIG: '{"kv_budget": 1000, "kv_interval": 10, "trace": "env"}'}
    path = write(tmp_path, '{"kv_budget": 2000, "kv_interval": 20}')
    config = load_server_config({"kv_budget": 3000}, config_file=path, environ=environ)
    assert (config.kv_budget, config.kv_interval) == (3000, 20)
    assert config.trace is None, "a file given by flag replaces the environment, it is not merged"
    assert load_server_config({"kv_budget": 3000}, environ=environ).kv_interval == 10


# text of a settings file, and what the message must name
BAD_TEXT: list[tuple[str, str]] = [
    ("{", "line 1 column 2"),
    ('{"kv_budget": 1,}', "line 1"),
    ("[]", "a JSON object"),
    ("3", "a JSON object"),
    ("null", "a JSON object"),
    ('"kv_budget"', "a JSON object"),
    ('{"kv_budget": 64, "kv_budget": 65}', "each name once"),
    ('{"kv_params": {"tau": 0.9, "tau": 0.8}}', "each name once"),
    ('{"kv_budget": NaN}', "kv_budget"),
    ('{"kv_budget": 1e400}', "kv_budget"),
    ('{"kv_bugdet": 64}', "kv_bugdet"),
    ('{"kv_budget": "64"}', "kv_budget"),
    ("\ufeff{}", "BOM"),
    ('{"a":' * 100_000, "a JSON object"),  # deeper than Python's stack
    ('{"kv_budget": ' + "9" * 5000 + "}", "CONFIG"),  # more digits than Python converts
    ('["' + LONG + '"]', "a JSON object"),
    *(
        ("\0" * 100, "line 1"),
        ("kv_budget: 64\n", "line 1"),
        ('{"kv_budget": 64} // tokens', "line 1"),
    ),
    ('{"kv_budget": 64}{"kv_budget": 65}', "line 1"),
    ('{"kv_budget\\nok": 64}', "a known name"),
]


BAD_GIVEN = [
    (where, *case)
    for where in ("flag", "path", "text")
    for case in BAD_TEXT
    if where != "text" or case[0].startswith("{")  # else it would be a path
]


@pytest.mark.parametrize(("where", "text", "part"), BAD_GIVEN, ids=lambda item: repr(item)[:30])
def test_bad_settings_are_refused(where: str, text: str, part: str, tmp_path: Path) -> None:
    """As SettingError, whatever is wrong: SGLang swallows every other exception at start."""
    given = text if where == "text" else write(tmp_path, text)
    with pytest.raises(SettingError) as caught:
        if where == "flag":
            load_server_config(config_file=given, environ={})
        else:
            load_server_config(environ={ENV_CONFIG: given})
    named, message = "--skipkv-config" if where == "flag" else ENV_CONFIG, str(caught.value)
    assert part.replace("CONFIG", named) in message
    assert where == "text" or "x" * 81 not in message
    assert ": expected " in message and "; choices: " in message
    assert "\n" not in message and len(message) < 1000


def test_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, "{}" + " " * CONFIG_FILE_LIMIT_BYTES)
    with assert_refused("--skipkv-config", "at most"):
        load_server_config(config_file=path, environ={})
    exact = write(tmp_path, "{}" + " " * (CONFIG_FILE_LIMIT_BYTES - 2))
    assert load_server_config(config_file=exact, environ={}).enabled


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "missing behind a long path": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "latin-1": lambda path: path.write_bytes(b'{"trace": "\xe9"}'),
    "a link into nothing": lambda path: path.symlink_to("/no/such/file"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a socket": listening,
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("long-folder-name-" * 8 if "long" in kind else "") / "settings.json"
    UNREADABLE[kind](path)
    with assert_refused("--skipkv-config", "No such file" if "missing" in kind else ""):
        load_server_config(config_file=str(path), environ={})


def test_settings_survive_the_trip_to_another_process() -> None:
    """Only what was given travels, so ``asked`` means the same on the other side."""
    config = load_server_config({"kv_budget": 64}, environ={})
    again = load_server_config(json.loads(config.model_dump_json(exclude_unset=True)), environ={})
    assert again == config and again.enabled


def test_a_request_s_name_is_short_and_one_line() -> None:
    """A client chooses it, and every line of the trace and of the log has it."""
    for kept in ("chatcmpl-1f", "a b", "x" * 200, "\ud800"):
        assert name_of(kept) == kept
    long = {name_of("x" * 4_000_000 + tail) for tail in "01"}  # as samples of one request
    assert len(long) == 2 and all(len(name) == 209 for name in long)
    assert name_of("a\n[2026] ERROR\x1b[31m").startswith("a [2026] ERROR\ufffd[31m~")
