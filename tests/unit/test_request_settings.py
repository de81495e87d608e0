"""The four keys of one request: wrong values are refused in four parts; defaults and precedence."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused

from sgl_skipkv.config import BUDGET_LIMIT_TOKENS, ServerConfig, SettingError
from sgl_skipkv.policy import names
from sgl_skipkv.request.settings import (
    KEYS,
    RequestSettings,
    check_server_defaults,
    refuse_misspelt,
    resolve_request,
    take_keys,
)

LIMIT = 4096
SERVER = ServerConfig(kv_budget_max=LIMIT, query_window=16)
LONG = "x" * 100_000
ASKED = {"kv_budget": 256, "kv_policy": "skipkv"}  # what makes the other keys meaningful

# field of the message, the request's keys
WRONG: list[tuple[str, dict[str, Any]]] = [
    *[
        ("kv_budget", {"kv_budget": value})
        for value in (
            *(True, False, "128", "", LONG, 0, -1, -(10**40), 12, LIMIT + 1, 2**31, 2**64, 10**40),
            *(1.5, 128.0, math.nan, math.inf, -math.inf, 1e308, b"128", 3j),
            *([], [1, 2], [[1]], {}, {"tokens": 128}, (128,), {128}, ...),
        )
    ],
    *[
        ("kv_policy", {**ASKED, "kv_policy": value})
        for value in (
            *("", "SkipKV", "skipkv ", "no-such", "\ud800", LONG, 5, True, ["skipkv"], {"a": 1}),
            b"rkv",
        )
    ],
    *[
        ("kv_params", {**ASKED, "kv_params": value})
        for value in ([], ["tau"], [["tau", 0.9]], "tau=0.9", LONG, 5, True, 0.9)
    ],
    *[
        (f"kv_params.{name}", {**ASKED, "kv_params": {name: value}})
        for name, value in (
            *(("tau", -0.1), ("tau", 1.1), ("tau", True), ("tau", "0.9"), ("tau", math.nan)),
            *(("tau", math.inf), ("tau", None), ("tau", [0.9]), ("sigma", 2), ("sigma", "0.1")),
            *(("kernel", 0), ("kernel", 4), ("kernel", 7.0), ("kernel", 257), ("kernel", True)),
            *(("threshold", -2), ("interval", 7), ("interval", 70_000), ("interval", "128")),
            *(("window", 0), ("window", 17), ("window", 8.0), ("window", 10**40), ("sink", -1)),
            *(("sink", 1025), ("sink", None), ("protect_prompt", 1), ("count_prompt", "yes")),
            *(("delimiters", "lines"), ("delimiters", 3), ("delimiters", None), ("taus", 0.9)),
            *(
                (name, value)
                for name in ("fraction", "coverage")
                for value in (0, 0.0, -0.5, 1.001, True, "0.5", math.nan, math.inf, None, [0.5])
            ),
            *(("seed", 0), ("TAU", 0.9), ("kv_budget", 128), ("policy", "rkv")),
        )
    ],
    ("kv_params.tau", {**ASKED, "kv_policy": "rkv", "kv_params": {"tau": 0.9}}),
    ("kv_params.sigma", {**ASKED, "kv_policy": "streaming", "kv_params": {"sigma": 0.1}}),
    ("kv_params.seed", {**ASKED, "kv_policy": "random", "kv_params": {"seed": 1.0}}),
    ("kv_params.tau", {"kv_policy": "full", "kv_params": {"tau": 0.9}}),
    *[
        ("steering", {**ASKED, "steering": value})
        for value in (1, 0, 1.25, -1.0, True, "1", LONG, math.nan, math.inf, [1.0], {"alpha": 1})
    ],
    ("steering", {"steering": 1.0}),
    *[
        ("kv_reuse", {**ASKED, "kv_reuse": value})
        for value in (True, 0, 1, "", "Keep", "keep ", "false", ["keep"], {"mode": "keep"}, LONG)
    ],
    *[("kv_reuse", {"kv_reuse": value}) for value in ("keep", "budget", 0, "", [])],
    ("kv_reuse", {**ASKED, "kv_policy": "full", "kv_reuse": "keep"}),
    ("kv_reuse", {**ASKED, "kv_params": {"count_prompt": True}, "kv_reuse": "keep"}),
    ("kv_reuse", {**ASKED, "kv_params": {"protect_prompt": False}, "kv_reuse": "budget"}),
    *[
        ("kv_params.drop_thoughts", {**ASKED, **reuse, "kv_params": {"drop_thoughts": value}})
        for value, reuse in (
            *((True, {}), (True, {"kv_reuse": False}), (1, {"kv_reuse": "keep"})),
            *(("true", {"kv_reuse": "keep"}), (None, {"kv_reuse": "budget"})),
        )
    ],
    # a budget that this policy cannot keep
    ("kv_budget", {"kv_budget": 28, "kv_params": {"sink": 12, "window": 16}}),
    ("kv_budget", {"kv_budget": 0, "kv_policy": "full"}),
    ("kv_budget", {"kv_budget": True, "kv_policy": "full"}),
    # parameters without a budget
    ("kv_budget", {"kv_policy": "rkv"}),
    ("kv_budget", {"kv_params": {"power": 2}}),
    ("kv_budget", {"kv_params": {}}),
]


def resolved(keys: dict[str, Any], server: ServerConfig = SERVER) -> RequestSettings:
    settings = resolve_request(keys, server)
    assert settings is not None
    return settings


@pytest.mark.parametrize(("field", "keys"), WRONG, ids=lambda item: repr(item)[:60])
def test_wrong_key_is_refused_in_four_parts(field: str, keys: dict[str, Any]) -> None:
    before = repr(keys)
    with assert_refused(field):
        resolve_request(keys, SERVER)
    assert repr(keys) == before


def test_thoughts_are_dropped_where_a_history_is_left() -> None:
    """A server's default is for the requests with ``kv_reuse`` among all."""
    server = ServerConfig(kv_policy="skipkv", kv_params={"drop_thoughts": True})
    for reuse, drops in ((None, False), (False, False), ("keep", True), ("budget", True)):
        keys = ASKED if reuse is None else {**ASKED, "kv_reuse": reuse}
        assert resolved(keys, server).drops_thoughts == drops
    asked = {**ASKED, "kv_reuse": "keep", "kv_params": {"drop_thoughts": False}}
    assert not resolved(asked, server).drops_thoughts


