"""``sgl.gen(..., kv_budget=)`` and ``program.run(..., kv_budget=)``: our four keys in SGLang's
frontend language.

Importing this module installs them in the process that runs SGLang programs. As with SGLang's own
sampling parameters, ``run`` and ``run_batch`` set the defaults of each ``gen``. The interpreter
passes the keys with the sampling parameters and sends them as ``custom_params`` (native and
``Runtime`` backends) or ``extra_body`` (OpenAI backend).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection
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
        wrapped = _with_keys(getattr(api, name))
        for module in (sglang, api):
            setattr(module, name, wrapped)
    params = ir.SglSamplingParams
    params.clone = _keeping_keys(params.clone)
    params.to_srt_kwargs = _adding(params.to_srt_kwargs, "custom_params")
    params.to_openai_kwargs = _adding(params.to_openai_kwargs, "extra_body")
    for backend in _WITHOUT_KEYS:
        name = f"to_{backend}_kwargs"
        setattr(params, name, _refusing(getattr(params, name), backend))
    program = ir.SglFunction
    program.run, program.run_batch = _with_defaults(program.run), _with_defaults(program.run_batch)
    interpreter.run_program = _handing_on_defaults(interpreter.run_program)
    executor = interpreter.StreamExecutor
    executor._resolve_sampling_params = _resolving(executor._resolve_sampling_params)
    _installed = True


def _keys_of(holder: Any) -> dict[str, Any]:
    """The keys set on one ``SglSamplingParams`` or ``SglFunction``; ``None`` counts as not set."""
    keys = getattr(holder, "skipkv", None) or {}
    return {name: value for name, value in keys.items() if value is not None}


def _take(kwargs: dict[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    return {name: kwargs.pop(name) for name in KEYS if name in kwargs and name not in but}


def _with_keys(gen: Callable[..., Any]) -> Callable[..., Any]:
    """``gen`` that stores our keys on the expression it returns."""

    @functools.wraps(gen)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
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

    return wrapper


def _with_defaults(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` or ``run_batch`` that stores our keys on a copy of the program, which other
    threads may be running. A key that is also a parameter of the program is passed to it."""

    @functools.wraps(run)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys = _take(kwargs, but=self.arg_names)
        if keys:
            self = copy.copy(self)
            self.skipkv = keys
        return run(self, *args, **kwargs)

    return wrapper


def _handing_on_defaults(run_program: Callable[..., Any]) -> Callable[..., Any]:
    """``run_program`` that copies the keys from the program to its default sampling parameters."""

    @functools.wraps(run_program)
    def wrapper(
        program: Any,
        backend: Any,
        func_args: Any,
        func_kwargs: Any,
        default_sampling_para: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        default_sampling_para.skipkv = _keys_of(program)
        return run_program(
            program, backend, func_args, func_kwargs, default_sampling_para, *args, **kwargs
        )

    return wrapper


def _keeping_keys(clone: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(clone)
    def wrapper(self: Any) -> Any:
        copy = clone(self)
        copy.skipkv = _keys_of(self)
        return copy

    return wrapper


def _resolving(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter copies a fixed list of names from ``gen``; this adds our keys."""

    @functools.wraps(resolve)
    def wrapper(self: Any, sampling_params: Any) -> Any:
        resolved = resolve(self, sampling_params)
        resolved.skipkv = {**_keys_of(self.default_sampling_para), **_keys_of(sampling_params)}
        return resolved

    return wrapper


def _adding(to_kwargs: Callable[[Any], dict[str, Any]], carrier: str) -> Callable[..., Any]:
    @functools.wraps(to_kwargs)
    def wrapper(self: Any) -> dict[str, Any]:
        kwargs = to_kwargs(self)
        if keys := _keys_of(self):
            kwargs[carrier] = {**(kwargs.get(carrier) or {}), **keys}
        return kwargs

    return wrapper


def _refusing(to_kwargs: Callable[[Any], dict[str, Any]], backend: str) -> Callable[..., Any]:
    """Refuse the keys for a service that would ignore them and answer without a budget."""

    @functools.wraps(to_kwargs)
    def wrapper(self: Any) -> dict[str, Any]:
        for name, value in _keys_of(self).items():
            raise SettingError(
                name,
                f"nothing on the {backend} backend",
                value,
                "leave it out, or an SGLang server (native or OpenAI backend)",
            )
        return to_kwargs(self)

    return wrapper


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
