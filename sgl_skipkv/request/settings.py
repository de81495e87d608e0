"""The settings of one request: the five keys of the API, validated against the server's settings.

The keys mean the same in every API. All APIs pass them on as ``custom_params`` of SGLang's sampling
parameters, which only ``take_keys`` and ``RequestSettings`` read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from sgl_skipkv.config import BUDGET_LIMIT_TOKENS, ServerConfig, SettingError, brief
from sgl_skipkv.policy import Policy, built_in, make_policy, policy_class, with_params

KEYS: Final = ("kv_budget", "kv_policy", "kv_params", "kv_reuse", "steering")

# ``steering_capture`` is also a key in the requests of `skipkv steering extract`.
_SETTINGS: Final = {
    name for name in ServerConfig.model_fields if name.startswith(("kv_", "steering"))
} - {"steering_capture"}
_LONGEST: Final = max(map(len, _SETTINGS))
_MOST_NAMES: Final = 256
# Policy parameters whose default is a server setting: parameter -> setting.
_SERVER_DEFAULTS: Final = {
    "interval": "kv_interval",
    "protect_prompt": "protect_prompt",
    "count_prompt": "count_prompt",
    "delimiters": "delimiters",
}


@dataclass(frozen=True)
class RequestSettings:
    """One request's policy, budget and steering.

    Attributes:
        policy: with its parameters.
        kv_budget: KV tokens kept after each compaction; None exactly if the request never evicts.
        steering: ``alpha_0``; None for a request that is not steered.
        kv_reuse: "keep" or "budget"; None for a request that neither continues nor leaves a
            history.
    """

    policy: Policy
    kv_budget: int | None
    steering: float | None = None
    kv_reuse: str | None = None

    @property
    def evicts(self) -> bool:
        return self.kv_budget is not None

    @property
    def steers(self) -> bool:
        return self.steering is not None

    @property
    def drops_thoughts(self) -> bool:
        """Whether the history that it leaves is without its thoughts."""
        return self.kv_reuse is not None and self.policy.params.drop_thoughts

    @property
    def changes_kv(self) -> bool:
        """Whether the KV of generated tokens differs from what another request would compute."""
        return self.evicts or self.steers

    def share(self, full_tokens: int, prompt_tokens: int) -> int:
        """``max(int(fraction * full_tokens), least_tokens)``: the budget that ``fraction`` sets."""
        least = self.least_tokens(prompt_tokens)
        return max(int(self.policy.params.fraction * full_tokens), least)

    def least_tokens(self, prompt_tokens: int) -> int:
        """The policy's smallest budget, with the prompt where it counts and is kept."""
        params = self.policy.params
        counted = prompt_tokens if params.count_prompt and params.protect_prompt else 0
        return counted + self.policy.min_budget_tokens

    def prompt_on_top(self, prompt_tokens: int) -> int:
        """Prompt tokens that do not count against the budget."""
        return 0 if self.policy.params.count_prompt else prompt_tokens

    def budgeted_tokens(self, row_tokens: int, prompt_tokens: int) -> int:
        """Tokens of a row with this length that count against the budget."""
        return row_tokens - self.prompt_on_top(prompt_tokens)

    def peak_budgeted_tokens(self) -> int:
        """The most budgeted tokens that it can ever hold: ``kv_budget + interval + 1``."""
        assert self.kv_budget is not None
        return self.kv_budget + self.policy.params.interval + 1

    def peak_until(self, full_tokens: int, prompt_tokens: int) -> int:
        """``min(kv_budget, share) + interval + 1``: the most budgeted tokens that the request can
        hold until ``full_tokens`` would count without eviction."""
        share = self.share(full_tokens, prompt_tokens) + self.policy.params.interval + 1
        return min(self.peak_budgeted_tokens(), share)

    def check_prompt(self, prompt_tokens: int) -> None:
        """Refuse a budget that the prompt alone uses up (``count_prompt`` with a pinned prompt).

        Raises:
            SettingError: no room is left for generated tokens.
        """
        least = self.least_tokens(prompt_tokens)
        if self.kv_budget is not None and self.kv_budget < least:
            raise SettingError(
                "kv_budget",
                f"an integer in [{least}, {BUDGET_LIMIT_TOKENS}], because count_prompt counts "
                f"{prompt_tokens} prompt tokens and protect_prompt keeps them",
                self.kv_budget,
                "a larger budget, count_prompt: false or protect_prompt: false",
            )


