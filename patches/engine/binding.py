"""The plugin's objects are attributes of SGLang's objects; there are no globals.

``scheduler.skipkv`` is the ``Binding`` of one scheduler process. ``req_to_token_pool.skipkv`` is
the same object, because a batch has no reference to its scheduler. ``req.skipkv`` is the
``RequestState`` of one budgeted request, ``model_runner.skipkv`` the ``ModelSide``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.metrics import Metrics
from sgl_skipkv.patches.limits import NO_LIMITS, ServerLimits
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.ranks import ONE_RANK, Ranks
from sgl_skipkv.request.state import RequestState

KVScale = Callable[[int], float]


@dataclass(frozen=True)
class Binding:
    """One scheduler process: its settings, whether eviction is ready, and the runtime.

    Attributes:
        kv_scales: layer -> factor of its cached keys, and of its values; None: they are cached in
            the model's type.
        scored_layers: numbers of the layers that policies see: those without a window.
        measure_again: measures the model of an idle server, and says why if that did not work.
    """

    config: ServerConfig
    readiness: Readiness
    runtime: Runtime | None
    scheduler: Any
    metrics: Metrics
    kv_scales: tuple[KVScale | None, KVScale | None] = (None, None)
    limits: ServerLimits = NO_LIMITS
    scored_layers: Sequence[int] = ()
    measure_again: Callable[[], str | None] = lambda: None

    @property
    def ranks(self) -> Ranks:
        return ONE_RANK if self.runtime is None else self.runtime.ranks


def binding_of(holder: Any) -> Binding | None:
    """The binding on a scheduler or a ``req_to_token_pool``."""
    return getattr(holder, "skipkv", None)


def bound_to(req_to_token_pool: Any) -> Binding:
    """The binding of a pool in which a request with a state has a row."""
    binding: Binding = req_to_token_pool.skipkv
    return binding


def runtime_of(holder: Any) -> Runtime | None:
    """The runtime of a scheduler or a ``req_to_token_pool``; None where eviction is not ready."""
    binding = binding_of(holder)
    return None if binding is None else binding.runtime


def state_of(req: Any) -> RequestState | None:
    """The state of a budgeted request; None for every other request."""
    return getattr(req, "skipkv", None)


def evicting_state_of(req: Any) -> RequestState | None:
    """The state of a request whose policy evicts."""
    state = state_of(req)
    return state if state is not None and state.settings.evicts else None


@cache
def mixed_in(mixin: type, base: type) -> type:
    """A class of SGLang with our methods before its own."""
    return type(f"Budgeted{base.__name__}", (mixin, base), {})
