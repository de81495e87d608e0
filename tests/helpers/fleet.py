"""The servers of ``server_specs.py``, each started once.

A start costs half a minute of a core. So the first test that asks starts a server, and all others
use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from disaggregated import Disaggregated
from oracle import Addition, steering_factors
from server_specs import SPECS
from servers import Server
from tiny_drafts import save_draft
from tiny_models import LINE_END_IDS, PIECES, save_adapter
from vector_files import origin

from sgl_skipkv.steering.vector import SteeringVector

# Steering vectors of the random models: see ``tiny_vector``.
STEERING_GAMMA = 0.1
STEERING_KEYWORDS = ("a", "b")
STEERING_PRESET = "any-newline"


def flags_of(
    folder: Path, config: Mapping[str, Any] | None, steering_layer: int | None = None
) -> list[str]:
    """Flags that name the files written here: of these settings, and of a ``tiny_vector``."""
    flags = []
    if config is not None:
        settings = folder / "skipkv.json"
        settings.write_text(json.dumps(config))
        flags += ["--skipkv-config", str(settings)]
    if steering_layer is not None:
        tiny_vector(steering_layer).save(folder / "vector.safetensors")
        flags += ["--steering-vector", str(folder / "vector.safetensors")]
        flags += ["--steering-gamma", str(STEERING_GAMMA)]
    return flags


def tiny_vector(layer: int) -> SteeringVector:
    """A vector for the random models, large enough to change what they say."""
    keywords = ",".join(STEERING_KEYWORDS)
    whence = origin(hidden_size=64, layer=layer, keywords=keywords, delimiters=STEERING_PRESET)
    draw = torch.Generator().manual_seed(layer)
    return SteeringVector(5 * torch.randn(64, generator=draw), whence)


def addition(
    name: str, call: Mapping[str, Any], output_ids: Sequence[int], **how: bool
) -> Addition | None:
    """What the definition adds to a call of this server; None for one that is not steered."""
    layer, alpha_0 = SPECS[name].steering_layer, call.get("steering", False)
    if alpha_0 is False:
        return None
    assert layer is not None
    return addition_of(layer, output_ids, alpha_0, **how)


def addition_of(layer: int, output_ids: Sequence[int], alpha_0: float, **how: bool) -> Addition:
    """What the definition adds to the output of this layer, with its ``tiny_vector``."""
    keywords = {PIECES.index(word) for word in STEERING_KEYWORDS}
    factors = steering_factors(output_ids, alpha_0, STEERING_GAMMA, LINE_END_IDS, keywords, **how)
    return Addition(layer, tiny_vector(layer).values, factors)


class Fleet:
    """Servers by name, each started once.

    Args:
        model_folder: family -> folder.
        folder: name -> new folder of a server.
    """

    def __init__(self, model_folder: Callable[[str], Path], folder: Callable[[str], Path]) -> None:
        self._model_folder, self._folder = model_folder, folder
        self._started: dict[str, Server] = {}

    def started(self, name: str) -> Server:
        """The server, perhaps not ready yet."""
        if name not in self._started:
            spec = SPECS[name]
            folder = self._folder(name.replace(", ", "-").replace(" ", "-"))
            arguments = flags_of(folder, spec.config, spec.steering_layer)
            model = spec.model if isinstance(spec.model, Path) else self._model_folder(spec.model)
            if spec.adapters:
                paths = (f"{one}={save_adapter(model, one)}" for one in spec.adapters)
                arguments += ["--lora-paths", *paths]
            if spec.draft is not None:
                path = save_draft(model, spec.draft)
                arguments += ["--speculative-draft-model-path", str(path)]
            if spec.prefill is None:
                server = Server(model, folder, [*spec.arguments, *arguments], **spec.options)
            else:
                both = {"prefill": spec.prefill, "shared": arguments}
                server = Disaggregated(model, folder, spec.arguments, **both, **spec.options)
            self._started[name] = server
        return self._started[name]

    def ready(self, name: str) -> Server:
        return self.started(name).wait_ready(400)

    def all_ready(self, *names: str) -> dict[str, Server]:
        """The servers by name, started side by side."""
        for name in names:
            self.started(name)
        return {name: self.ready(name) for name in names}

    def lent(self, name: str) -> Iterator[Server]:
        """What a fixture yields from: the server, ready; when its tests end, clean and stopped."""
        for servers in self.all_lent(name, stop=True):
            yield servers[name]

    def all_lent(self, *names: str, stop: bool) -> Iterator[dict[str, Server]]:
        """The same of several; ``stop`` where no later test uses them."""
        servers = self.all_ready(*names)
        yield servers
        for server in servers.values():
            server.assert_clean()
        if stop:
            self.stop(*names)

    def stop(self, *names: str) -> None:
        """End servers that no later test uses."""
        for name in names:
            self._started[name].stop()

    def stop_all(self) -> None:
        self.stop(*self._started)
