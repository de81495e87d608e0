"""Right traces under a budget, without a server: which tokens the model would still write.

The right trace is given, and the plugin's own ``Runtime`` compacts its row as a server's would.
Between two compactions all tokens are computed in one forward pass over what is still cached. A
greedy answer equals the right trace exactly if every token of it is the most likely one here, so
one pass per interval says what a server needs one step per token for. ``tests/bench/
test_accuracy.py`` compares kept sets with those of a real server.

What it cannot say: whether an answer that deviates is right all the same, and anything sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from bench.lib.accuracy import wilson_columns
from bench.reasoner.check_families import FOLDER, choices, encode
from bench.reasoner.export import load_model
from bench.reasoner.families.base import Task
from bench.reasoner.model import Block, rope_table
from bench.reasoner.problems import heldout_problem, solution_text
from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.compactor import StepWork
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.head_reach import head_reach
from sgl_skipkv.policy.inputs.query_centres import MOST_TOKENS, TEXT, QueryCentres, Rotation
from sgl_skipkv.recording.recorder import ModelShape, Recorder
from sgl_skipkv.recording.sentences import Delimiters
from sgl_skipkv.request.settings import RequestSettings, resolve_request
from sgl_skipkv.request.state import RequestState

ROW = 1
#: of a trace with its prompt, at most
_POSITIONS = 8192
#: the two bundled models
FAMILIES_MODEL, REASONER_MODEL = FOLDER, FOLDER.with_name("reasoner")


@dataclass(frozen=True)
class Forced:
    """What became of one trace.

    Attributes:
        wrong: positions of trace tokens that the model would not have written.
        most_likely: the model's choice for each position but the first.
        nats: -ln of the probability of each token but the first.
        compaction_s: seconds in ``Compactor.compact``.
        kept: logical positions in the row after each compaction.
        mean_kv_tokens: that the request held of its own, over all steps.
    """

    wrong: list[int]
    most_likely: list[int]
    nats: list[float]
    kept: list[list[int]]
    mean_kv_tokens: float
    compaction_s: float


class ForcedModel:
    """A model of Llama's architecture and one request at a time.

    Args:
        folder: a bundled one, or what ``bench.public.model`` writes.
    """

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        shape = self.model.shape
        self.shape = ModelShape(shape.layers, shape.query_heads, shape.head_dim, shape.hidden)
        texts = ((i, self.tokenizer.decode([i])) for i in range(shape.vocab))
        self.delimiters = Delimiters(texts, shape.vocab)
        self.cos, self.sin = rope_table(shape, _POSITIONS, torch.device("cpu"))

    @cached_property
    def measured(self) -> tuple[QueryCentres, Tensor]:
        """Centres of the queries and reach of the heads, as a server measures them at start."""
        ids = self.tokenizer.encode(TEXT.read_text()).ids[:MOST_TOKENS]
        shape, (cos, sin) = self.model.shape, (each[: len(ids)] for each in (self.cos, self.sin))
        x, queries, reach = self.model.embed(torch.tensor(ids)[None]), [], []
        for block in self.model.blocks:
            assert isinstance(block, Block)
            q, k, v = block.project(x, cos, sin)
            queries.append(q[0].transpose(0, 1))
            reach.append(head_reach(queries[-1], k[0].transpose(0, 1), shape.head_dim**-0.5))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = block.finish(x, attended)
        index = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
        frequencies = shape.rope_theta ** (-index / shape.head_dim)
        rotation = Rotation.of(frequencies, shape.head_dim)
        return QueryCentres.measured(rotation, queries), torch.stack(reach)

    def missed(self, ids: list[int], wrong: Iterable[int]) -> int:
        """How many tokens at these positions it writes rightly with a full cache."""
        full = choices(self.model, ids)
        return sum(int(full[position - 1]) == ids[position] for position in wrong)

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        prompt_tokens: int,
        keys: Mapping[str, Any],
        *,
        policy: Policy | None = None,
    ) -> Forced:
        """The trace under these keys of a request; the end of the turn is its last token.

        Args:
            policy: in place of the one that the keys name.
        """
        config = ServerConfig(retraction_backup_bytes=0, max_tracked_requests=1)
        settings = resolve_request(dict(keys), config)
        assert settings is not None, "keys of a request that evicts"
        if policy is not None:
            settings = replace(settings, policy=policy)
        return _Run(self, config, ids, prompt_tokens, settings).result()


@cache
def forced_model(folder: Path) -> ForcedModel:
    """One of each model in a process, on one thread: others run beside it."""
    torch.set_num_threads(1)
    return ForcedModel(folder)


def reasoner_task(level: str, index: int) -> Task:
    """A held-out problem of ``examples/reasoner`` and its right trace."""
    problem = heldout_problem(level, index)
    return Task("reasoner", None, problem.prompt, solution_text(problem), problem.answer)


def reasoner_trace(model: ForcedModel, level: str, index: int) -> tuple[list[int], int]:
    """Its ids, and where the trace starts."""
    return encode(model.tokenizer, reasoner_task(level, index))


def outcome(right: int, wrong_tokens: int, traces: int) -> dict[str, float]:
    """Columns of a row: right traces with their Wilson interval, wrong tokens of a trace."""
    share, wrong = wilson_columns(right, traces), round(wrong_tokens / traces, 2)
    return {"right": right, **share, "wrong_tokens": wrong}


class _Run:
    def __init__(
        self,
        forced: ForcedModel,
        config: ServerConfig,
        ids: Sequence[int],
        prompt_tokens: int,
        settings: RequestSettings,
    ) -> None:
        self.forced, self.ids, self.prompt_tokens = forced, list(ids), prompt_tokens
        shape, cpu = forced.model.shape, torch.device("cpu")
        size = (shape.layers, len(ids) + 1, shape.kv_heads, shape.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.req_to_token = torch.zeros(ROW + 1, len(ids) + 1, dtype=torch.int32)
        self.recorder = Recorder(
            forced.shape,
            track_count=1,
            query_window=config.query_window,
            max_sentences=config.max_sentences,
            delimiters=forced.delimiters,
            dtype=torch.float32,
            device=cpu,
        )
        self.recorder.use_rows(ROW + 1)
        self.runtime = Runtime(
            config,
            recorder=self.recorder,
            scale=shape.head_dim**-0.5,
            pool_tokens=10**9,
            kv_token_bytes=0,
            centres=forced.measured[0],
            reach=forced.measured[1],
        )
        self.state: RequestState = self.runtime.open("trace", settings, ids[:prompt_tokens])
        self.runtime.admit(self.state, ROW, prompt_tokens)
        self.runtime.start_recording(self.state)
        self.row_tokens = self.kv_steps = 0
        self.kept: list[list[int]] = []
        self.most_likely: list[int] = []
        self.nats: list[float] = []
        self.compaction_s = 0.0

    def result(self) -> Forced:
        self._forward(self.prompt_tokens)
        last = len(self.ids) - 1  # nothing follows the last token
        while self.logical_tokens < last:
            self._before_step()
            start = self.row_tokens
            steps = 1
            while self.logical_tokens + steps < last and not any(self._work(start + steps)):
                steps += 1
            self.kv_steps += sum(range(start + 1, start + steps + 1)) - steps * self.prompt_tokens
            self._forward(steps)
        choices = zip(self.most_likely, self.ids[1:], strict=True)
        differ = [position for position, pair in enumerate(choices, start=1) if pair[0] != pair[1]]
        return Forced(
            [position for position in differ if position >= self.prompt_tokens],
            *(self.most_likely, self.nats, self.kept),
            mean_kv_tokens=self.kv_steps / (last - self.prompt_tokens),
            compaction_s=self.compaction_s,
        )

    @property
    def logical_tokens(self) -> int:
        return self.row_tokens + self.state.kv.evicted_tokens

    def _work(self, row_tokens: int) -> StepWork:
        """What happens before the decode step of a row of this length."""
        return self.runtime.compactor.work_before_step({self.state: row_tokens})

    def _before_step(self) -> None:
        work, state = self._work(self.row_tokens), self.state
        start = time.perf_counter()
        done = self.runtime.compactor.before_step(work, lambda _: self._due(), self.req_to_token)
        assert state.failure is None, state.failure
        for compaction in done:
            self.compaction_s += time.perf_counter() - start
            (plan,) = compaction.plans
            self.row_tokens -= plan.evicted_tokens
            assert state.kv.last is not None
            self.kept.append(state.kv.last.positions.tolist())

    def _due(self) -> Due:
        rows = self.req_to_token[ROW, : self.row_tokens].long()
        output = self.ids[self.prompt_tokens :]
        keys, values = (lambda layer, of=of: of[layer][rows] for of in (self.keys, self.values))
        return Due(self.state, self.row_tokens, output, keys, values)

    def _forward(self, count: int) -> None:
        """The next tokens in one pass; what each of them would have been followed by."""
        first = self.logical_tokens
        stop, n = first + count, self.row_tokens + count
        # Every token has a slot of its own: position + 1.
        self.req_to_token[ROW, self.row_tokens : n] = torch.arange(first + 1, stop + 1)
        rows = self.req_to_token[ROW, :n].long()
        ids, positions = torch.tensor(self.ids[first:stop]), torch.arange(first, stop)
        visible = torch.arange(n) <= torch.arange(n - count, n)[:, None]
        cos, sin = self.forced.cos[first:stop], self.forced.sin[first:stop]
        model, tracked = self.forced.model, bool(self.state.held.track_id)
        recording = self.recorder.decode_recording(torch.full((count,), ROW), positions)
        x = model.embed(ids[None])
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            q, k, v = block.project(x, cos, sin)
            self.keys[layer, rows[-count:]] = k[0].transpose(0, 1)
            self.values[layer, rows[-count:]] = v[0].transpose(0, 1)
            if tracked:
                self._record(recording, layer, q[0].transpose(0, 1))
            cached = (data[layer][rows].transpose(0, 1)[None] for data in (self.keys, self.values))
            groups = block.shape.query_heads // block.shape.kv_heads
            keys, values = (part.repeat_interleave(groups, dim=1) for part in cached)
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
            x = block.finish(x, attended)
        hidden = model.norm_out(x)[0]
        if tracked and self.state.settings.policy.needs_sentences and first >= self.prompt_tokens:
            for i in range(count):  # one token per row and step
                self.recorder.sentences.step(
                    recording.tracks[:1], ids[i : i + 1], hidden[i : i + 1]
                )
        logits, following = F.linear(hidden, model.embed.weight), self.ids[first + 1 : stop + 1]
        self.most_likely += logits.argmax(-1).tolist()
        self.nats += F.cross_entropy(logits, torch.tensor(following), reduction="none").tolist()
        self.row_tokens = n

    def _record(self, recording: Any, layer: int, q: Tensor) -> None:
        """The last queries of the pass, as many as a ring has."""
        window = self.recorder.queries.entries
        tracks, positions = recording.tracks[-window:], recording.positions[-window:]
        self.recorder.queries.write(layer, tracks, positions, q[-window:])
