"""The formulas in plain torch: the truth that every kernel is tested against, and the CPU path.

One request and one layer each, float32 out, no SGLang, no state, no device synchronisation.

Shape letters: ``n`` cached tokens of the request in ascending logical position, ``W`` most recent
queries, ``Hq`` query heads, ``Hkv`` KV heads, ``G = Hq / Hkv``, ``d`` head size, ``S`` sentences,
``D`` hidden size, ``B`` rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

DELIMITER, KEYWORD, THINK_START, THINK_END = 1, 2, 4, 8
"""Bits of a token's class for ``steering_step``."""

_EPS = 1e-8
_BLOCK_ROWS = 128
_FIXED = 2.0**40
SAME_VALUE = 2.0**-12


def window_attention(
    q: Tensor, k: Tensor, *, kernel: int = 7, scale: float | None = None
) -> Tensor:
    """Importance of each cached token to the most recent queries.

    ``a[w, i] = max over the G query heads of (q_w . k_i) * scale``; softmax over
    ``i in [0, n - W)`` after the last W columns are sliced away; mean over w;
    ``max_pool1d(kernel, padding kernel // 2, stride 1)`` over i.

    Source: SkipKV (arXiv 2512.07993) eq. 4 and R-KV (arXiv 2505.24133) section 3.2, in the form of
    their code: one softmax, taken after the window is removed, and the mean over w before the pool.

    Args:
        q: float [W, Hq, d], rotated queries of the last W tokens, any order.
        k: float [n, Hkv, d], rotated keys; n > W.
        kernel: odd width of the max-pool, in tokens.
        scale: factor on the logits; default ``1 / sqrt(d)``.

    Returns:
        float32 [Hkv, n - W]; each row sums to 1 before the max-pool.

    Raises:
        ValueError: shapes that do not fit, or an even kernel.
    """
    window, n = q.shape[0], k.shape[0]
    if n <= window:
        raise ValueError(f"q, k: expected fewer than {n} queries for {n} keys, got {window}")
    if kernel % 2 == 0:
        raise ValueError(f"kernel: expected an odd number of tokens, got {kernel}")
    logits = _logits(q, k[: n - window], scale)
    importance = logits.amax(dim=2).softmax(dim=-1).mean(dim=0)
    return F.max_pool1d(importance, kernel, stride=1, padding=kernel // 2)


def causal_attention(
    q: Tensor, k: Tensor, *, scale: float | None = None, over: str = "mean"
) -> Tensor:
    """Attention that each cached token received at each of the last T decode steps.

    ``P[t, i] = mean over query heads of softmax over i of (q_t . k_i) * scale``, where step t sees
    the first ``n - T + 1 + t`` tokens: what the model computed at that step, since rows only grow
    between compactions.

    Source: the windowed form of per-step attention statistics (H2O, arXiv 2306.14048; RaaS, arXiv
    2502.11147; LazyEviction, arXiv 2506.15969).

    Args:
        q: float [T, Hq, d], rotated queries of the last T tokens, oldest first.
        k: float [n, Hkv, d], rotated keys; n >= T.
        scale: factor on the logits; default ``1 / sqrt(d)``.
        over: ``mean``; or ``group_max``, the maximum over the query heads of each KV head and then
            the mean; or ``max``, the maximum over all query heads.

    Returns:
        float32 [T, n]; the mean of each row sums to 1.

    Raises:
        ValueError: shapes that do not fit.
    """
    steps, n = q.shape[0], k.shape[0]
    if n < steps:
        raise ValueError(f"q, k: expected no more than {n} queries for {n} keys, got {steps}")
    logits = _logits(q, k, scale)
    last_seen = torch.arange(n - steps, n, device=k.device)
    unseen = torch.arange(n, device=k.device) > last_seen[:, None]
    attention = logits.masked_fill(unseen[:, None, None, :], -torch.inf).softmax(dim=-1)
    if over == "mean":
        return attention.mean(dim=(1, 2))
    of_heads = attention.amax(dim=2)
    return of_heads.mean(dim=1) if over == "group_max" else of_heads.amax(dim=1)


def selector_attention(
    q: Tensor, k: Tensor, *, first: int = 0, kernel: int = 7, scale: float | None = None
) -> Tensor:
    """Attention of the most recent queries to the generated tokens before them.

    ``A[i] = mean over query heads of sum over w of softmax over i in [first, n - W) of
    (q_w . k_i) * scale``, then ``avg_pool1d(kernel, padding kernel // 2, stride 1)`` over i,
    zero-padded edges counted.

    Source: RPC (arXiv 2505.13866) section 3.4.

    Args:
        q: float [W, Hq, d], rotated queries of the last W tokens, any order.
        k: float [n, Hkv, d], rotated keys.
        first: first column, in [0, n - W).
        kernel: odd width of the average, in tokens.
        scale: factor on the logits; default ``1 / sqrt(d)``.

    Returns:
        float32 [n - W - first].

    Raises:
        ValueError: shapes that do not fit, an even kernel, or no column left.
    """
    columns = k[first : k.shape[0] - q.shape[0]]
    if columns.shape[0] == 0 or first < 0:
        raise ValueError(
            f"first: expected an integer in [0, {k.shape[0] - q.shape[0]}), got {first}"
        )
    if kernel % 2 == 0:
        raise ValueError(f"kernel: expected an odd number of tokens, got {kernel}")
    received = _logits(q, columns, scale).softmax(dim=-1).sum(dim=0).mean(dim=(0, 1))
    return F.avg_pool1d(received[None], kernel, stride=1, padding=kernel // 2)[0]


def _logits(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """float32 [W, Hkv, G, n], each query head against the keys of its KV head."""
    queries, query_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if query_heads % kv_heads or k.shape[2] != head_dim:
        raise ValueError(
            f"q, k: expected q [W, Hq, d] and k [n, Hkv, d] with Hq a multiple of Hkv, "
            f"got q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    scale = head_dim**-0.5 if scale is None else scale
    grouped = q.float().view(queries, kv_heads, query_heads // kv_heads, head_dim)
    return torch.einsum("whgd,nhd->whgn", grouped, k.float()) * scale


def key_redundancy(k: Tensor, *, threshold: float = 0.5) -> Tensor:
    """How much each cached key repeats others.

    Cosine matrix ``S`` of the keys, diagonal 0. In every row the largest-index column with
    ``S > threshold`` is set to 0, which leaves the most recent similar token out; a row without
    one leaves nothing out. ``R = softmax over i of mean over rows of S[r, i]``.

    Source: R-KV (arXiv 2505.24133) section 3.3; SkipKV (arXiv 2512.07993) eq. 5, both as in their
    code: the mean over rows spares the later of two similar tokens, as R-KV's text wants it. R-KV's
    eq. 6 and algorithm 1 average the row itself, and SkipKV's eq. 5 takes the softmax before the
    mean. That one similar token is left out and the threshold 0.5 are the code's. Deviation: it
    zeroes column 0 in rows without a similar column, by accident.

    Args:
        k: float [n, Hkv, d], rotated keys.
        threshold: cosine above which two keys count as similar.

    Returns:
        float32 [Hkv, n]; each row sums to 1.
    """
    n = k.shape[0]
    unit = k.float().transpose(0, 1)
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp_min(_EPS)
    integer = torch.int16 if n < 2**15 else torch.int32
    number = torch.arange(1, n + 1, dtype=integer, device=k.device)
    last = torch.zeros(unit.shape[:2], dtype=number.dtype, device=k.device)
    # Number of each row's last similar column, 0 for none. Blocks of rows bound the memory, and S
    # is symmetric: from the diagonal on, a block says both what its rows and what its columns have.
    for start in range(0, n, _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, n)
        cosine = unit[:, start:end] @ unit[:, start:].transpose(1, 2)
        cosine.diagonal(0, dim1=1, dim2=2).zero_()
        similar = cosine > threshold
        own, later = last[:, start:end], last[:, end:]
        own.copy_(own.maximum((similar * number[start:]).amax(dim=2)))
        rows = number[start:end, None]
        later.copy_(later.maximum((similar[:, :, end - start :] * rows).amax(dim=1)))
    # The sum over rows of a column is one product with the sum of all unit keys; what the
    # last similar keys add is taken off it.
    last_similar = (last.long() - 1).clamp_min(0)
    head = torch.arange(unit.shape[0], device=k.device).unsqueeze(1)
    value = (unit * unit[head, last_similar]).sum(dim=-1)
    value.masked_fill_((last == 0) | (last == number), 0.0)
    total = (unit * (unit.sum(dim=1, keepdim=True) - unit)).sum(dim=-1)
    # In fixed point, so that the order in which a GPU adds changes nothing.
    taken = torch.zeros_like(last_similar).scatter_add_(1, last_similar, (value * _FIXED).long())
    redundancy: Tensor = ((total - taken / _FIXED) / n).softmax(dim=-1)
    return redundancy


def distinct_values(
    values: Sequence[Tensor], first: int, *, weights: Tensor, compared: range
) -> tuple[Tensor, Tensor]:
    """How far each cached value lies from the nearest later one, and how long it is.

    With ``u = v / mean of |v|``, per layer and KV head, the mean over tokens from ``first`` on:
    ``size_i = sum over layers and KV heads of weight * |u_i|`` and ``distance_i = min over j > i of
    sqrt(mean over the compared layers and all KV heads of |u_i - u_j|^2)``; 0 for the last token
    and for those before ``first``, which are not compared. Two values whose squared distance is at
    most ``SAME_VALUE`` of the sum of their squares are the same, distance 0: below that, rounding
    decides which of two repetitions is nearer.

    Source: ours, docs/distinct.md.

    Args:
        values: float [n, Hkv, d] of every layer.
        first: the first token that is compared and whose length counts in the means.
        weights: float32 [layers, Hkv], of the sizes.
        compared: layers of the distance, at least one.

    Returns:
        float32 [n] each: distance, size.
    """
    n, heads, _ = values[0].shape
    size, units = torch.zeros(n, device=values[0].device), []
    for layer, cached in enumerate(values):
        v = cached.float()
        lengths = v.norm(dim=-1)
        mean = lengths[first:].mean(dim=0).clamp_min(_EPS)
        size += (lengths / mean * weights[layer]).sum(dim=1)
        if layer in compared:
            units.append((v / mean[:, None]).flatten(1))
    u = torch.cat(units, dim=1)
    squares, nearest = u.square().sum(dim=1), torch.zeros_like(size)
    for start in range(first, n - 1, _BLOCK_ROWS):  # blocks of rows bound the memory
        end = min(start + _BLOCK_ROWS, n - 1)
        nearest[start:end] = nearest_later(squares[start:], u[start:end] @ u[start:].T)
    return (nearest / (len(compared) * heads)).sqrt(), size


def nearest_later(squares: Tensor, products: Tensor) -> Tensor:
    """float32 [B], squared distance of each vector to the nearest later one.

    Args:
        squares: float32 [m], of the lengths of these vectors and of all later ones, m above B.
        products: float32 [B, m], of each of the first B vectors with all of them.
    """
    both = squares[: len(products), None] + squares
    between = both - 2.0 * products
    between.masked_fill_(between <= SAME_VALUE * both, 0.0)
    earlier = torch.ones_like(between, dtype=torch.bool).tril()
    return between.masked_fill_(earlier, torch.inf).amin(dim=1)


def sentence_similarity(v: Tensor) -> Tensor:
    """Cosine similarity of every pair of sentence vectors.

    Source: SkipKV (arXiv 2512.07993) eqs 1-3; the cosine, as in its text and code, where eq. 1 is a
    dot product.

    Args:
        v: float [S, D], mean final hidden states; need not be normalised.

    Returns:
        float32 [S, S], symmetric.
    """
    unit = v.float() / v.float().norm(dim=-1, keepdim=True).clamp_min(_EPS)
    similarity: Tensor = unit @ unit.T
    return similarity


def sentence_redundancy(v: Tensor) -> Tensor:
    """Cosine of each sentence vector and the most similar later one; -1 for the last.

    Source: SkipKV (arXiv 2512.07993) eqs 1-3.

    Args:
        v: float [S, D], one or more, as of ``sentence_similarity``.

    Returns:
        float32 [S].
    """
    similarity = sentence_similarity(v)
    earlier = torch.ones_like(similarity, dtype=torch.bool).tril()
    redundancy: Tensor = similarity.masked_fill(earlier, -1.0).amax(dim=1)
    return redundancy


def sentence_step(
    hidden: Tensor,
    tracks: Tensor,
    is_delimiter: Tensor,
    *,
    total: Tensor,
    length: Tensor,
    index: Tensor,
    after_delimiter: Tensor,
    vectors: Tensor,
) -> None:
    """Add one token per row to its open sentence; at a delimiter store the sentence's mean vector.

    A token that follows a delimiter and is none itself opens sentence ``index + 1``; a delimiter
    that follows a delimiter joins the sentence before it. At a delimiter
    ``vectors[track, index] = total / length``, L2-normalised. A full table keeps writing its last
    entry, so memory is bounded and the newest sentence always has a vector.

    Source: SkipKV (arXiv 2512.07993) section 4.1. Graph-safe: fixed shapes, no host reads.

    Args:
        hidden: float [B, D], hidden states after the final norm.
        tracks: int64 [B], row of each table; track 0 is scratch for rows nobody tracks.
        is_delimiter: bool [B].
        total: float32 [tracks, D], running sums (changed in place, as are all below).
        length: float32 [tracks], tokens in the running sum.
        index: int64 [tracks], sentence that the running sum belongs to.
        after_delimiter: bool [tracks], whether the last token was a delimiter.
        vectors: float [tracks, capacity, D], stored means.
    """
    opens = after_delimiter[tracks] & ~is_delimiter
    keep = (~opens).unsqueeze(1)
    new_total = torch.where(keep, total[tracks], 0.0) + hidden.float()
    new_length = torch.where(opens, 0.0, length[tracks]) + 1.0
    new_index = index[tracks] + opens
    total[tracks] = new_total
    length[tracks] = new_length
    index[tracks] = new_index
    after_delimiter[tracks] = is_delimiter
    mean = new_total / new_length.unsqueeze(1)
    unit = mean / mean.norm(dim=-1, keepdim=True).clamp_min(_EPS)
    entry = new_index.clamp_max(vectors.shape[1] - 1)
    stored = vectors[tracks, entry]
    vectors[tracks, entry] = torch.where(is_delimiter.unsqueeze(1), unit.to(stored.dtype), stored)


def steering_step(
    residual: Tensor,
    vector: Tensor,
    rows: Tensor,
    classes: Tensor,
    *,
    gamma: float,
    steered: Tensor,
    alpha_0: Tensor,
    nonexecution: Tensor,
    keyword_seen: Tensor,
    thinking: Tensor,
) -> None:
    """Count one token per row; where it is a delimiter of a steered row's thoughts, add the vector.

    ``residual[b] += (alpha_0[row] + gamma * nonexecution[row]) * vector``, where ``nonexecution``
    counts the row's closed sentences that hold a keyword, the one that this token closes among
    them. A row that is not steered, a token that is no delimiter and a token outside the thinking
    part leave their residual bit for bit as it was.

    Source: SkipKV (arXiv 2512.07993) section 4.2 and its algorithm 2, which counts a sentence after
    its delimiter was steered, not before. Graph-safe: fixed shapes, no host reads, in place.

    Args:
        residual: float [B, D], what the next layer adds this layer's output to (changed in place).
        vector: float32 [D].
        rows: int64 [B], row of the page table, which is the row of every table below; padding rows
            may repeat row 0, which nobody steers.
        classes: uint8 [B], ``DELIMITER | KEYWORD | THINK_START | THINK_END`` of each token fed.
        gamma: added to the strength per non-execution sentence.
        steered: bool [rows].
        alpha_0: float32 [rows], strength at the start.
        nonexecution: int32 [rows], closed sentences with a keyword (changed in place, as are the
            two below).
        keyword_seen: bool [rows], whether the open sentence has a keyword.
        thinking: bool [rows], whether the last token lay in the thinking part.
    """
    closes = (classes & DELIMITER) != 0
    has_keyword = keyword_seen[rows] | ((classes & KEYWORD) != 0)
    thinks = (thinking[rows] | ((classes & THINK_START) != 0)) & ((classes & THINK_END) == 0)
    count = nonexecution[rows] + (closes & has_keyword)
    nonexecution[rows] = count.to(nonexecution.dtype)
    keyword_seen[rows] = has_keyword & ~closes
    thinking[rows] = thinks
    strength = (alpha_0[rows] + gamma * count).unsqueeze(1)
    moved = (residual.float() + strength * vector).to(residual.dtype)
    residual.copy_(torch.where((steered[rows] & closes & thinks).unsqueeze(1), moved, residual))
