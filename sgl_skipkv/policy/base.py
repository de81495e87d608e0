"""What a policy is: one method that scores cached tokens.

A policy returns one float32 score per cached token of a request that is due, higher = keep. It
never decides how many tokens stay and holds no state, and a request's scores depend on no other
request: the same input gives the same scores, alone or in a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from sgl_skipkv.config import Preset, SettingError, Settings
from sgl_skipkv.kernels import on_device
from sgl_skipkv.policy.query_centres import QueryCentres
from sgl_skipkv.policy.ranks import ONE_RANK, Ranks


def _odd(tokens: int) -> int:
    if tokens % 2 == 0:
        expected = "an odd integer in [1, 255]"
        raise SettingError("kv_params.kernel", expected, tokens, "1, 3, 5, 7, ...")
    return tokens


AttentionOver = Literal["mean", "group_max", "max"]
Statistics = Mapping[str, Tensor]
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
        8, ge=1, le=1024, description="last tokens, always kept; their queries score, where any do"
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


class Places(NamedTuple):
    """Where tokens stand in their sentences.

    Attributes:
        sentence: int64 [n], the last one that begins at or before each token, or the first.
        since: int64 [n], tokens since it began; negative: before it.
        left: int64 [n], tokens until it ends, 1 of its delimiter; 0 or less: behind it.
    """

    sentence: Tensor
    since: Tensor
    left: Tensor

    def ending_bonus(self, ending: int) -> Tensor:
        """float32 [n]: how near each token stands to the delimiter that closes its sentence.

        Args:
            ending: tokens per sentence with a bonus; the nearest gets this much, the farthest 1,
                the delimiter itself, the last of several in a row, and everything else 0.
        """
        inside = (self.since >= 0) & (self.left > 1)
        return ((ending + 2 - self.left).clamp_min(0) * inside).float()

    def begins(self, beginning: int) -> Tensor:
        """bool [n]: whether each is one of so many tokens that its sentence begins with."""
        return (self.since >= 0) & (self.since < beginning) & (self.left > 0)


#: between the positions of one request and the next, where their tokens are taken as one list
APART = 2**40


@dataclass(frozen=True)
class Sentences:
    """The closed sentences of a request that still have cached tokens, oldest first.

    Attributes:
        starts, stops: int64 [S], half-open spans in logical positions, prompt included.
        redundancy: float32 [S], highest cosine similarity to any sentence that closed later, -1
            where there is none. It never falls: a flag stays for the life of the request. -1 for
            policies that ask for spans alone.
    """

    starts: Tensor
    stops: Tensor
    redundancy: Tensor

    def places(self, positions: Tensor) -> Places:
        """Where tokens stand in their sentences.

        Args:
            positions: int64 [n], logical, ascending.
        """
        if self.starts.shape[0] == 0:
            before = torch.full_like(positions, -1)
            return Places(before, before, before)
        owner = (torch.searchsorted(self.starts, positions, right=True) - 1).clamp_min(0)
        return Places(owner, positions - self.starts[owner], self.stops[owner] - positions)


@dataclass(frozen=True)
class PagedCache:
    """The KV cache of one server as kernels see it.

    Attributes:
        layer: float [slots, Hkv, d], any layer's keys: what all of them look like.
        k_ptrs: int64 [L], where each layer's keys are.
        req_to_token: int32 [rows, width], the page table.
        k_scales: float32 [L], what each layer's cached numbers are to be multiplied with; None: 1.
        k_layers, v_layers: every layer's keys and values, for policies that gather them; none in
            scratch memory.
        v_scales: as ``k_scales``, of values.
        v_ptrs: as ``k_ptrs``, of values; None where they are unknown or laid out otherwise.
    """

    layer: Tensor
    k_ptrs: Tensor
    req_to_token: Tensor
    k_scales: Tensor | None = None
    k_layers: Sequence[Tensor] = ()
    v_layers: Sequence[Tensor] = ()
    v_scales: Tensor | None = None
    v_ptrs: Tensor | None = None

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.k_ptrs.shape[0] * self.layer.shape[1]

    @classmethod
    def of(
        cls,
        layers: Sequence[Tensor],
        req_to_token: Tensor,
        k_scales: Sequence[float] | None = None,
        v_layers: Sequence[Tensor] = (),
        v_scales: Sequence[float] | None = None,
    ) -> PagedCache | None:
        """The cache whose layers have these keys; None where plain torch scores instead."""
        first = layers[0]
        if not (on_device.uses_triton(first.device) and on_device.kernels_read(first.shape[2])):
            return None
        k_ptrs, v_ptrs = (
            on_device.device_tensor([layer.data_ptr() for layer in part], first.device)
            for part in (layers, v_layers)
        )
        same_layout = [
            (v.shape, v.stride(), v.dtype) == (first.shape, first.stride(), first.dtype)
            for v in v_layers
        ]
        of_keys, of_values = (
            None if scales is None else on_device.device_tensor(scales, first.device, torch.float32)
            for scales in (k_scales, v_scales)
        )
        located = v_ptrs if same_layout and all(same_layout) else None
        return cls(first, k_ptrs, req_to_token, of_keys, layers, v_layers, of_values, located)

    def scratch(self) -> PagedCache:
        """A cache of one slot: kernels are compiled for it as for this one, in other memory."""
        slot, strides = self.layer[:1], self.layer.stride()  # strides are compiled in
        layer = torch.empty_strided(
            slot.shape, strides, dtype=slot.dtype, device=slot.device
        ).zero_()
        pointers = torch.full_like(self.k_ptrs, layer.data_ptr())
        return replace(
            self, layer=layer, k_ptrs=pointers, v_ptrs=pointers, k_layers=(), v_layers=()
        )


@dataclass(frozen=True)
class KeyLocation:
    """Where one request's keys and recent queries lie.

    Attributes:
        row: of the page table.
        ring: float [L, tracks, R, Hq, d], recent queries of every tracked request; None where the
            policy needs none.
        track_id: the request's own.
        last_position: logical position of the newest query.
    """

    cache: PagedCache
    row: int
    ring: Tensor | None
    track_id: int
    last_position: int


@dataclass(frozen=True)
class ScoreInput:
    """Everything a policy may look at: one request, at one compaction.

    With MLA there is one KV head, ``Hkv = 1``. A key is what is cached: the latent of r numbers and
    the rotary key behind it. A query is absorbed, ``W_UK q``, and its rotary part behind it, so
    their product is that of the ordinary query and key. A value is the latent. What compares keys
    compares latents with their rotary keys, what measures values measures latents.

    Attributes:
        positions: int64 [n], logical position of each cached token, ascending, prompt included.
        prompt_tokens: how many of the cached tokens are of the prompt.
        keep_tokens: how many of the cached tokens will stay.
        layers: number of attention layers.
        keys: layer -> float [n, Hkv, d], the cached rotated keys of that layer.
        queries: () -> float [layers, W, Hq, d], rotated queries of the last W tokens, newest
            first, as they are recorded when it is called; for policies with ``needs_queries``.
        values: layer -> float [n, Hkv, d], the cached values of that layer.
        reach: float32 [layers, Hkv of all ranks], how far the model's heads look
            (``head_reach.py``).
        scale: the model's factor on attention logits.
        sentences: None for policies that asked neither for them nor for their spans.
        input_sentences: numbers of those that users and tools wrote in later turns; none for
            policies that did not ask for spans.
        seed: the same for the same prompt and the same compaction, whatever the batch.
        logical_tokens: cached and evicted, so the position of the next query.
        centres: of the model's queries, and their rotation; None for policies that ask for neither.
        statistics: name -> [n], what the policy's ``track`` made of every decode step so far.
        location: where keys and queries lie; None where kernels cannot read them in place.
        importance, redundancy: what kernels found for this request already (``batched_scores.py``):
            float32 [n - W] and [n], the mean over layers and KV heads of ``window_attention`` and
            ``key_redundancy``. None: the policy computes them itself.
        ranks: all heads but this rank's are on the others.
    """

    positions: Tensor
    prompt_tokens: int
    keep_tokens: int
    layers: int
    keys: Callable[[int], Tensor]
    queries: Callable[[], Tensor]
    values: Callable[[int], Tensor]
    reach: Tensor
    scale: float
    sentences: Sentences | None
    seed: int
    logical_tokens: int
    input_sentences: Collection[int] = ()
    centres: QueryCentres | None = None
    statistics: Statistics = field(default_factory=dict)
    location: KeyLocation | None = None
    importance: Tensor | None = None
    redundancy: Tensor | None = None
    ranks: Ranks = ONE_RANK

    def mean_over_layers(self, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """float32, of what ``score`` makes of each layer's (queries, keys)."""
        queries = self.queries()
        parts = (score(queries[layer], self.keys(layer)) for layer in range(self.layers))
        return functools.reduce(torch.add, parts) / self.layers


