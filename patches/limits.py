"""What one server cannot do for a request, although eviction works there.

The scheduler reads it from the loaded model and reports it, so that every API refuses such a
request before it answers: a stream's 200 cannot be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sgl_skipkv.config import SettingError
from sgl_skipkv.policy import built_in, policy_class
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.reuse.thoughts import NO_THOUGHTS

#: parameter -> its only value where the prompt is computed by another server
WITHOUT_PROMPT: Final = {"protect_prompt": True, "count_prompt": False}
PROMPT_IS_ELSEWHERE: Final = "PD disaggregation: nothing is recorded of the prompt"


@dataclass(frozen=True)
class ServerLimits:
    """Of the model and the flags of one server.

    Attributes:
        model_window_tokens: the largest window of the model's layers; 0: they have none.
        without_reuse: why requests with ``kv_reuse`` are refused; empty: they are not.
        without_budget_reuse: why ``kv_reuse: "budget"`` is refused; None: it is not.
        without_rotation: why policies that need the rotation of queries are refused; None: they are
            not.
        has_thoughts: whether one token each begins and ends a thought.
        prompt_is_elsewhere: whether another server computes prompts (PD disaggregation), so nothing
            of them is recorded.
    """

    model_window_tokens: int = 0
    without_reuse: tuple[str, ...] = ()
    without_rotation: str | None = None
    without_budget_reuse: str | None = None
    has_thoughts: bool = False
    prompt_is_elsewhere: bool = False

    def check(self, settings: RequestSettings) -> None:
        """Refuse what this server cannot do.

        Raises:
            SettingError: the request asks for it.
        """
        if settings.kv_reuse is not None and self.without_reuse:
            expected = f"false on this server ({'; '.join(self.without_reuse)})"
            raise SettingError("kv_reuse", expected, settings.kv_reuse, "false, or leave it out")
        if settings.kv_reuse == "budget" and self.without_budget_reuse is not None:
            expected = f"keep or false on this server ({self.without_budget_reuse})"
            raise SettingError("kv_reuse", expected, "budget", "keep, false, or leave it out")
        needs_rotation = settings.evicts and settings.policy.needs_rotation
        if needs_rotation and self.without_rotation is not None:
            others = [name for name in built_in() if not policy_class(name).needs_rotation]
            expected = f"another policy on this server ({self.without_rotation})"
            raise SettingError("kv_policy", expected, settings.policy.name, ", ".join(others))
        if settings.evicts and self.prompt_is_elsewhere:
            for name, served in WITHOUT_PROMPT.items():
                if (got := getattr(settings.policy.params, name)) is not served:
                    expected = f"{str(served).lower()} on this server ({PROMPT_IS_ELSEWHERE})"
                    raise SettingError(f"kv_params.{name}", expected, got, "leave it out")
        if settings.drops_thoughts and not self.has_thoughts:
            expected = f"false on this server ({NO_THOUGHTS})"
            raise SettingError("kv_params.drop_thoughts", expected, True, "false, or leave it out")


NO_LIMITS: Final = ServerLimits()
