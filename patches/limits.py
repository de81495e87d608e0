"""What one server cannot do for a request, although eviction works there.

The scheduler reads it from the loaded model and reports it, so that every API refuses such a
request before it answers: a stream's 200 cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sgl_skipkv.config import SettingError
from sgl_skipkv.policy import names
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.reuse.thoughts import NO_THOUGHTS


@dataclass(frozen=True)
class ServerLimits:
    """Of the model and the flags of one server.

    Attributes:
        model_window_tokens: the largest window of the model's layers; 0: they have none.
        without_reuse: why requests with ``kv_reuse`` are refused; empty: they are not.
        refused_policies: name -> why; what they need to know of queries is not known.
        has_thoughts: whether one token each begins and ends a thought.
    """

    model_window_tokens: int = 0
    without_reuse: tuple[str, ...] = ()
    refused_policies: Mapping[str, str] = field(default_factory=dict)
    has_thoughts: bool = False

    def check(self, settings: RequestSettings) -> None:
        """Refuse what this server cannot do.

        Raises:
            SettingError: the request asks for it.
        """
        if settings.kv_reuse is not None and self.without_reuse:
            expected = f"false on this server ({'; '.join(self.without_reuse)})"
            raise SettingError("kv_reuse", expected, settings.kv_reuse, "false, or leave it out")
        why = self.refused_policies.get(settings.policy.name) if settings.evicts else None
        if why is not None:
            others = ", ".join(name for name in names() if name not in self.refused_policies)
            expected = f"another policy on this server ({why})"
            raise SettingError("kv_policy", expected, settings.policy.name, others)
        if settings.drops_thoughts and not self.has_thoughts:
            expected = f"false on this server ({NO_THOUGHTS})"
            raise SettingError("kv_params.drop_thoughts", expected, True, "false, or leave it out")


NO_LIMITS: Final = ServerLimits()