class Steps(NamedTuple):
    """A few decode steps of one or several requests, whose n tokens follow each other.

    Attributes:
        attention: float32 [T, n], as ``attention_over`` says, 0 for tokens of later steps.
        steps: int64 [T, n], logical position of the query of each step of the token's request,
            ascending. Requests with fewer steps than T have -1 in the last rows, and attention is 0
            there.
        lengths: tokens of each request.
    """

    attention: Tensor
    steps: Tensor
    lengths: Sequence[int]


class Policy:
    """Base of all policies: its parameters, what it needs recorded during decoding, and its scores.

    A policy with ``needs_attention`` follows what each token received at every decode step. It says
    how a token's statistics begin (``initial_statistics``) and what a few steps do to them
    (``track``); the request's state holds them, so the policy itself still holds none.
    """

    name: ClassVar[str]
    #: what stays, and the paper: its row in README
    keeps: ClassVar[str]
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
    #: what ``track`` sees of the attention of all rows, one per layer and query head: their mean;
    #: the maximum over each KV head's query heads, then the mean; or the maximum over all rows
    attention_over: ClassVar[AttentionOver] = "mean"
    #: whether ``track`` sees the last ``window`` steps before each compaction, no others
    tracks_compactions: ClassVar[bool] = False
    #: how the scores of several ranks, each of which has seen some of the heads, become one. "max"
    #: also where the ranks' scores are equal; None: they depend on no head
    over_ranks: ClassVar[Literal["mean", "max"] | None] = "mean"
    #: whether ``track`` must see the attention of all ranks' heads
    tracks_all_heads: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    #: fields of ``ScoreInput`` that kernels fill before it scores, where those run: ``importance``,
    #: ``redundancy``
    kernel_scores: ClassVar[frozenset[str]] = frozenset()
    #: of how many layers it holds as many numbers as the keys have, where the cache is known and it
    #: gathers keys or values of all due requests, layer by layer
    joins_layers: ClassVar[int] = 0
    #: of how many tokens it holds a product with every other token, of each rank, where there are
    #: several
    block_tokens: ClassVar[int] = 0
    #: whether the open sentence is protected as well, up to half the budget
    protects_open_sentence: ClassVar[bool] = False

    def __init__(self, params: PolicyParams, model_window_tokens: int = 0) -> None:
        """model_window_tokens: the largest window of the model's layers; 0: they have none."""
        self.params, self.model_window_tokens = params, model_window_tokens

    @property
    def records_queries(self) -> bool:
        """Whether the last ``window`` queries are used: for scores, statistics or ``coverage``."""
        return self.needs_queries or self.tracks_compactions or self.params.coverage < 1

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

    def track(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
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
