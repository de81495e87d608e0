"""The score oracle: which tokens a policy had to keep, from a Hugging Face forward in float64.

The masking oracle takes kept sets as given; this one checks them. Queries, keys and final hidden
states come from a forward under the trace's own masks, the formulas are spelled out in float64, and
nothing of the package's recording or scoring is used.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from budgets import budget_at, least_budget
from oracle import WITH_STATES, Event, attention_masks, has_windows, visible_keys
from score_formulas import attention_rows, by_quotas, carried, distinct, drawn, scores_of
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from sgl_skipkv.policy.inputs.query_centres import TEXT

Span = tuple[int, int]
FULL = "full_attention"
AHEAD_TOKENS = 4  # decode steps from a measurement to the compaction that reads it
DEMAND_TOLERANCE = 1e-5  # of attention, float32 against float64
#: policies whose formula is spelled out here
SPELLED_OUT = ("skipkv", "skipkv+", "rkv", "snapkv", "tova", "h2o", "raas", "lazy", "rpc")
SPELLED_OUT += ("distinct", "gkv", "crystal", "keydiff", "vase", "triattention", "expected")
#: whose kept sets need no oracle: positions, a draw, and none
NOT_SCORED = ("streaming", "random", "full")


def score_tolerance(policy: str) -> float:
    """Of scores around 1e-3, float32 against float64; more of sums over many steps, and of larger
    scores."""
    larger = ("distinct", "h2o", "lazy", "gkv", "crystal", "vase", "triattention", "expected")
    return 2e-5 if policy in larger else 2e-6


@dataclass(frozen=True)
class Choice:
    """One compaction as the oracle sees it.

    Attributes:
        scores: float64 [n], of each token in the row; protected ones infinite.
        kept: bool [n], what the trace says stayed.
    """

    scores: Tensor
    kept: Tensor

    @property
    def inversion(self) -> float:
        """How far the best evicted token's score lies above the worst kept one's; <= 0 is right."""
        return float(self.scores[~self.kept].max() - self.scores[self.kept].min())


class ScoreOracle:
    """One model in float64 that remembers what its attention saw.

    Args:
        cached: what keys and values are rounded to before anything is computed with them.
    """

    def __init__(self, model_path: Path | str, cached: torch.dtype = torch.float64) -> None:
        AttentionInterface.register("score_oracle", _attend)
        self.cached, self.path = cached, model_path
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=torch.float64,
            attn_implementation="score_oracle",
            experts_implementation="eager",  # the other forms have no float64
        ).eval()

    def choices(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        events: Sequence[Event],
        is_delimiter: Sequence[bool],
        policy: Any,
        *,
        kv_budget: int | None = None,
        earlier: Sequence[Event] = (),
        turns: Sequence[int] = (),
        uncounted: Sequence[Span] = (),
        prompts: Sequence[Sequence[int]] = (),
    ) -> list[Choice]:
        """Score the row of every compaction of a request that was never recomputed.

        A conversation whose history counts against the budget is one such request: its prompt is
        that of the first turn, its output everything behind it.

        Args:
            prompt_ids, output_ids: the request's tokens.
            events: its ``compact`` lines.
            is_delimiter: of every output token.
            policy: a scored policy of the package; only its settings are read.
            kv_budget: the request's, from which it follows how many are kept; None: as many as the
                trace says.
            earlier: compactions of the prompt.
            turns: positions at which a later turn begins, and with it a sentence.
            uncounted: positions whose queries came in a prefill.
            prompts: of every turn, as it was sent, from which a draw depends; none: ``prompt_ids``.
        """
        prompt, params = len(prompt_ids), policy.params
        fed = torch.tensor([*prompt_ids, *output_ids[:-1]])
        visible = visible_keys(prompt, len(fed), [*earlier, *events])
        queries, keys, values, hidden = self._forward(fed, visible)
        # What a step attended to is computed again later, over what is kept by then, although it
        # saw more where it ran when a compaction came (speculative decoding).
        replayed = [{**event, "running": 0} for event in events]
        seen_again = visible_keys(prompt, len(fed), [*earlier, *replayed])
        rows = attention_rows(queries, keys, seen_again)
        for start, stop in uncounted:
            rows[:, :, start:stop] = 0.0
        attended: dict[int, float] = {}  # by position, of gkv
        redundancy: dict[int, float] = {}  # by the first token of the sentence
        credit: dict[int, float] = {}  # by position, of quotas
        found: list[Choice] = []
        row = [*earlier[-1]["kept"]] if earlier else []
        for number, event in enumerate(events, start=1):
            first_new = row[-1] + 1 if row else 0
            row += range(first_new, prompt + event["generated"])
            positions, held = torch.tensor(row), sum(position < prompt for position in row)
            budget = event["after"] - held
            if kv_budget is not None:
                most = budget_at(policy, kv_budget, number, event["generated"])
                measured = _measured_at(policy, prompt, row[-1] + 1, first_new)
                if params.coverage < 1 and measured is not None:
                    seen = positions[positions < measured]
                    recent = range(measured - params.window, measured)
                    received = _received(queries[:, recent], keys[:, seen])[held:]
                    newer = row[-1] + 1 - measured
                    _check_demand(received, policy, budget - newer, most - newer)
                else:
                    assert budget == most, "another budget"
            window = range(row[-1] + 1 - params.window, row[-1] + 1)
            steps, row_keys = rows[:, :, prompt : row[-1] + 1, positions], keys[:, positions]
            # Of the last queries, not further back than the turn's first own one.
            fed_in = [stop for _, stop in uncounted if stop <= row[-1]]
            since = max([prompt, window[0], *fed_in]) - prompt
            pinned = max(params.window, self.window_tokens)
            if policy.name == "gkv":
                scores = carried(params, row, steps[:, :, since:], row_keys, attended)
            elif policy.name == "triattention":
                first = max(held, params.sink)
                free = positions[first : len(row) - pinned]
                scores = self._looked_for(free, keys[:, free], row[-1] + 1)
                scores = F.pad(scores, (first, pinned))
            elif policy.name == "expected":
                first = max(held, params.sink)
                free = positions[first : len(row) - pinned]
                asked_at = torch.tensor([*window])
                scores = self._expected(
                    params.horizon, asked_at, queries[:, window], keys[:, free], values[:, free]
                )
                scores = F.pad(scores, (first, pinned))
            elif policy.name == "distinct":
                first = max(held, params.sink)
                scores = distinct(params.power, first, values[:, positions], self.reach)
            elif policy.name == "vase":
                asked = prompts[sum(turn <= row[-1] for turn in turns)] if prompts else prompt_ids
                seed = f"{zlib.crc32(array('q', asked).tobytes())}:{number - 1}".encode()
                at = max(held, params.sink), pinned, event["after"], zlib.crc32(seed)
                scores = drawn(params, *at, queries[:, window], row_keys, values[:, positions])
            else:
                scores = scores_of(
                    policy.name, params, prompt, held, row, queries[:, window], row_keys, steps
                )
            tail = pinned
            if policy.name == "h2o":
                tail = max(tail, budget // 2)
            if policy.name == "distinct":
                recent = max(64, budget // 3) if params.recent is None else params.recent
                tail = max(tail, min(recent, int(0.6 * budget)))
            if policy.name == "distinct":
                spans = _sentences(is_delimiter[: event["generated"]], prompt, turns)
                live = [span for span in spans if not set(row).isdisjoint(range(*span))]
                unplaced = scores.clone()
                for start, stop in live:
                    for back in range(1, params.ending + 1):
                        at = (positions == stop - 1 - back) & (positions >= start)
                        scores[at] *= 1 + (params.ending + 1 - back) / params.ending
                on_top = params.protect_prompt or not params.count_prompt
                room = event["after"] - (held if on_top else 0)
                texts = zip(turns, uncounted[: len(turns)], strict=True)
                given = [range(turn, text_stop) for turn, (_, text_stop) in texts]
                for start, stop in live[: -max(1, min(24, room // 8))]:
                    if any(start in text for text in given):
                        continue
                    opening = (positions >= start) & (
                        positions < min(start + params.beginning, stop)
                    )
                    scores[opening] = unplaced[opening] * 2.0**-20
            if policy.name in ("skipkv", "skipkv+"):
                spans = _sentences(is_delimiter[: event["generated"]], prompt, turns)
                live = [span for span in spans if not set(row).isdisjoint(range(*span))]
                _compare(live, hidden, redundancy)
                for start, stop in live:
                    likeness = redundancy.get(start, -1.0)
                    if likeness > params.tau and stop - start > 1:
                        scores[(positions >= start) & (positions < stop)] -= likeness
                if policy.name == "skipkv+":
                    tail = max(tail, min(params.recent, budget // 2))
                    for start, stop in live:
                        for back in range(1, params.ending + 1):  # tokens before the delimiter
                            if stop - 1 - back >= start:
                                scores[positions == stop - 1 - back] += params.ending + 1 - back
                begun = [turn for turn in turns if turn <= row[-1]]
                opened = row[-1] + 1 - max([prompt, *begun, *(stop for _, stop in spans)])
                tail = max(tail, min(opened, budget // 2))
            kept = torch.isin(positions, torch.tensor(event["kept"]))
            if params.quotas:
                recent = steps[:, :, since:].mean(dim=(0, 1, 2))
                for position, value in zip(row, recent.tolist(), strict=True):
                    credit[position] = 0.8 * credit.get(position, 0.0) + 0.2 * value
                free = slice(max(held, params.sink), len(row) - pinned)
                both = recent[free], torch.tensor([credit[one] for one in row[free]])
                share = sum(part * of / of.sum() for part, of in zip((0.7, 0.3), both, strict=True))
                own = scores[free] + score_tolerance(policy.name) * kept[free]
                spans = _sentences(is_delimiter[: event["generated"]], prompt, turns)
                scores[free] = by_quotas(own, kept[free], row[free], spans, share)
            scores[: max(held, params.sink)] = torch.inf
            scores[-tail:] = torch.inf
            found.append(Choice(scores, kept))
            row = list(event["kept"])
        return found

    @cached_property
    def _of_text(self) -> tuple[Tensor, Tensor]:
        """Queries and keys of the package's text, [L, T, heads, d]."""
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        # Transformers' own class for a model type may tokenize otherwise.
        text = get_tokenizer(str(self.path)).encode(TEXT.read_text())[:1024]
        visible = torch.ones(len(text), len(text), dtype=torch.bool).tril()
        queries, keys, *_ = self._forward(torch.tensor(text), visible)
        return queries, keys

    @cached_property
    def centres(self) -> tuple[Tensor, Tensor]:
        """Of the un-rotated queries of the package's text: complex128 and float64 [L, Hq, F]."""
        queries, _ = self._of_text
        asked = self._unrotated(queries, torch.arange(queries.shape[1]))
        return asked.mean(dim=1), asked.abs().mean(dim=1)

    @cached_property
    def reach(self) -> Tensor:
        """[L, Hkv]: the most attention to one far token of the text, mean over queries."""
        queries, keys = self._of_text
        causal = torch.ones(queries.shape[1], queries.shape[1], dtype=torch.bool).tril()
        looks = attention_rows(queries, keys, causal, self.sinks)[:, :, 64:]
        looks[..., :4] = 0.0
        for i, query in enumerate(range(64, queries.shape[1])):
            looks[:, :, i, query - 8 :] = 0.0
        return looks.amax(dim=3).mean(dim=2).unflatten(1, (keys.shape[2], -1)).mean(dim=2)

    @property
    def sinks(self) -> Tensor | None:
        """float64 [L, Hq], of the layers that score; None: the model has none."""
        attention = [getattr(layer, "self_attn", None) for layer in self.model.model.layers]
        found = [getattr(one, "sinks", None) for one in attention]
        kinds = getattr(self.model.config, "layer_types", None) or [FULL] * len(found)
        if None in found:
            return None
        scored = [one for one, kind in zip(found, kinds, strict=True) if kind == FULL]
        return torch.stack(scored).detach()

    @property
    def frequencies(self) -> Tensor:
        rotary = self.model.model.rotary_emb
        each_kind = getattr(rotary, "full_attention_inv_freq", None)
        found: Tensor = (rotary.inv_freq if each_kind is None else each_kind).double()
        return found

    @property
    def window_tokens(self) -> int:
        """As config.json has it; 0: no layer has a window."""
        config = self.model.config
        return int(config.sliding_window) if has_windows(config) else 0

    def _unrotated(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """complex128 [L, T, heads, F], of [L, T, heads, d]."""
        turned = torch.complex(*vectors.chunk(2, dim=3))
        angles = positions[:, None] * self.frequencies
        return turned * torch.polar(torch.ones_like(angles), -angles)[:, None]

    def _looked_for(self, positions: Tensor, keys: Tensor, now: int) -> Tensor:
        """TriAttention: best z-score of any layer and query head.

        Args:
            keys: [L, n, Hkv, d] at these positions. now: the position of the next query.
        """
        centre, size = self.centres
        groups = centre.shape[1] // keys.shape[2]
        k = self._unrotated(keys, positions).repeat_interleave(groups, dim=2)
        rows = ((size - centre.abs())[:, None] * k.abs()).sum(dim=3)
        phase = (centre[:, None] * k.conj()).angle()
        for power in range(17):
            wave = ((now + 2**power - positions)[:, None] * self.frequencies)[:, None] + phase
            rows += (centre.abs()[:, None] * k.abs() * wave.cos()).sum(dim=3) / 17
        rows -= rows.mean(dim=1, keepdim=True)
        return (rows / rows.square().mean(dim=1, keepdim=True).sqrt()).amax(dim=(0, 2))

    def _expected(
        self, horizon: int, asked_at: Tensor, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Expected Attention: of a Gaussian with the queries' mean and covariance, turned ahead.

        Args:
            queries: [L, W, Hq, d] at ``asked_at``. keys, values: [L, n, Hkv, d].
        """
        (layers, _, heads, size), now = queries.shape, int(asked_at[-1]) + 1
        angles = torch.arange(now, now + horizon)[:, None] * self.frequencies
        ahead = torch.polar(torch.ones_like(angles), angles).mean(dim=0)
        turned = self._unrotated(queries, asked_at) * ahead
        found = torch.zeros(keys.shape[1], dtype=torch.float64)
        for layer, head in itertools.product(range(layers), range(heads)):
            of_head = torch.cat([turned[layer, :, head].real, turned[layer, :, head].imag], dim=1)
            mean, covariance = of_head.mean(dim=0), of_head.T.cov(correction=0)
            group = head * keys.shape[2] // heads
            k = keys[layer, :, group]
            logits = k @ mean / size**0.5 + ((k @ covariance) * k).sum(dim=1) / (2 * size)
            found += logits.softmax(dim=0) * values[layer, :, group].norm(dim=1)
        return found / (layers * heads)

    def _forward(self, ids: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated queries [L, T, Hq, d] and keys [L, T, Hkv, d], values, hidden states [T, D]; of
        the layers without a window, which alone score."""
        mask = attention_masks(self.model.config, visible)
        _SEEN.clear()
        with torch.no_grad():
            hidden = self.model.model(
                input_ids=ids[None],
                attention_mask=mask,
                position_ids=torch.arange(len(ids))[None],
                cached=self.cached,
            ).last_hidden_state[0]
        kinds = getattr(self.model.config, "layer_types", None) or [FULL] * len(_SEEN)
        kinds = [kind for kind in kinds if kind not in WITH_STATES]  # these attend to nothing
        scored = [one for one, kind in zip(_SEEN, kinds, strict=True) if kind == FULL]
        queries, keys, values = map(torch.stack, zip(*scored, strict=True))
        return queries, keys, values, hidden


_SEEN: list[tuple[Tensor, Tensor, Tensor]] = []


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scaling: float,
    cached: torch.dtype,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain attention that remembers what it was given: q [1, Hq, T, d], k and v [1, Hkv, T, d]."""
    k, v = (each.float().to(cached).double() if cached.itemsize == 1 else each for each in (k, v))
    _SEEN.append((q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = q @ k.transpose(2, 3) * scaling + mask
    if s_aux is not None:  # one more logit, without a value
        logits = torch.cat([logits, s_aux[:, None, None].expand(-1, q.shape[2], 1)[None]], dim=3)
    weights = logits.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous(), None


def _measured_at(policy: Any, prompt: int, now: int, compacted_at: int) -> int | None:
    """When the demand was measured that a compaction reads: four steps before ``interval`` tokens
    were there since the last one, or a multiple of that later; None: no demand was there yet."""
    params = policy.params
    first = max(prompt + least_budget(policy), compacted_at) + params.interval - AHEAD_TOKENS
    times = range(first, now - AHEAD_TOKENS + 1, params.interval)
    return times[-1] if times else None


def _received(queries: Tensor, keys: Tensor) -> Tensor:
    """What each token of a row received from its last queries, mean over heads and layers: [n]."""
    window, n = queries.shape[1], keys.shape[1]
    visible = torch.ones(window, n, dtype=torch.bool).tril(n - window)
    return attention_rows(queries, keys, visible).mean(dim=(0, 1)).sum(dim=0)


def _check_demand(received: Tensor, policy: Any, budget: int, most: int) -> None:
    """As many are kept as reach the coverage, at least the least budget, at most ``most``."""
    reached = F.pad(received.sort(descending=True).values.cumsum(dim=0), (1, 0))
    wanted = policy.params.coverage * float(reached[-1])
    least = least_budget(policy) - AHEAD_TOKENS
    assert min(least, most) <= budget <= most, "another budget"
    assert budget == most or reached[budget] > wanted - DEMAND_TOLERANCE, "too few"
    assert budget <= least or reached[budget - 1] < wanted + DEMAND_TOLERANCE, "too many"


def _sentences(is_delimiter: Sequence[bool], offset: int, turns: Sequence[int]) -> list[Span]:
    """Closed sentences of one turn: up to a delimiter, with the delimiters that follow at once."""
    spans: list[Span] = []
    start = 0
    for place, closes in enumerate(is_delimiter):
        begins = offset + place in turns
        start = place if begins else start
        if closes:
            if spans and spans[-1][1] == offset + place and not begins:
                spans[-1] = (spans[-1][0], offset + place + 1)
            else:
                spans.append((offset + start, offset + place + 1))
            start = place + 1
    return spans


def _compare(live: Sequence[Span], hidden: Tensor, redundancy: dict[int, float]) -> None:
    """Raise each sentence's redundancy to its best cosine with a later live one."""
    means = [hidden[start:stop].mean(dim=0) for start, stop in live]
    for i, (start, _) in enumerate(live):
        for later in means[i + 1 :]:
            likeness = float(F.cosine_similarity(means[i], later, dim=0))
            redundancy[start] = max(redundancy.get(start, -1.0), likeness)
