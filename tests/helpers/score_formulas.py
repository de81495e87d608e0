"""Formulas of the score oracle, spelled out in float64, of one request at one compaction.

Attention, queries, keys and values are those of a Hugging Face forward: [L, tokens, heads, d].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def attention_rows(
    queries: Tensor, keys: Tensor, visible: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """What each query gave each token: [L, Hq, queries, keys]; ``sinks``: [L, Hq], what it gave to
    none."""
    groups = queries.shape[2] // keys.shape[2]
    logits = torch.einsum("lqhd,lkhd->lhqk", queries, keys.repeat_interleave(groups, dim=2))
    logits = logits / queries.shape[3] ** 0.5
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return logits.softmax(dim=-1)
    weights = logits.exp()
    return weights / (weights.sum(dim=-1, keepdim=True) + sinks.exp()[..., None, None])


def carried(
    params: Any, row: Sequence[int], seen: Tensor, keys: Tensor, attended: dict[int, float]
) -> Tensor:
    """G-KV: attention of this and earlier compactions against redundancy.

    Args:
        seen: [L, Hq, steps, n]. keys: [L, n, Hkv, d]. attended: by position (changed in place).
    """
    of_heads = seen.unflatten(1, (keys.shape[2], -1)).amax(dim=2)
    recent = of_heads.mean(dim=(0, 1, 2))
    recent[-params.window :] = 0.0  # what is in the window has none yet
    for position, value in zip(row, (recent / recent.max()).tolist(), strict=True):
        attended[position] = max(params.decay * attended.get(position, 0.0), value)
    carried = torch.tensor([attended[one] for one in row], dtype=torch.float64)
    repeats = repeated_keys(keys, params.threshold)
    return params.sigma * carried - (1.0 - params.sigma) * repeats / repeats[: -params.window].max()


def by_quotas(
    own: Tensor, kept: Tensor, row: Sequence[int], spans: Sequence[tuple[int, int]], share: Tensor
) -> Tensor:
    """AMS with sentences: mass over rank, rank in the sentence by ``own``; of one row's candidates.

    Args:
        own: [n], where a kept token's is as high as rounding may have made it. kept: bool [n].
        row: their positions. spans: closed sentences. share: [n], of the attention mass.
    """
    ends = [0, *(end for span in spans for end in span)]
    segments = [max(i for i, end in enumerate(ends) if end <= position) for position in row]
    scores = torch.zeros(len(row), dtype=torch.float64)
    for one in {*segments}:
        members = [i for i, segment in enumerate(segments) if segment == one]
        mass = float(share[members].sum())
        members.sort(key=lambda i: (float(own[i]), bool(kept[i]), i), reverse=True)
        for rank, i in enumerate(members):
            scores[i] = 3 * (8 - rank) + mass if rank < 8 else mass / (rank - 8 + 0.5)
    return scores


def scores_of(
    name: str,
    params: Any,
    prompt: int,
    held: int,
    row: Sequence[int],
    queries: Tensor,
    keys: Tensor,
    steps: Tensor,
) -> Tensor:
    """Scores of one row.

    Args:
        held: row entries of the prompt.
        queries: [L, W, Hq, d] of the window. keys: [L, n, Hkv, d] of the row. steps:
            [L, Hq, T, n], attention of every decode step to the row; 0 for what came later.
    """
    if name in ("skipkv", "skipkv+", "rkv"):
        repeats = repeated_keys(keys, params.threshold)
        return params.sigma * importance(queries, keys, params) - (1.0 - params.sigma) * repeats
    if name == "snapkv":
        return importance(queries, keys, params)
    if name == "rpc":
        return selected(queries, keys, held, params.kernel)
    if name == "keydiff":  # minus the cosine to the head's mean unit key
        mean = F.normalize(keys, dim=3).mean(dim=1, keepdim=True)
        return -F.cosine_similarity(keys, mean, dim=3).mean(dim=(0, 2))
    if name == "crystal":
        return looked_at(params, steps.amax(dim=(0, 1)))
    received = steps.mean(dim=(0, 1))
    if name == "tova":
        return received[-1]
    if name == "h2o":
        return received.sum(dim=0)
    return recurrence(name, params, prompt, row, received)


def looked_at(params: Any, highest: Tensor) -> Tensor:
    """After Crystal-KV, look by look. highest: [steps, n], of all heads."""
    found = []
    for column in highest.unbind(dim=1):
        credit, last = 0.0, 0
        for look in (column > params.alpha).nonzero().flatten().tolist():
            credit = 1.0 + params.decay ** (look - last) * credit
            last = look
        age = len(highest) - 1 - last
        found.append(math.log(credit) + age * math.log(params.decay) if credit else -1e30)
    return torch.tensor(found, dtype=torch.float64)


def drawn(
    params: Any,
    first: int,
    pinned: int,
    keep: int,
    seed: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """VaSE: values of a large range, then a draw in proportion to attention.

    Args:
        first: row entry of the first candidate. pinned: last tokens, that stay in any case.
        keep: tokens of the row that stay.
        queries: [L, W, Hq, d]. keys, values: [L, n, Hkv, d].
    """
    (layers, window, heads, size), n = queries.shape, keys.shape[1]
    stop = n - pinned
    ranges = values[:, first:stop].amax(dim=3) - values[:, first:stop].amin(dim=3)
    steps = (2048 * ranges / ranges.mean(dim=1, keepdim=True)).floor()
    order = steps.amax(dim=(0, 2)).argsort(stable=True)
    received = torch.zeros(n - window - first, dtype=torch.float64)
    for layer, head in itertools.product(range(layers), range(heads)):
        k = keys[layer, first : n - window, head * keys.shape[2] // heads]
        received += (queries[layer, :, head] @ k.T / size**0.5).softmax(dim=1).mean(dim=0)
    reach = params.kernel // 2
    pooled = F.pad(received / (layers * heads), (reach, reach)).unfold(0, params.kernel, 1)
    draws = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(stop - first))
    scores = pooled.mean(dim=1)[: stop - first].log() - (-draws.log()).log()
    scores[order[stop - first - int(params.large * (keep - first - pinned)) :]] += 1e3
    return F.pad(scores, (first, pinned))


def distinct(power: float, first: int, values: Tensor, reach: Tensor) -> Tensor:
    """Size and distance to the nearest later value. values: [L, n, Hkv, d]."""
    unit = values / values.norm(dim=3, keepdim=True)[:, first:].mean(dim=1, keepdim=True)
    quarter = len(values) // 4
    middle = unit[quarter : max(quarter + 1, len(values) - quarter)].permute(1, 0, 2, 3)
    squares = torch.cdist(*[middle.flatten(1)] * 2, compute_mode="donot_use_mm_for_euclid_dist")
    both = middle.flatten(1).square().sum(dim=1)
    squares = squares.where(squares.square() > (both[:, None] + both) / 4096, 0.0)
    later = torch.ones(len(middle), len(middle)).triu(1).bool()
    nearest = squares.masked_fill(~later, torch.inf).amin(dim=1) / middle[0, ..., 0].numel() ** 0.5
    nearest[-1] = 0.0
    size = torch.einsum("lnh,lh->n", unit.norm(dim=3), reach) / reach.sum()
    return nearest * size**power


def recurrence(name: str, params: Any, prompt: int, row: Sequence[int], steps: Tensor) -> Tensor:
    """The last activation (raas), or whether the next one is overdue (lazy), token by token."""
    found = []
    now = prompt + len(steps) - 1
    for position, column in zip(row, steps.T.tolist(), strict=True):
        looks = (at for at, share in enumerate(column, start=prompt) if share > params.alpha)
        times = [position, *(at for at in looks if at > position)]
        if name == "raas":
            found.append(float(times[-1]))
            continue
        gap = max([b - a for a, b in itertools.pairwise(times)], default=0)
        waits = (now - times[-1]) / gap if gap else math.inf
        found.append(2 * sigmoid(-1 - waits) + (2 * sigmoid(1 - gap) if gap else 0.0))
    return torch.tensor(found, dtype=torch.float64)


def sigmoid(x: float) -> float:
    """x: not large."""
    return math.exp(x) / (1 + math.exp(x))


def selected(queries: Tensor, keys: Tensor, held: int, kernel: int) -> Tensor:
    """RPC: attention among generated tokens before the window, summed, averaged over neighbours."""
    window = queries.shape[1]
    received = attention_rows(queries, keys[:, held:-window]).mean(dim=1).sum(dim=1)
    near = F.avg_pool1d(received, kernel, stride=1, padding=kernel // 2)
    return F.pad(near.mean(dim=0), (held, window))


def importance(queries: Tensor, keys: Tensor, params: Any) -> Tensor:
    """Pooled attention of the window, best of each group; mean over KV heads and layers."""
    window = queries.shape[1]
    grouped = queries.unflatten(2, (keys.shape[2], -1))
    logits = torch.einsum("lwhgd,lnhd->lhwgn", grouped, keys[:, :-window]) / keys.shape[3] ** 0.5
    attention = logits.amax(dim=3).softmax(dim=3).mean(dim=2)
    pooled = F.max_pool1d(attention, params.kernel, stride=1, padding=params.kernel // 2)
    return F.pad(pooled.mean(dim=(0, 1)), (0, window))


def repeated_keys(keys: Tensor, threshold: float) -> Tensor:
    """R-KV's redundancy, mean over KV heads and layers: [n]. keys: [L, n, Hkv, d]."""
    found = []
    for k in keys.transpose(1, 2).flatten(end_dim=1):
        cosine = F.cosine_similarity(k[:, None], k[None], dim=2).fill_diagonal_(0.0)
        for row in cosine:
            similar = (row > threshold).nonzero().flatten()
            if len(similar):
                row[similar[-1]] = 0.0
        found.append(cosine.mean(dim=0).softmax(dim=0))
    return torch.stack(found).mean(dim=0)
