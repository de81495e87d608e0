"""Statistics of policies that follow the attention of every decode step, for all requests at once.

A row only grows between compactions, so the attention of every step since the last time can be
computed once more, from the step's recorded query and the keys that it saw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.eviction.due import Due, by_policy
from sgl_skipkv.kernels.on_device import device_tensor, device_tensors
from sgl_skipkv.kernels.reference import causal_attention
from sgl_skipkv.policy.base import AttentionOver, Policy
from sgl_skipkv.policy.inputs.paged_cache import paged_at
from sgl_skipkv.policy.inputs.score_input import Steps
from sgl_skipkv.ranks import Ranks
from sgl_skipkv.recording.recorder import Recorder


def replay_steps(
    requests: Sequence[Due], recorder: Recorder, *, scale: float, ranks: Ranks
) -> None:
    """Bring the requests' statistics up to date; those with the same policy share the launches.

    What a request gets does not depend on the others. If this raises, each request's statistics are
    either as they were or up to date, so every request may be tried again. One of several ranks
    that fails goes on with statistics of NaN, which end the requests on all ranks.
    """
    behind = [due for due in requests if due.logical_tokens > due.state.kv.followed_tokens]
    for chosen in by_policy(behind):
        together = [behind[i] for i in chosen]
        policy, lengths = together[0].state.settings.policy, [due.row_tokens for due in together]
        followed = _followed(policy, together, recorder, scale, ranks)
        parts = {name: torch.split(values, lengths) for name, values in followed.items()}
        for i, due in enumerate(together):
            due.state.kv.statistics = {name: values[i] for name, values in parts.items()}
            due.state.kv.followed_tokens = due.logical_tokens


def _followed(
    policy: Policy, requests: Sequence[Due], recorder: Recorder, scale: float, ranks: Ranks
) -> dict[str, Tensor]:
    """name -> [tokens of all requests], statistics of requests of one policy after their steps."""
    steps = [len(_steps(due)) for due in requests]
    over, combine = policy.attention_over, policy.tracks_all_heads
    attention = attention_of_ranks(requests, steps, recorder, scale, over, ranks, combine=combine)
    positions, lengths = _step_positions(requests, recorder.device), [*map(_row_tokens, requests)]
    seen = Steps(attention, positions, lengths)
    statistics = _statistics(policy, requests, recorder.device)

    def work() -> dict[str, Tensor]:
        followed = policy.follow(dict(statistics), seen)
        return _checked_statistics(policy, statistics.keys(), followed, attention)

    if ranks.size == 1:
        return work()
    lost = attention.isnan().any(dim=0)
    followed, _ = attempt(f"statistics of {policy.name}", work)
    if followed is None:
        followed, lost = statistics, torch.ones_like(lost)
        _mark_lost(requests)
    return {name: values.masked_fill(lost, torch.nan) for name, values in followed.items()}


def _checked_statistics(
    policy: Policy, names: Collection[str], found: dict[str, Tensor], attention: Tensor
) -> dict[str, Tensor]:
    """A policy that is being written may return something else.

    Raises:
        ValueError: it did.
    """
    like = attention.shape[1:], torch.float32, attention.device
    if any((one.shape, one.dtype, one.device) != like for one in found.values()) or (
        found.keys() != {*names}
    ):
        got = {name: f"{one.dtype} {[*one.shape]} on {one.device}" for name, one in found.items()}
        expected = f"{', '.join(names)} of float32 {[*like[0]]} on {like[2]}"
        raise ValueError(f"statistics of policy {policy.name}: expected {expected}, got {got}")
    return found


def attention_of_ranks(
    requests: Sequence[Due],
    steps: Sequence[int],
    recorder: Recorder,
    scale: float,
    over: AttentionOver,
    ranks: Ranks,
    *,
    combine: bool = True,
) -> Tensor:
    """As ``replayed_attention``, over the heads of all ranks; NaN if one of them failed.

    Args:
        combine: false: over this rank's heads.
    """
    work = partial(replayed_attention, requests, steps, recorder, scale, over)
    if ranks.size == 1:
        return work()
    attention, _ = attempt(f"attention of {len(requests)} requests", work)
    if attention is None:
        shape = (max(steps), sum(map(_row_tokens, requests)))
        attention = torch.full(shape, torch.nan, device=recorder.device)
        _mark_lost(requests)
    if not combine:
        return attention
    return ranks.maximum(attention) if over == "max" else ranks.mean(attention)


def _mark_lost(requests: Sequence[Due]) -> None:
    for due in requests:
        due.state.kv.lost = True


def _row_tokens(due: Due) -> int:
    return due.row_tokens


def kept_statistics(
    statistics: Sequence[Mapping[str, Tensor]], kept: Sequence[Tensor], row_tokens: Sequence[int]
) -> list[dict[str, Tensor]]:
    """What remains of each request's statistics when it keeps some of its tokens.

    Args:
        statistics: name -> [n] of each request; none where its policy follows nothing.
        kept: int64 [k] of each, row indices.
        row_tokens: n of each.
    """
    remaining: list[dict[str, Tensor]] = [{} for _ in statistics]
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, values in enumerate(statistics):
        if values:
            alike[tuple(values)].append(i)
    for names, chosen in alike.items():
        counts, lengths = [kept[i].shape[0] for i in chosen], [row_tokens[i] for i in chosen]
        rows = torch.cat([kept[i] for i in chosen])
        starts, count = device_tensors([[0, *accumulate(lengths[:-1])], counts], rows.device)
        rows += starts.repeat_interleave(count, output_size=sum(counts))
        for name in names:
            rest = torch.cat([statistics[i][name] for i in chosen])[rows]
            for i, own in zip(chosen, torch.split(rest, counts), strict=True):
                remaining[i][name] = own
    return remaining


def _statistics(policy: Policy, requests: Sequence[Due], device: torch.device) -> dict[str, Tensor]:
    """name -> [tokens of all requests], those of newly cached tokens behind those of the others."""
    known = [next((len(one) for one in due.state.kv.statistics.values()), 0) for due in requests]
    every = torch.arange(max(due.logical_tokens for due in requests), device=device)
    new = [due.row_tokens - count for due, count in zip(requests, known, strict=True)]
    born = [
        every[due.logical_tokens - count : due.logical_tokens]
        for due, count in zip(requests, new, strict=True)
    ]
    initial = policy.initial_statistics(torch.cat(born))
    if not any(known):
        return initial
    joined = {}
    for name, values in initial.items():
        pairs = zip(requests, torch.split(values, new), strict=True)
        parts = [(due.state.kv.statistics.get(name, values[:0]), newest) for due, newest in pairs]
        joined[name] = torch.cat([values for pair in parts for values in pair])
    return joined


def replayed_attention(
    requests: Sequence[Due],
    steps: Sequence[int],
    recorder: Recorder,
    scale: float,
    over: AttentionOver,
) -> Tensor:
    """float32 [most steps, tokens of all requests], the attention of ``Steps``.

    Args:
        steps: of each request, how many of its last decode steps.
        over: what is taken over heads and layers.
    """
    if all(due.cache is not None for due in requests):
        from sgl_skipkv.kernels.step_attention import step_attention

        locations = [due.location(recorder.queries.data) for due in requests]
        paged = paged_at(locations, [due.row_tokens for due in requests])
        found: Tensor = step_attention(
            *(*paged, steps, [0] * len(requests)), causal=True, scale=scale, over=over
        )
        return found
    parts, layers = [], recorder.shape.layers
    for due, count in zip(requests, steps, strict=True):
        queries = recorder.queries.read(due.state.held.track_id, due.logical_tokens - 1, count)
        attention = torch.zeros(count, due.row_tokens, device=recorder.device)
        for layer in range(layers):
            q, keys = queries[layer].flip(0), due.keys(layer)
            of_layer = causal_attention(q, keys, scale=scale, over=over)
            if over == "max":
                attention = torch.maximum(attention, of_layer)
            else:
                attention += of_layer
        if over != "max":
            attention /= layers
        parts.append(F.pad(attention, (0, 0, 0, max(steps) - count)))
    return torch.cat(parts, dim=1)


def _steps(due: Due) -> range:
    """Positions whose queries the policy's statistics are to see."""
    first, policy = due.state.kv.followed_tokens, due.state.settings.policy
    if policy.follows_compactions:
        first = max(first, due.logical_tokens - policy.params.window)
    return range(first, due.logical_tokens)


def _step_positions(requests: Sequence[Due], device: torch.device) -> Tensor:
    """int64 [most steps, tokens of all requests], the positions of ``Steps``."""
    spans = [*map(_steps, requests)]
    most, lengths = max(map(len, spans)), [due.row_tokens for due in requests]
    padded = [step for span in spans for step in (*span, *[-1] * (most - len(span)))]
    packed = device_tensor([*padded, *lengths], device)
    of_request, tokens = packed[: len(padded)].view(len(requests), most), packed[len(padded) :]
    steps: Tensor = of_request.repeat_interleave(tokens, dim=0, output_size=sum(lengths))
    return steps.T