def test_more_digits_than_python_prints() -> None:
    with assert_refused("kv_budget"):
        resolve_request({"kv_budget": 10**5000}, SERVER)


def test_the_corpus_is_large_and_covers_every_key() -> None:
    assert len(WRONG) >= 80
    assert {field.split(".")[0] for field, _ in WRONG} == set(KEYS)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"kv_budget": 12}, ["[13, 4096]", "sink 4 + window 8 + 1", "got 12", "policy distinct"]),
        ({"kv_budget": "128"}, ["an integer in [13, 4096]", "got '128'"]),
        ({**ASKED, "kv_policy": "h2"}, ["a policy name", "'h2'", ", ".join(names())]),
        ({**ASKED, "kv_params": {"taus": 1}}, ["a known name", "'taus'", "tau", "window"]),
        ({**ASKED, "kv_params": {"tau": 3}}, ["a finite number in [0.0, 1.0]", "got 3"]),
        ({**ASKED, "kv_params": {"fraction": 0}}, ["a finite number in (0, 1]", "got 0"]),
        ({**ASKED, "kv_params": {"window": 17}}, ["[1, 16]", "query_window", "got 17"]),
        ({**ASKED, "kv_params": {"kernel": 4}}, ["an odd integer", "got 4"]),
        ({**ASKED, "kv_params": {"protect_prompt": 1}}, ["true or false", "got 1"]),
        ({**ASKED, "kv_params": {"delimiters": "x"}}, ["paper, math, code, any-newline"]),
        ({**ASKED, "steering": 1.5}, ["no steering vector", "got 1.5", "false, or leave it out"]),
        ({**ASKED, "steering": "on"}, ["false or a number in [-10, 10]", "got 'on'"]),
        ({"kv_policy": "rkv"}, ["need a budget", "got None", "--kv-budget"]),
    ],
)
def test_message_says_what_a_caller_needs(keys: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_request(keys, SERVER)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_server_without_tracks_serves_what_records_nothing() -> None:
    server = ServerConfig(max_tracked_requests=0)
    free = []
    for name in names():
        try:
            resolve_request({"kv_budget": 256, "kv_policy": name}, server)
            free.append(name)
        except SettingError as error:
            assert error.field == "kv_policy" and "this server records nothing" in str(error)
    assert free == ["distinct", "keydiff", "triattention", "streaming", "random", "full"]
    for parameter in ({"coverage": 0.9}, {"quotas": True}):
        with pytest.raises(SettingError, match="kv_policy: expected one of distinct, "):
            resolve_request({"kv_budget": 256, "kv_params": parameter}, server)
    with pytest.raises(SettingError, match="kv_policy: expected one of distinct, "):
        check_server_defaults(ServerConfig(max_tracked_requests=0, kv_policy="rkv"), 0)


@pytest.mark.parametrize(
    "keys",
    [
        {"kv_budget": 13},
        {"kv_budget": LIMIT},
        {"kv_budget": 5, "kv_params": {"sink": 0, "window": 4}},
        {"kv_budget": 64, "kv_params": {"window": 17}},  # the default records no queries
        {"kv_budget": 13, "steering": False},
        {"kv_budget": 64, "kv_params": {"power": 1}},  # whole numbers are numbers
        {"kv_budget": 64, "kv_policy": "streaming", "kv_params": {"window": 17}},  # no queries
        {"kv_budget": 64, "kv_params": {"fraction": 1e-9, "coverage": 1e-9}},
        {"kv_budget": 64, "kv_policy": "rpc", "kv_params": {"fraction": 1}},
    ],
    ids=repr,
)
def test_right_keys_are_taken(keys: dict[str, Any]) -> None:
    settings = resolved(keys)
    assert settings.kv_budget == keys["kv_budget"]
    assert settings.policy.name == keys.get("kv_policy", "distinct")
    for parameter, value in keys.get("kv_params", {}).items():
        assert getattr(settings.policy.params, parameter) == value


# -- steering

STEERED = ServerConfig(steering_vector="v.safetensors", steering_max=2.0)


@pytest.mark.parametrize("value", [0, 1, 1.25, -2.0, 2])
def test_a_number_steers(value: float) -> None:
    with_budget = resolved({**ASKED, "steering": value}, STEERED)
    alone = resolved({"steering": value}, STEERED)
    assert with_budget.steering == alone.steering == value and with_budget.evicts
    assert (alone.policy.name, alone.kv_budget, alone.evicts) == ("full", None, False)
    assert alone.steers and alone.changes_kv


@pytest.mark.parametrize(
    "value", [2.1, -2.1, True, "1", LONG, math.nan, math.inf, [1.0], {"alpha": 1}, 10**400]
)
def test_a_wrong_strength_is_refused_beside_a_vector(value: Any) -> None:
    with pytest.raises(SettingError, match=r"steering: expected false or a number in \[-2, 2\]"):
        resolve_request({"steering": value}, STEERED)


def test_the_server_may_steer_requests_that_say_nothing() -> None:
    server = ServerConfig(steering_vector="v.safetensors", steering=0.5)
    default, other = resolved({}, server), resolved({"steering": 0}, server)
    assert (default.steering, default.policy.name) == (0.5, "full")
    assert other.steering == 0 and other.steers
    assert resolve_request({"steering": False}, server) is None
    assert not resolved({**ASKED, "steering": False}, server).steers
    assert server.defaults_apply and not STEERED.defaults_apply


# -- not set, defaults, precedence


@pytest.mark.parametrize("keys", [{}, {"steering": False}])
def test_nobody_asked(keys: dict[str, Any]) -> None:
    assert resolve_request(keys, SERVER) is None


def test_null_is_not_set() -> None:
    holder = {"kv_budget": None, "kv_policy": None, "temperature": 0, "kv_params": {}, "stop": None}
    before = dict(holder)
    rest, ours = take_keys(holder)
    assert rest == {"temperature": 0, "stop": None} and ours == {"kv_params": {}}
    assert holder == before


def test_false_and_zero_are_set() -> None:
    assert take_keys({"steering": False, "kv_budget": 0})[1] == {"steering": False, "kv_budget": 0}


def test_server_default_budget_serves_requests_without_one() -> None:
    server = ServerConfig(kv_budget=100)
    for keys, budget in (({}, 100), ({"kv_budget": 50}, 50), ({"kv_params": {"power": 0.5}}, 100)):
        assert resolved(keys, server).kv_budget == budget


def test_server_settings_are_defaults_of_parameters_and_a_request_overrides_them() -> None:
    server = ServerConfig(
        kv_interval=32, protect_prompt=False, count_prompt=True, delimiters="paper"
    )
    params: Any = resolved({"kv_budget": 64}, server).policy.params
    assert (params.interval, params.protect_prompt) == (32, False)
    assert (params.count_prompt, params.delimiters) == (True, "paper")
    own = {"interval": 16, "protect_prompt": True, "count_prompt": False, "delimiters": "code"}
    params = resolved({"kv_budget": 64, "kv_params": own}, server).policy.params
    assert own.items() <= params.model_dump().items()


def test_server_parameters_belong_to_the_server_policy() -> None:
    server = ServerConfig(kv_policy="skipkv", kv_params={"tau": 0.5, "window": 4})
    same: Any = resolved({"kv_budget": 64, "kv_params": {"window": 6}}, server).policy.params
    assert (same.tau, same.window) == (0.5, 6)
    assert resolved({"kv_budget": 64, "kv_policy": "rkv"}, server).policy.params.window == 8


@pytest.mark.parametrize("keys", [{"kv_policy": "full"}, {"kv_policy": "full", "kv_budget": 64}])
def test_full_never_evicts_and_needs_no_budget(keys: dict[str, Any]) -> None:
    """It opts out of a default budget and of a counted prompt, and has none of its own."""
    defaults: tuple[dict[str, Any], ...] = ({}, {"kv_budget": 64}, {"count_prompt": True})
    for default in (*defaults, {"kv_budget": 64, "count_prompt": True}):
        settings = resolved(keys, ServerConfig(**default))
        assert not settings.evicts and settings.kv_budget is None
        settings.check_prompt(10**6)


# -- what a budget counts


def settings_for(budget: int, **parameters: Any) -> RequestSettings:
    return resolved({"kv_budget": budget, "kv_params": parameters}, ServerConfig())


@pytest.mark.parametrize(
    ("count", "protect", "own"),
    [(False, True, 200 - 30), (False, False, 170), (True, True, 200)],
)
def test_what_counts_against_the_budget(count: bool, protect: bool, own: int) -> None:
    settings = settings_for(100, count_prompt=count, protect_prompt=protect, interval=20)
    assert settings.budgeted_tokens(row_tokens=200, prompt_tokens=30) == own
    assert settings.peak_budgeted_tokens() == 121


def test_a_share_is_at_most_the_fraction_and_at_least_what_must_stay() -> None:
    settings = settings_for(100, fraction=0.25)
    assert [settings.share(tokens, 30) for tokens in (0, 55, 56, 59, 400)] == [13, 13, 14, 14, 100]
    counted = settings_for(100, fraction=0.25, count_prompt=True)
    assert [counted.share(tokens, 30) for tokens in (30, 172, 176)] == [43, 43, 44]
    evictable = settings_for(100, fraction=0.25, count_prompt=True, protect_prompt=False)
    assert [evictable.share(tokens, 30) for tokens in (30, 176)] == [13, 44]
    assert [settings.peak_until(tokens, 30) for tokens in (50, 200, 4000)] == [142, 179, 229]


def test_counted_and_pinned_prompt_must_leave_room() -> None:
    settings = settings_for(100, count_prompt=True, protect_prompt=True)
    settings.check_prompt(100 - 13)
    with pytest.raises(SettingError) as caught:
        settings.check_prompt(100 - 12)
    message = str(caught.value)
    assert f"[101, {BUDGET_LIMIT_TOKENS}]" in message and "88 prompt tokens" in message
    assert "got 100" in message and "count_prompt: false" in message


@pytest.mark.parametrize(("count", "protect"), [(True, False), (False, True), (False, False)])
def test_a_long_prompt_is_fine_otherwise(count: bool, protect: bool) -> None:
    settings = settings_for(13, count_prompt=count, protect_prompt=protect)
    settings.check_prompt(10**6)
    assert settings.evicts


@given(st.sampled_from(KEYS), st.integers(0, 10), st.characters(), st.sampled_from("+-~="))
def test_a_key_that_is_one_slip_off_is_refused(key: str, at: int, char: str, slip: str) -> None:
    """A character too many, too few, in its neighbour's place, or another one."""
    at %= len(key)
    around = key[:at], key[at + 1 :]
    name = {
        "+": around[0] + char + key[at:],
        "-": around[0] + around[1],
        "~": around[0] + around[1][:1] + key[at] + around[1][1:],
        "=": around[0] + char + around[1],
    }[slip]
    if name in KEYS:
        return
    with pytest.raises(SettingError) as caught:
        refuse_misspelt(["other", name])
    assert caught.value.choices == ", ".join(KEYS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["skipkv", "skipkv_budget_of_tokens", "kv_interval", "steering_vector"]
)
def test_a_name_of_ours_that_is_no_key_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="a key of a request"):
        refuse_misspelt([name])


