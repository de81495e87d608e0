"""``sgl.gen(..., kv_budget=)`` and ``program.run(..., kv_budget=)``: our four keys in SGLang's
frontend language.

Importing this module installs them in the process that runs SGLang programs. As with SGLang's own
sampling parameters, ``run`` and ``run_batch`` set the defaults of each ``gen``. The interpreter
passes the keys with the sampling parameters and sends them as ``custom_params`` (native and
``Runtime`` backends) or ``extra_body`` (OpenAI backend).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any

import sglang
from sglang.lang import api, interpreter, ir

from sgl_skipkv.config import SettingError
from sgl_skipkv.request.settings import KEYS

# Backends for services that are not SGLang servers.
_WITHOUT_KEYS = ("anthropic", "vertexai", "litellm")
_installed = False


def install() -> None:
    """Let ``gen``, ``gen_string``, ``gen_int``, ``run`` and ``run_batch`` take the four keys.

    Calling it again does nothing.

    Raises:
        RuntimeError: the frontend of this SGLang version has other signatures.
    """
    global _installed
    if _installed:
        return
    _check_frontend()
    for name in ("gen", "gen_string", "gen_int"):
        _wrap(api, name, _gen)
        setattr(sglang, name, getattr(api, name))
    params, program = ir.SglSamplingParams, ir.SglFunction
    _wrap(params, "clone", _clone)
    _wrap(params, "to_srt_kwargs", partial(_add_keys, "custom_params"))
    _wrap(params, "to_openai_kwargs", partial(_add_keys, "extra_body"))
    for backend in _WITHOUT_KEYS:
        _wrap(params, f"to_{backend}_kwargs", partial(_refuse_keys, backend))
    _wrap(program, "run", _run)
    _wrap(program, "run_batch", _run)
    _wrap(interpreter, "run_program", _run_program)
    _wrap(interpreter.StreamExecutor, "_resolve_sampling_params", _resolve_sampling_params)
    _installed = True


def _keys_of(holder: Any) -> dict[str, Any]:
    """The keys set on one ``SglSamplingParams`` or ``SglFunction``; ``None`` counts as not set."""
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
            raise ValueError(
                f"{next(iter(keys))}: expected a gen without choices, got choices=; choices: "
                "leave it out, or generate without choices"
            )
        expression.sampling_params.skipkv = keys
    return expression


def _run(run: Callable[..., Any], program: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Store our keys on a copy of the program, which other threads may be running. A key that is
    also a parameter of the program is passed to it."""
    keys = _take(kwargs, but=program.arg_names)
    if keys:
        program = copy.copy(program)
        program.skipkv = keys
    return run(program, *args, **kwargs)


def _run_program(
    run_program: Callable[..., Any],
    program: Any,
    backend: Any,
    func_args: Any,
    func_kwargs: Any,
    default_sampling_para: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Copy the keys from the program to its default sampling parameters."""
    default_sampling_para.skipkv = _keys_of(program)
    own = (program, backend, func_args, func_kwargs, default_sampling_para)
    return run_program(*own, *args, **kwargs)


def _clone(clone: Callable[[Any], Any], params: Any) -> Any:
    cloned = clone(params)
    cloned.skipkv = _keys_of(params)
    return cloned


def _resolve_sampling_params(resolve: Callable[..., Any], executor: Any, params: Any) -> Any:
    """The interpreter copies a fixed list of names from ``gen``; this adds our keys."""
    resolved = resolve(executor, params)
    resolved.skipkv = {**_keys_of(executor.default_sampling_para), **_keys_of(params)}
    return resolved


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
    for name, value in _keys_of(params).items():
        raise SettingError(
            name,
            f"nothing on the {backend} backend",
            value,
            "leave it out, or an SGLang server (native or OpenAI backend)",
        )
    return to_kwargs(params)


def _check_frontend() -> None:
    expected = {
        ir.SglSamplingParams.clone: ["self"],
        ir.SglSamplingParams.to_srt_kwargs: ["self"],
        ir.SglSamplingParams.to_openai_kwargs: ["self"],
        **{getattr(ir.SglSamplingParams, f"to_{name}_kwargs"): ["self"] for name in _WITHOUT_KEYS},
        interpreter.StreamExecutor._resolve_sampling_params: ["self", "sampling_params"],
        interpreter.run_program: [
            *("program", "backend", "func_args", "func_kwargs", "default_sampling_para"),
            *("stream", "sync", "use_thread"),
        ],
    }
    for function, names in expected.items():
        parameters = list(inspect.signature(function).parameters)
        if parameters != names:
            raise RuntimeError(
                f"sgl_skipkv: {function.__qualname__} takes {parameters}, expected {names}; "
                "this SGLang's frontend is not supported"
            )


install()
