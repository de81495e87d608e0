"""The plugin's own runtime for a batch of made-up requests that have been generating for a
while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.decode.model import DecodeModel, KVPool, Size
from sgl_skipkv.cli import report_estimates
from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.compactor import StepWork
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.eviction.warm_up import warm_up
from sgl_skipkv.policy.inputs.paged_cache import PagedCache
from sgl_skipkv.policy.inputs.query_centres import QueryCentres, Rotation
from sgl_skipkv.recording.recorder import ModelShape, Recorder
from sgl_skipkv.recording.sentences import Delimiters
from sgl_skipkv.request.settings import resolve_request
from sgl_skipkv.request.state import RequestState

SENTENCE_TOKENS = 20  # mean; one token id in so many closes a sentence
#: page table, free slots, positions and the attention's list of slots, per cached token
BOOKKEEPING_BYTES = 48


@dataclass(frozen=True)
class RequestShape:
    """What every request of a batch is like.

    Attributes:
        kv_budget: None for a full cache.
        generated_tokens: by the end of a request.
    """

    kv_budget: int | None
    generated_tokens: int
    prompt_tokens: int
    interval: int
    policy: str

    @property
    def peak_tokens(self) -> int:
        """Most that a row ever holds, and the slot of the next token."""
        own = self.generated_tokens
        if self.kv_budget is not None:
            own = min(own, self.kv_budget + self.interval)
        return self.prompt_tokens + own + 1

    def budgeted_tokens(self, generated: int) -> int:
        """Cached tokens of its own, of a request that has generated this many."""
        if self.kv_budget is None or generated <= self.kv_budget + self.interval:
            return generated
        return self.kv_budget + 1 + (generated - self.kv_budget - 1) % self.interval


def recorded_bytes(size: Size, shape: RequestShape, dtype: torch.dtype) -> int:
    """What the plugin holds for one request more."""
    config = {
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads.query,
        "num_key_value_heads": size.heads.kv,
        "head_dim": size.heads.dim,
        "hidden_size": size.hidden_size,
    }
    if shape.kv_budget is None:
        return 0
    settings = ServerConfig()
    of_two, of_one = (
        sum(report_estimates.recorded_bytes(config, n, settings, dtype.itemsize).values())
        for n in (2, 1)
    )
    return of_two - of_one


def largest_batch(memory_bytes: int, shape: RequestShape, size: Size, dtype: torch.dtype) -> int:
    """Requests whose KV and records fit.

    Raises:
        ValueError: not even one.
    """
    token_bytes = size.kv_bytes_per_token(dtype) + BOOKKEEPING_BYTES
    request_bytes = shape.peak_tokens * token_bytes
    request_bytes += recorded_bytes(size, shape, dtype)
    if memory_bytes < request_bytes:
        raise ValueError(f"memory: expected {request_bytes} bytes or more, got {memory_bytes}")
    return memory_bytes // request_bytes


def _random_centres(size: Size, device: torch.device) -> QueryCentres:
    """Of queries as random as the keys."""
    heads, bands = size.heads, size.heads.dim // 2
    queries = torch.randn(size.layers, 16, heads.query, heads.dim, device=device)
    frequencies = 10000.0 ** (-torch.arange(bands) / bands)
    return QueryCentres.measured(Rotation.of(frequencies, heads.dim), queries)


class Compactor:
    """Runtime, recorder and the states of a batch of budgeted requests; row b belongs to request b.

    Args:
        pool, req_to_token: as the decode loop has them.
    """

    def __init__(
        self,
        model: DecodeModel,
        shape: RequestShape,
        batch: int,
        pool: KVPool,
        req_to_token: Tensor,
    ) -> None:
        size, heads = model.size, model.size.heads
        self.shape, self.pool, self.req_to_token = shape, pool, req_to_token
        self.vocabulary = size.vocabulary
        config = ServerConfig(kv_interval=shape.interval, max_tracked_requests=batch)
        keys = {"kv_budget": shape.kv_budget, "kv_policy": shape.policy}
        settings = resolve_request(keys, config)
        assert settings is not None
        self.settings = settings
        texts = ((token, ".\n") for token in range(0, size.vocabulary, SENTENCE_TOKENS))
        self.recorder = Recorder(
            ModelShape(size.layers, heads.query, heads.dim, size.hidden_size),
            track_count=batch,
            query_window=config.query_window,
            max_sentences=config.max_sentences,
            delimiters=Delimiters(texts, size.vocabulary),
            dtype=model.dtype,
            device=model.device,
        )
        self.recorder.use_rows(batch)
        self.recorder.reserve()
        self.recorder.queries.data.normal_()
        self.recorder.sentences.vectors.normal_()
        self.runtime = Runtime(
            config,
            recorder=self.recorder,
            scale=heads.dim**-0.5,
            pool_tokens=batch * shape.peak_tokens,
            kv_token_bytes=0,  # nobody is retracted here
            centres=_random_centres(size, model.device),
            reach=torch.rand(size.layers, heads.kv, device=model.device),
        )
        self.states: list[RequestState] = []
        self.output_ids: list[list[int]] = []
        self.cache = PagedCache.of(pool.k, req_to_token, v_layers=pool.v)
        if self.cache is not None:  # as a server does before it is ready
            windows, width = {settings.policy.params.window}, req_to_token.shape[1]
            warm_up(self.recorder, self.cache, windows, width=width)

    def open(self, generated: int) -> list[int]:
        """New requests that have generated this many tokens already.

        Returns:
            what each of them holds of its own, in tokens.
        """
        owned = []
        for b in range(len(self.req_to_token)):
            prompt = [b] * self.shape.prompt_tokens
            state = self.runtime.open(str(b), self.settings, prompt)
            own = self.shape.budgeted_tokens(generated)
            ids = torch.randint(self.vocabulary, (own,)).tolist()
            state.sentences.feed(ids)
            self.runtime.admit(state, b, len(prompt) + own)
            self.runtime.start_recording(state)
            self.states.append(state)
            self.output_ids.append(ids)
            owned.append(own)
        return owned

    def close(self, row_tokens: Sequence[int]) -> None:
        """All requests end.

        Raises:
            RuntimeError: one of them could not be compacted.
        """
        for state, tokens, ids in zip(self.states, row_tokens, self.output_ids, strict=True):
            self.runtime.close(state, tokens, ids, None)
            if state.failure is not None:
                raise RuntimeError(f"request {state.rid}: {state.failure}")
        self.states, self.output_ids = [], []

    def observe(self, row_tokens: Sequence[int], new_ids: Sequence[int]) -> StepWork:
        """Before a step: note the tokens of the last one, and what is done first."""
        for state, tokens in zip(self.states, row_tokens, strict=True):
            self.runtime.observe(state, tokens)
        for ids, token in zip(self.output_ids, new_ids, strict=False):
            ids.append(token)
        lengths = dict(zip(self.states, row_tokens, strict=True))
        return self.runtime.compactor.work_before_step(lengths)

    def before_step(self, work: StepWork, row_tokens: list[int]) -> Tensor:
        """Do it: rows are rewritten, and ``row_tokens`` shortened.

        Returns:
            int64 [freed], slots that nobody refers to any more.
        """
        freed = [torch.empty(0, dtype=torch.int64, device=self.req_to_token.device)]

        def due_of(state: RequestState) -> Due:
            b = state.held.row
            return Due(
                *(state, row_tokens[b], self.output_ids[b]),
                *(partial(self._cached, of, b, row_tokens[b]) for of in (self.pool.k, self.pool.v)),
                self.cache,
            )

        for done in self.runtime.compactor.before_step(work, due_of, self.req_to_token):
            freed += done.freed
            for plan in done.plans:
                row_tokens[plan.state.held.row] -= plan.evicted_tokens
        return torch.cat(freed)

    def _cached(self, layers: Sequence[Tensor], b: int, tokens: int, layer: int) -> Tensor:
        return layers[layer][self.req_to_token[b, :tokens].long()]
