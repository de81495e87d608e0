"""What a policy is: one method that scores cached tokens.

A policy sees one call at one compaction and returns one float32 score per cached token, higher =
keep. It never decides how many tokens stay, never sees other calls, and holds no state: the same
input gives the same scores, alone or in a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from sgl_skipkv.config import Settings


class PolicyParams(Settings):
    """The knobs that every policy has; a subclass adds its own.

    ``interval``, ``protect_prompt``, ``count_prompt`` and ``delimiters`` default to the server's
    settings of the same meaning.
    """

    interval: int = Field(
        128, ge=8, le=65536, description="generated tokens between two compactions"
    )
    sink: int = Field(4, ge=0, le=1024, description="first tokens of the sequence, always kept")
    window: int = Field(8, ge=1, le=1024, description="last tokens, always kept")
    protect_prompt: bool = Field(True, description="never evict the prompt")
    count_prompt: bool = Field(False, description="the budget includes the prompt")
    delimiters: Literal["paper", "math", "code", "any-newline"] = Field(
        "math", description="which tokens close a sentence"
    )


@dataclass(frozen=True)
class Sentences:
    """The closed sentences of a call that still have cached tokens, oldest first.

    Attributes:
        starts, stops: int64 [S], half-open spans in logical positions, prompt included.
        redundancy: float32 [S], highest cosine similarity to any sentence that closed later, -1
            where there is none. It never falls: a flag stays for the life of the call.
    """

    starts: Tensor
    stops: Tensor
    redundancy: Tensor


@dataclass(frozen=True)
class ScoreInput:
    """Everything a policy may look at: one call, at one compaction.

    Attributes:
        positions: int64 [n], logical position of each cached token, ascending, prompt included.
        prompt_tokens: length of the prompt.
        layers: number of attention layers.
        keys: layer -> float [n, Hkv, d], the cached rotated keys of that layer.
        queries: float [layers, W, Hq, d], rotated queries of the last W tokens, in any order;
            None for policies that did not ask for them.
        scale: the model's factor on attention logits.
        sentences: None for policies that did not ask for them.
        seed: the same for the same prompt and the same compaction, whatever the batch.
    """

    positions: Tensor
    prompt_tokens: int
    layers: int
    keys: Callable[[int], Tensor]
    queries: Tensor | None
    scale: float
    sentences: Sentences | None
    seed: int


class Policy(ABC):
    """Base of all policies: its knobs, what it needs recorded during decoding, and its scores."""

    name: ClassVar[str]
    Params: ClassVar[type[PolicyParams]] = PolicyParams
    needs_queries: ClassVar[bool] = False
    needs_sentences: ClassVar[bool] = False
    evicts: ClassVar[bool] = True
    #: whether the open sentence is protected as well, up to half the budget
    protects_open_sentence: ClassVar[bool] = False

    def __init__(self, params: PolicyParams) -> None:
        self.params = params

    @property
    def min_budget_tokens(self) -> int:
        """Smallest budget this policy can keep: sinks, window, and one token to choose."""
        return self.params.sink + self.params.window + 1

    @abstractmethod
    def scores(self, inputs: ScoreInput) -> Tensor:
        """float32 [n], one score per cached token, higher = keep."""
