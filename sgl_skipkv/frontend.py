"""``sgl.gen(..., kv_budget=)`` and ``program.run(..., kv_budget=)``: our keys in SGLang's frontend
language.

Importing this module installs them in the process that runs SGLang programs. As with SGLang's own
sampling parameters, ``run`` and ``run_batch`` set the defaults of each ``gen``. The interpreter
passes the keys with the sampling parameters and sends them as ``custom_params`` (native and
``Runtime`` backends) or ``extra_body`` (OpenAI backend).

``fork`` sends the program's text to the server once, before the branches go on from it. With
``kv_reuse`` this request carries the keys of the latest ``gen`` (before the first one, those of
``run`` if it sets a budget), so that it continues the history that this ``gen`` left.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any

import sglang
from sglang.lang import api, interpreter, ir
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from sgl_skipkv.config import SettingError
from sgl_skipkv.request.settings import KEYS

_GENS = ("gen", "gen_string", "gen_int")
# Backends for services that are not SGLang servers.
_WITHOUT_KEYS = ("anthropic", "vertexai", "litellm")
_installed = False


def install() -> None:
    """Let ``gen``, ``gen_string``, ``gen_int``, ``run`` and ``run_batch`` take the keys.

    Calling it again does nothing.

    Raises:
        RuntimeError: the frontend of this SGLang version has other signatures.
    """
    global _installed
    if _installed:
        return
    for owner, name, _, expected in _WRAPPED:
        parameters = list(inspect.signature(getattr(owner, name)).parameters)
        if expected and parameters != expected.split():
            mismatch = f"sgl_skipkv: {name} takes {parameters}, expected {expected}"
            raise RuntimeError(f"{mismatch}; this SGLang's frontend is not supported")
    for owner, name, around, _ in _WRAPPED:
        if around is not None:
            _wrap(owner, name, around)
    for name in _GENS:
        setattr(sglang, name, getattr(api, name))
    _installed = True


def _keys_of(holder: Any) -> dict[str, Any]:
    """The keys that one of the frontend's objects carries; ``None`` counts as not set."""
    keys = getattr(holder, "skipkv", None) or {}
    return {name: value for name, value in keys.items() if value is not None}


def _take(kwargs: dict[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    return {name: kwargs.pop(name) for name in KEYS if name in kwargs and name not in but}


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of the frontend by ``around``, which gets the original first."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def _gen(gen: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Store our keys on the expression that ``gen`` returns."""
    keys = _take(kwargs)
    expression = gen(*args, **kwargs)
    if keys:
        if not isinstance(expression, ir.SglGen):
            choices = "leave it out, or generate without choices"
            raise SettingError(next(iter(keys)), "a gen without choices", "choices=", choices)
        expression.sampling_params.skipkv = keys
    return expression


def _run(run: Callable[..., Any], program: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Store our keys on a copy of the program, which other threads may be running. A key that is
    also a parameter of the program is passed to it."""
    keys = _take(kwargs, but=inspect.signature(program.func).parameters)
    if keys:
        program = copy.copy(program)
        program.skipkv = keys
    return run(program, *args, **kwargs)


def _run_program(run_program: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Copy the keys from the program to its default sampling parameters.

    Keys for a service that would ignore them are refused here: what a ``gen`` raises in the
    program's thread is in ``state.error()`` only.
    """
    given = inspect.signature(run_program).bind(*args, **kwargs).arguments
    keys = _keys_of(given["program"])
    modules = {cls.__module__ for cls in type(given["backend"]).mro()}
    for name in _WITHOUT_KEYS:
        if f"sglang.lang.backend.{name}" in modules:
            _refuse(name, keys)
    given["default_sampling_para"].skipkv = keys
    return run_program(*args, **kwargs)


def _resolve_sampling_params(resolve: Callable[..., Any], executor: Any, params: Any) -> Any:
    """The interpreter copies a fixed list of names from ``gen``; this adds our keys."""
    resolved = resolve(executor, params)
    keys = {**_keys_of(executor.default_sampling_para), **_keys_of(params)}
    resolved.skipkv = executor.skipkv = keys
    return resolved


def _fork(fork: Callable[..., Any], executor: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A branch goes on from the latest ``gen`` of the program, until it has one itself."""
    branches = fork(executor, *args, **kwargs)
    for branch in branches:
        branch.skipkv = getattr(executor, "skipkv", None)
    return branches


def _commit(commit: Callable[..., None], endpoint: Any, /, s: Any) -> None:
    """Compute the text of a program that forks as a request with ``kv_reuse``.

    SGLang's own request would compute all of it and file it in full. It stays as it is without
    ``kv_reuse``: it computes nothing that a budget could evict. So it does before the first ``gen``
    where ``run`` sets the reuse and no budget: each ``gen`` may bring its own, and a server without
    a default would refuse the reuse alone.
    """
    latest = getattr(s, "skipkv", None)
    keys = _keys_of(s.default_sampling_para if latest is None else s)
    if not keys.get("kv_reuse") or (latest is None and "kv_budget" not in keys):
        commit(endpoint, s)
        return
    params = {"max_new_tokens": 0, "custom_params": keys}
    endpoint._generate_http_request(s, {"text": s.text_, "sampling_params": params})


def _add_keys(
    carrier: str, to_kwargs: Callable[[Any], dict[str, Any]], params: Any
) -> dict[str, Any]:
    kwargs = to_kwargs(params)
    if keys := _keys_of(params):
        kwargs[carrier] = {**(kwargs.get(carrier) or {}), **keys}
    return kwargs


def _refuse_keys(
    backend: str, to_kwargs: Callable[[Any], dict[str, Any]], params: Any
) -> dict[str, Any]:
    """Refuse the keys for a service that would ignore them and answer without a budget."""
    _refuse(backend, _keys_of(params))
    return to_kwargs(params)


def _refuse(backend: str, keys: dict[str, Any]) -> None:
    for name, value in keys.items():
        choices = "leave it out, or an SGLang server (native or OpenAI backend)"
        raise SettingError(name, f"nothing on the {backend} backend", value, choices)


_PARAMS, _EXECUTOR = ir.SglSamplingParams, interpreter.StreamExecutor
_OF_RUN = "program backend func_args func_kwargs default_sampling_para stream sync use_thread"
#: owner, function, what wraps it (None: ``_commit`` calls it), the parameters that it must have
_WRAPPED: tuple[tuple[Any, str, Callable[..., Any] | None, str], ...] = (
    *((api, name, _gen, "") for name in _GENS),
    *((ir.SglFunction, name, _run, "") for name in ("run", "run_batch")),
    (_PARAMS, "to_srt_kwargs", partial(_add_keys, "custom_params"), "self"),
    (_PARAMS, "to_openai_kwargs", partial(_add_keys, "extra_body"), "self"),
    *(
        (_PARAMS, f"to_{backend}_kwargs", partial(_refuse_keys, backend), "self")
        for backend in _WITHOUT_KEYS
    ),
    (_EXECUTOR, "_resolve_sampling_params", _resolve_sampling_params, "self sampling_params"),
    (_EXECUTOR, "fork", _fork, "self size position_ids_offset"),
    (RuntimeEndpoint, "commit_lazy_operations", _commit, "self s"),
    (RuntimeEndpoint, "_generate_http_request", None, "self s data"),
    (interpreter, "run_program", _run_program, _OF_RUN),
)

install()
