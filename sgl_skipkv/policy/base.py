"""What a policy is: one method that scores cached tokens.

A policy returns one float32 score per cached token of a request that is due, higher = keep. It
never decides how many tokens stay and holds no state, and a request's scores depend on no other
request: the same input gives the same scores, alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from torch import Tensor

from sgl_skipkv.config import Preset, SettingError, Settings
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps


def _odd(tokens: int) -> int:
    if tokens % 2 == 0:
        expected = "an odd integer in [1, 255]"
        raise SettingError("kv_params.kernel", expected, tokens, "1, 3, 5, 7, ...")
    return tokens


AttentionOver = Literal["mean", "group_max", "max"]
PoolWidth = Annotated[int, Field(ge=1, le=255), AfterValidator(_odd)]


class PolicyParams(Settings):
    """The parameters that every policy has; a subclass adds its own.

    ``interval``, ``protect_prompt``, ``count_prompt`` and ``delimiters`` default to the server's
    settings of the same meaning.
    """

    interval: int = Field(
        128, ge=8, le=65536, description="generated tokens between two compactions, 8 or more"
    )
    sink: int = Field(4, ge=0, le=1024, description="first tokens of the sequence, always kept")
    window: int = Field(
        8,
        ge=1,
        le=1024,
        description="last tokens, always kept; most policies that score by attention use theirs",
    )
    fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="a compaction keeps at most this share of what is generated so far",
    )
    coverage: float = Field(
        1.0,
        gt=0,
        le=1,
        description="a compaction keeps no more than reaches this share of recent attention",
    )
    quotas: bool = Field(
        False,
        description="true: every sentence keeps tokens in proportion to the attention it gets, and "
        "the policy's score chooses which; for policies that score tokens alone",
    )
    protect_prompt: bool = Field(
        True, description="false: the prompt may be evicted, and is not shared in the radix cache"
    )
    count_prompt: bool = Field(
        False, description="true: the budget includes the prompt, which `rpc` refuses"
    )
    delimiters: Preset = Field("math", description="which tokens close a sentence")
    drop_thoughts: bool = Field(
        False,
        description="true: with `kv_reuse`, evict the thoughts when the request finishes, for chat "
        "templates that leave them out of the next prompt",
    )


class Policy:
    """Base of all policies: its parameters, what it needs recorded during decoding, and its scores.

    A policy with ``needs_attention`` follows what each token received at every decode step. It says
    how a token's statistics begin (``initial_statistics``) and what a few steps do to them
    (``follow``); the request's state holds them, so the policy itself still holds none.
    """

    name: ClassVar[str]
    #: what stays, and the paper: its row in README
    keeps: ClassVar[str] = ""
    source: ClassVar[str] = ""
    Params: ClassVar[type[PolicyParams]] = PolicyParams
    #: whether it reads the last ``window`` queries, which are recorded for it
    needs_queries: ClassVar[bool] = False
    #: whether it is told how queries and keys are rotated, and what the model asks on average
    needs_rotation: ClassVar[bool] = False
    needs_sentences: ClassVar[bool] = False
    #: whether it is told where sentences begin and end, and nothing else of them: that is known
    #: without recordings
    needs_spans: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False
    #: what ``follow`` sees of the attention of all rows, one per layer and query head: their mean;
    #: the maximum over each KV head's query heads, then the mean; or the maximum over all rows
    attention_over: ClassVar[AttentionOver] = "mean"
    #: whether ``follow`` sees the last ``window`` steps before each compaction, no others
    follows_compactions: ClassVar[bool] = False
    #: how the scores of several ranks, each of which has seen some of the heads, become one. "max"
    #: also where the ranks' scores are equal; None: they depend on no head
    over_ranks: ClassVar[Literal["mean", "max"] | None] = "mean"
    #: whether ``follow`` must see the attention of all ranks' heads
    tracks_all_heads: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    #: of how many layers it holds as many numbers as the keys have, where the cache is known and it
    #: gathers keys or values of all due requests, layer by layer
    joins_layers: ClassVar[int] = 0
    #: of how many tokens it holds a product with every other token, of each rank, where no kernel
    #: scores or there are several ranks
    block_tokens: ClassVar[int] = 0
    #: whether the open sentence is protected as well, up to half the budget
    protects_open_sentence: ClassVar[bool] = False

    def __init__(self, params: PolicyParams, model_window_tokens: int = 0) -> None:
        """model_window_tokens: the largest window of the model's layers; 0: they have none."""
        self.params, self.model_window_tokens = params, model_window_tokens

    @property
    def records_queries(self) -> bool:
        """Whether the last ``window`` queries are used: for scores, statistics or ``coverage``."""
        return self.needs_queries or self.follows_compactions or self.params.coverage < 1

    @property
    def needs_track(self) -> bool:
        """Whether anything is recorded for it in decode steps."""
        return self.records_queries or self.needs_sentences or self.needs_attention

    @property
    def pinned_tail_tokens(self) -> int:
        """Most recent tokens that every compaction keeps: ``window``, or the model's if longer."""
        return max(self.params.window, self.model_window_tokens)

    @property
    def min_budget_tokens(self) -> int:
        """Smallest budget this policy can keep: sinks, pinned tail, and one token to choose."""
        return self.params.sink + self.pinned_tail_tokens + 1

    def budget_after(self, kv_budget: int, compactions: int) -> int:
        """Budget after this many compactions, at most ``kv_budget``, whatever ``fraction`` says.

        Compaction k + 1 is due when the request holds ``budget_after(k) + interval`` tokens.
        """
        return kv_budget

    def protected_tail(self, kv_budget: int) -> int:
        """Most recent tokens that stay whatever their score, where the budget has room."""
        return self.params.window

    def candidates(self, inputs: ScoreInput) -> tuple[int, int]:
        """Row entries that neither prompt, sink nor the pinned tail protects, half-open."""
        return self.span(inputs.prompt_tokens, inputs.positions.shape[0])

    def span(self, prompt_tokens: int, row_tokens: int) -> tuple[int, int]:
        """``candidates`` of a row whose prompt has so many tokens."""
        prompt = prompt_tokens if self.params.protect_prompt else 0
        return max(prompt, self.params.sink), row_tokens - self.pinned_tail_tokens

    def gathers(self, prompt_tokens: Sequence[int], row_tokens: Sequence[int]) -> list[int]:
        """How many numbers each gather over ranks in ``scores_together`` has, in order: what must
        be combined before the scores are. Both arguments: of each request."""
        return []

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        """Statistics of tokens that were just cached, name -> float32 [m].

        Args:
            positions: int64 [m], their logical positions; tokens of one or of several requests.
        """
        return {}

    def follow(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
        """Statistics after a few decode steps, name -> float32 [n].

        The tokens may be those of several requests, one after the other. What a request's tokens
        get must not depend on the others, to the bit.

        Args:
            statistics: before them, [n] each, those of newly cached tokens included.
        """
        return dict(statistics)

    def scores(self, inputs: ScoreInput) -> Tensor:
        """float32 [n], one score per cached token, higher = keep."""
        raise NotImplementedError

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """As ``scores`` of each request, where all their locations are known: overridden where one
        pass over many requests is faster. What a request gets must not depend on the others, to
        the bit.
        """
        return [self.scores(inputs) for inputs in requests]

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """Scores of every request with these parameters that is due in this step."""
        if all(request.location is not None for request in requests):
            return self.scores_in_place(requests)
        return [self.scores(inputs) for inputs in requests]


class JointPolicy(Policy):
    """A policy that scores all requests at once, on every device: it has ``scores_together``.

    For scores that follow from statistics or a draw, so that no kernel needs to run, and for those
    of which ranks combine a part first, so that one gather serves all requests.
    """

    def scores(self, inputs: ScoreInput) -> Tensor:
        return self.scores_together([inputs])[0]

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        raise NotImplementedError
