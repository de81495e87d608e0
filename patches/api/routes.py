"""HTTP routes that were created before plugins were loaded, as in ``sgl.Runtime``."""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.api import anthropic, openai

_OURS = {
    ours.__mro__[2]: ours
    for ours in (
        openai.ChatCompletionRequest,
        openai.CompletionRequest,
        openai.ResponsesRequest,
        anthropic.AnthropicMessagesRequest,
    )
}


def bind_routes(app: Any) -> None:
    """Make the routes accept our request classes.

    FastAPI reads a body's class from the endpoint when it creates a route, so routes are recreated.
    """
    for route in list(app.router.routes):
        endpoint = getattr(route, "endpoint", None)
        annotations = getattr(endpoint, "__annotations__", {})
        bodies = {name: of for name, of in annotations.items() if isinstance(of, type)}
        ours = {name: _OURS[of] for name, of in bodies.items() if of in _OURS}
        if ours:
            annotations.update(ours)
            app.router.routes.remove(route)
            app.add_api_route(
                route.path,
                endpoint,
                methods=[*route.methods],
                name=route.name,
                dependencies=route.dependencies,
            )
