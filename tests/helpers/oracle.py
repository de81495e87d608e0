"""The masking oracle: a Hugging Face forward that hides exactly what the trace says was evicted.

An evicted token is gone for every later query, and its own KV was computed before it went. Both are
one attention mask: query p sees key j if j <= p and j was in the row when p was fed. A
recomputation starts over: all tokens up to there see each other causally again, and only then come
new evictions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Event = dict[str, Any]
#: kinds of layers with a state instead of KV
WITH_STATES = frozenset(("conv", "linear_attention"))
#: how far below the best logit a greedy choice may lie: float32 rounding between two kernels
ARGMAX_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """What the oracle says about one request.

    Attributes:
        wrong: generated positions whose token is not the argmax.
        logprobs: float32 [generated], log-probability of each generated token.
    """

    wrong: list[int]
    logprobs: Tensor


@dataclass(frozen=True)
class Addition:
    """``factors[t] * vector`` on the output of ``layer`` at the t-th generated token."""

    layer: int
    vector: Tensor
    factors: Sequence[float]


class MaskingOracle:
    """One model's reference forward on the CPU, in float32 where nothing else is said."""

    loader: Any = AutoModelForCausalLM

    def __init__(self, model_path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        self.model = self.loader.from_pretrained(
            model_path, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.config = self.model.config.get_text_config()

    def forward(self, ids: Tensor, mask: Any) -> Tensor:
        """float [n, V], logits behind each of the tokens under ``attention_masks``."""
        position = torch.arange(len(ids))[None]
        out = self.model(input_ids=ids[None], attention_mask=mask, position_ids=position)
        logits: Tensor = out.logits[0]
        return logits

    def expanded(self, prompt_ids: Sequence[int]) -> list[int]:
        """A prompt that was sent, as the model sees it."""
        return list(prompt_ids)

    def judge(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        events: Sequence[Event],
        addition: Addition | None = None,
    ) -> Verdict:
        """Recompute a request under the masks that its trace events describe.

        Args:
            prompt_ids, output_ids: the request's tokens.
            events: its ``compact`` and ``recompute`` lines, in order.
            addition: what steering added to a layer's output, at generated tokens.
        """
        ids = torch.tensor([*prompt_ids, *output_ids])
        logits = torch.empty(len(output_ids), self.config.vocab_size)
        for first, stop, phase in phases(len(output_ids), events):
            visible = visible_keys(len(prompt_ids), len(prompt_ids) + stop, phase)
            mask = attention_masks(self.config, visible)
            with torch.no_grad(), self._adding(addition, len(prompt_ids), stop):
                out = self.forward(ids[: len(prompt_ids) + stop], mask)
            # Token g was sampled from the logits at the position before it.
            logits[first:stop] = out[len(prompt_ids) - 1 + first : len(prompt_ids) - 1 + stop]
        chosen = ids[len(prompt_ids) :]
        picked = logits.gather(1, chosen[:, None])[:, 0]
        wrong = (picked < logits.max(dim=1).values - ARGMAX_TOLERANCE).nonzero().flatten().tolist()
        logprobs = logits.log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]
        return Verdict(wrong, logprobs)

    @contextlib.contextmanager
    def _adding(self, addition: Addition | None, prompt_tokens: int, stop: int) -> Iterator[None]:
        if addition is None:
            yield
            return
        factors = torch.tensor([*[0.0] * prompt_tokens, *addition.factors[:stop]])
        delta = factors[:, None] * addition.vector
        text = getattr(self.model.model, "language_model", self.model.model)
        layer = text.layers[addition.layer]
        hook = layer.register_forward_hook(lambda module, args, output: output + delta)
        try:
            yield
        finally:
            hook.remove()


def has_windows(config: Any) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


def attention_masks(config: Any, visible: Tensor) -> Tensor | dict[str, Tensor | None]:
    """What the model takes for an attention mask: 0 where a query sees a key, very low elsewhere.
    Of a model with windows one for each kind of layer, which it would not narrow by itself. Layers
    with a state instead of KV have seen everything.

    Args:
        visible: bool [n, n], for layers without a window.
    """
    lowest = torch.finfo(config.dtype).min
    mask = torch.zeros(visible.shape, dtype=config.dtype).masked_fill(~visible, lowest)[None, None]
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if with_states := kinds & WITH_STATES:
        return {"full_attention": mask, **dict.fromkeys(with_states)}
    if not has_windows(config):
        return mask
    position = torch.arange(len(visible))
    far = position[:, None] - position >= config.sliding_window
    return {"full_attention": mask, "sliding_attention": mask.masked_fill(far, lowest)}


def steering_factors(
    output_ids: Sequence[int],
    alpha_0: float,
    gamma: float,
    delimiters: Set[int],
    keywords: Set[int],
    *,
    closing: bool = True,
) -> list[float]:
    """The vector's factor at each generated token, by the definition, delimiter by delimiter.

    Args:
        closing: whether the sentence that a delimiter closes counts there, as it should.
    """
    ends = [i for i, token in enumerate(output_ids) if token in delimiters]
    starts = [0, *(end + 1 for end in ends)]
    wandering = [
        bool(keywords.intersection(output_ids[start : end + 1]))
        for start, end in zip(starts, ends, strict=False)
    ]
    factors = [0.0] * len(output_ids)
    for number, end in enumerate(ends):
        factors[end] = alpha_0 + gamma * sum(wandering[: number + closing])
    return factors


def behind(event: Mapping[str, Any], prompt_tokens: int) -> Event:
    """A compaction as one of a request with a prompt of this length."""
    return {**event, "generated": event["prompt_tokens"] + event["generated"] - prompt_tokens}


def phases(generated: int, events: Sequence[Event]) -> list[tuple[int, int, list[Event]]]:
    """(first, stop, compactions): generated tokens that one reference forward explains.

    A recomputation with G generated tokens prefills all of them, so token G is the first that comes
    from it.
    """
    phases: list[tuple[int, int, list[Event]]] = []
    first, current = 0, []
    for event in events:
        if event["event"] == "recompute":
            phases.append((first, event["generated"], current))
            first, current = event["generated"], []
        elif event["event"] == "compact":
            current.append(event)
    phases.append((first, generated, current))
    return [phase for phase in phases if phase[1] > phase[0]]


def visible_keys(prompt_tokens: int, n: int, compactions: Sequence[Event]) -> Tensor:
    """bool [n, n]: whether query p sees key j; compactions past the n-th token do not count."""
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    for event in compactions:
        evicted_before = prompt_tokens + event["generated"]
        if evicted_before >= n:
            continue
        gone = torch.ones(evicted_before, dtype=torch.bool)
        gone[torch.tensor(event["kept"])] = False
        unaware = event.get("running", 0)  # of the step that was running (speculative decoding)
        visible[evicted_before + unaware :, :evicted_before] &= ~gone
    return visible