def test_names_of_others_pass() -> None:
    """SGLang's own, those of its OpenAI API, and whatever does not look like ours."""
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    params = pytest.importorskip("sglang.srt.sampling.sampling_params")
    names = set(inspect.signature(params.SamplingParams.__init__).parameters)
    names |= set(protocol.ChatCompletionRequest.model_fields)
    names |= set(protocol.CompletionRequest.model_fields) - set(KEYS)
    assert len(names) > 60
    refuse_misspelt(names - set(KEYS))
    refuse_misspelt([*KEYS, "kv_cache", "kv_transfer_params", "steer", "", 7, None, "x" * 10**6])


def test_many_names_are_not_all_compared() -> None:
    """Each costs microseconds, and the scheduler looks once for every sample of a request."""
    names = (f"name_{i}" for i in range(10**6))
    refuse_misspelt(names)
    assert next(names) == "name_256", "the rest was not even looked at"


@pytest.mark.parametrize("policy", [name for name in names() if name != "full"])
def test_the_least_budget_holds_the_model_s_window(policy: str) -> None:
    """A maximum with the policy's own window, not a sum; and nothing shrinks below it."""
    keys = {"kv_policy": policy, "kv_params": {"fraction": 0.01, "interval": 8}}
    why = f"{policy} (sink 4 + 1024, the model's window of so many tokens, + 1)"
    with assert_refused("kv_budget", f"an integer in [1029, {LIMIT}] for policy {why}"):
        resolve_request({**keys, "kv_budget": 1028}, SERVER, 1024)
    settings = resolve_request({**keys, "kv_budget": 1029}, SERVER, 1024)
    assert settings is not None and settings.policy.min_budget_tokens == 4 + 1024 + 1
    assert settings.share(2000, 0) == settings.least_tokens(0) == 1029
    for compactions in (0, 1):
        grown = settings.policy.budget_after(1029, compactions)
        assert grown + 8 * (1 - compactions) >= 1029
    shorter = resolve_request({**keys, "kv_budget": 13}, SERVER, 8)
    assert shorter is not None and shorter.policy.pinned_tail_tokens == 8