def take_keys(holder: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a mapping into (the rest, our keys that are set). ``None`` counts as not set."""
    rest = {name: value for name, value in holder.items() if name not in KEYS}
    ours = {name: holder[name] for name in KEYS if holder.get(name) is not None}
    return rest, ours


def misspelt_keys(names: Iterable[object]) -> list[str]:
    """Names that look like a key but are none: ``kv_bugdet``, ``kv-budget``, ``skipkv_budget``, and
    ``kv_interval``, which is a server setting.

    Other unknown names belong to SGLang or to another plugin and are allowed. With one of these the
    request would silently run without the budget that the client expects. Of more names than any
    client sends the first are looked at, because a comparison takes microseconds.
    """
    some = islice(names, _MOST_NAMES)
    return [name for name in some if isinstance(name, str) and _is_misspelt(name)]


def _is_misspelt(name: str) -> bool:
    if name in KEYS:
        return False
    plain = name[: _LONGEST + 2].lower().replace("-", "_")  # bounds the comparison of a long name
    if plain.startswith("skipkv"):
        return True
    if len(plain) > _LONGEST + 1:  # too long for a misspelling
        return False
    return plain in _SETTINGS or _is_close(plain)


@lru_cache(maxsize=1024)
def _is_close(plain: str) -> bool:
    """A ratio of 0.87: one character missing, wrong or extra, or two swapped."""
    return bool(get_close_matches(plain, KEYS, n=1, cutoff=0.87))


def refuse_misspelt(names: Iterable[object]) -> None:
    """Refuse the first of ``misspelt_keys``, by a ``SettingError`` with its name."""
    for name in misspelt_keys(names):
        raise SettingError(brief(name)[1:-1], "a key of a request", name, ", ".join(KEYS))


def resolve_request(
    keys: Mapping[str, Any], server: ServerConfig, model_window_tokens: int = 0
) -> RequestSettings | None:
    """The settings of one request; None if neither the request nor the server sets any.

    Args:
        model_window_tokens: the largest window of the model's layers; 0: they have none.

    Raises:
        SettingError: wrong type or range, unknown policy or parameter, ``steering`` without a
            vector, or a policy without a budget.
    """
    steering = _resolve_steering(keys.get("steering"), server)
    kv_budget = keys.get("kv_budget", server.kv_budget)
    policy = _resolve_policy(keys, server, model_window_tokens)
    asks_for_policy = bool({"kv_policy", "kv_params"} & keys.keys())
    if kv_budget is not None:
        _check_budget(kv_budget, policy, server)
        _check_track(policy, server)
    elif not asks_for_policy:
        policy = _resolve_policy({"kv_policy": "full"}, server, model_window_tokens)
    elif policy.evicts:
        expected = "an integer, because kv_policy and kv_params need a budget"
        choices = "add kv_budget, or start the server with --kv-budget"
        raise SettingError("kv_budget", expected, None, choices)
    kv_reuse = _resolve_reuse(keys.get("kv_reuse"), policy, kv_budget is not None, server)
    # As the server's default it is for the requests with kv_reuse among all.
    if kv_reuse is None and (keys.get("kv_params") or {}).get("drop_thoughts"):
        expected, choices = "false without kv_reuse", 'false, or kv_reuse "keep" or "budget"'
        raise SettingError("kv_params.drop_thoughts", expected, True, choices)
    if kv_budget is None and steering is None and not asks_for_policy:
        return None
    # A policy that never evicts has no use for the server's budget.
    return RequestSettings(policy, kv_budget if policy.evicts else None, steering, kv_reuse)


def _resolve_policy(
    keys: Mapping[str, Any], server: ServerConfig, model_window_tokens: int
) -> Policy:
    name, given = keys.get("kv_policy", server.kv_policy), keys.get("kv_params")
    cls = policy_class(name)
    known = cls.Params.model_fields
    if given is not None and not isinstance(given, Mapping):
        raise SettingError("kv_params", "an object of parameters by name", given, ", ".join(known))
    defaults = server.kv_params if name == server.kv_policy else {}
    parameters = {**defaults, **(given or {})}
    # With an unknown parameter, ``build`` reports it as the client wrote it.
    if parameters.keys() <= known.keys():
        of_server = {one: getattr(server, setting) for one, setting in _SERVER_DEFAULTS.items()}
        parameters = {**of_server, **parameters}
    policy = with_params(cls, parameters, model_window_tokens)
    if policy.evicts and policy.params.interval < server.kv_interval_min:
        expected = f"an integer in [{server.kv_interval_min}, 65536], as this server has it"
        choices = "a larger interval, or leave it out"
        raise SettingError("kv_params.interval", expected, policy.params.interval, choices)
    if policy.params.drop_thoughts and model_window_tokens:
        # Behind dropped thoughts a window would reach farther back than in the text.
        expected = f"false, because the model has windows of up to {model_window_tokens} tokens"
        raise SettingError("kv_params.drop_thoughts", expected, True, "false, or leave it out")
    return policy


def _check_budget(kv_budget: object, policy: Policy, server: ServerConfig) -> None:
    params = policy.params
    least, detail = 1, ""
    if policy.evicts:
        least = policy.min_budget_tokens
        window = f"window {params.window}"
        if policy.model_window_tokens > params.window:
            window = f"{policy.model_window_tokens}, the model's window of so many tokens,"
        detail = f" for policy {policy.name} (sink {params.sink} + {window} + 1)"
    # type(), not isinstance(): True is an instance of int.
    if type(kv_budget) is not int or not least <= kv_budget <= server.kv_budget_max:
        expected = f"an integer in [{least}, {server.kv_budget_max}]{detail}"
        choices = "any integer in that range, or leave it out for the server default"
        raise SettingError("kv_budget", expected, kv_budget, choices)
    if policy.records_queries and params.window > server.query_window:
        expected = f"an integer in [1, {server.query_window}], the server's query_window"
        choices = "a smaller window, or a server with a larger query_window"
        raise SettingError("kv_params.window", expected, params.window, choices)


def _check_track(policy: Policy, server: ServerConfig) -> None:
    if not policy.evicts or not policy.needs_track or server.max_tracked_requests:
        return
    free = [name for name in built_in() if not make_policy(name).needs_track]
    expected = f"one of {', '.join(free)}, because this server records nothing"
    choices = "one of these without coverage and quotas, or a server without max_tracked_requests 0"
    raise SettingError("kv_policy", expected, policy.name, choices)


def check_server_defaults(server: ServerConfig, model_window_tokens: int) -> None:
    """Validate the server's default policy, parameters and budget, like those of a request.

    Args:
        model_window_tokens: the largest window of the model's layers; 0: they have none.

    Raises:
        SettingError: one of them is wrong.
    """
    try:
        policy = _resolve_policy({}, server, model_window_tokens)
    except SettingError as error:
        parameter = error.field.removeprefix("kv_params.")
        setting = _SERVER_DEFAULTS.get(parameter)
        if setting is None or parameter in server.kv_params:
            raise
        # Report the server setting that the operator wrote.
        raise SettingError(setting, error.expected, error.got, error.choices) from None
    if policy.evicts and server.kv_budget_max < policy.min_budget_tokens:
        bounds = f"[{policy.min_budget_tokens}, {BUDGET_LIMIT_TOKENS}]"
        expected = f"an integer in {bounds}, at least the smallest budget of policy {policy.name}"
        choices = "any integer in that range, or leave it out"
        raise SettingError("kv_budget_max", expected, server.kv_budget_max, choices)
    keys = {} if server.kv_budget is not None else {"kv_budget": server.kv_budget_max}
    resolve_request(keys, server, model_window_tokens)


def _resolve_reuse(
    value: object, policy: Policy, has_budget: bool, server: ServerConfig
) -> str | None:
    """The request's ``kv_reuse``, or else the server's for a request that evicts; None: false."""
    asked = server.kv_reuse if value is None else value
    if asked is not False and asked not in ("keep", "budget"):  # 0 is not false
        raise SettingError("kv_reuse", "one of false, keep, budget", asked, "false, keep, budget")
    evicts = has_budget and policy.evicts
    if asked is False or (value is None and not evicts):
        return None
    if not evicts:
        expected, choices = "false without a kv_budget", "a kv_budget and a policy that evicts"
        raise SettingError("kv_reuse", expected, asked, f"false, or {choices}")
    if policy.params.count_prompt or not policy.params.protect_prompt:
        expected = "false with count_prompt: true or protect_prompt: false"
        raise SettingError("kv_reuse", expected, asked, "false, or the defaults of these two")
    return str(asked)


def _resolve_steering(value: object, server: ServerConfig) -> float | None:
    """``alpha_0`` from the request or else the server; None for no steering."""
    if value is None:
        return server.steering
    if value is False:
        return None
    limit = server.steering_max
    expected = f"false or a number in [{-limit:g}, {limit:g}]"
    choices = "a number in that range, false, or leave it out for the server default"
    # Compared before float(): NaN is in no range, and an integer may be too large for a float.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= limit:
        if server.steering_vector is not None:
            return float(value)
        expected = "false or nothing, because this server has no steering vector"
        choices = "false, or leave it out (--steering-vector lets a server steer)"
    raise SettingError("steering", expected, value, choices)