def test_what_a_window_does_to_server_defaults_and_dropped_thoughts() -> None:
    check_server_defaults(ServerConfig(kv_budget=1029), 1024)
    with assert_refused("kv_budget"):
        check_server_defaults(ServerConfig(kv_budget=1028), 1024)
    with assert_refused("kv_budget_max"):
        check_server_defaults(ServerConfig(kv_budget_max=1028), 1024)
    dropping = {"kv_budget": 64, "kv_reuse": "keep", "kv_params": {"drop_thoughts": True}}
    assert resolve_request(dropping, SERVER) is not None
    with assert_refused("kv_params.drop_thoughts"):
        resolve_request(dropping, SERVER, 32)
    with assert_refused("kv_params.drop_thoughts"):
        check_server_defaults(ServerConfig(kv_params={"drop_thoughts": True}), 32)


def test_a_server_bounds_how_often_clients_compact() -> None:
    server = ServerConfig(kv_interval_min=64)
    keys = {"kv_budget": 256, "kv_params": {"interval": 63}}
    with assert_refused("kv_params.interval", "an integer in [64, 65536]"):
        resolve_request(keys, server)
    assert resolve_request(keys, ServerConfig()) is not None
    for name in names():  # with their defaults
        assert resolve_request({"kv_budget": 256, "kv_policy": name}, server) is not None
    never_evicts = {"kv_policy": "full", "kv_params": {"interval": 8}}
    assert resolve_request(never_evicts, server) is not None
    with assert_refused("kv_interval", "[64, 65536]"):
        check_server_defaults(ServerConfig(kv_interval_min=64, kv_interval=32), 0)
    with assert_refused("kv_params.interval", "[64, 65536]"):
        check_server_defaults(ServerConfig(kv_interval_min=64, kv_params={"interval": 32}), 0)
