"""Scores of all due requests: of one process, and of all ranks of a tensor parallel server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.eviction.agreement import Agreement
from sgl_skipkv.eviction.due import Due, by_policy
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.ranks import Ranks, mean_of


def scores_of(due: Sequence[Due], inputs: Sequence[ScoreInput]) -> list[Tensor]:
    """float32 [row tokens] of each request; those with the same policy share one call."""
    scores: dict[int, Tensor] = {}
    for chosen in by_policy(due):
        policy = due[chosen[0]].state.settings.policy
        together = _checked_scores(policy, [inputs[i] for i in chosen])
        scores.update(zip(chosen, together, strict=True))
    return [scores[i] for i in range(len(due))]


def _checked_scores(policy: Policy, requests: Sequence[ScoreInput]) -> list[Tensor]:
    """A policy that is being written may return something else.

    Raises:
        ValueError: it did.
    """
    scores = policy.scores_together(requests)
    for request, found in zip(requests, scores, strict=True):
        (tokens,), device = request.positions.shape, request.positions.device
        if (found.shape, found.dtype, found.device) != ((tokens,), torch.float32, device):
            got = f"{found.dtype} {list(found.shape)} on {found.device}"
            expected = f"float32 [{tokens}] on {device}"
            raise ValueError(f"scores of policy {policy.name}: expected {expected}, got {got}")
    return scores


def scores_of_ranks(
    due: Sequence[Due],
    score_inputs: Callable[[], Sequence[ScoreInput]],
    ranks: Ranks,
    agreement: Agreement | None,
) -> list[Tensor]:
    """As ``scores_of``, of all ranks' heads and the same bits on every rank, from one gather. A
    request for which a rank failed has NaN on all of them.

    Scores that depend on no head are not gathered. So no gather tells other ranks that they failed,
    and that ends the server.
    """
    inputs, _ = attempt(f"a plan of {len(due)} requests", score_inputs)
    scores: dict[int, Tensor] = {}
    for chosen in by_policy(due):
        together = [due[i] for i in chosen]
        if together[0].state.settings.policy.over_ranks is not None:
            own = None if inputs is None else [inputs[i] for i in chosen]
            found = _scores_or_nan(together, own, ranks)
        elif inputs is None:
            found = scores_of(together, [score_inputs()[i] for i in chosen])
        else:
            found = scores_of(together, [inputs[i] for i in chosen])
        scores.update(zip(chosen, found, strict=True))
    _combine(due, scores, ranks, agreement)
    return [scores[i] for i in range(len(due))]


def _scores_or_nan(
    due: Sequence[Due], inputs: Sequence[ScoreInput] | None, ranks: Ranks
) -> list[Tensor]:
    """Scores of this rank, of requests with one policy; NaN if it fails."""
    policy, device = due[0].state.settings.policy, due[0].state.runtime.recorder.device
    row_tokens = [one.row_tokens for one in due]
    sizes = policy.gathers([one.state.prompt_row_tokens for one in due], row_tokens)

    def work() -> list[Tensor]:
        with ranks.promised(sizes, device):
            if inputs is None:
                raise ValueError("what is scored is not known")
            return _checked_scores(policy, inputs)

    scores, _ = attempt(", ".join(f"kv_budget request {one.state.rid}" for one in due), work)
    if scores is None:
        return [torch.full((tokens,), torch.nan, device=device) for tokens in row_tokens]
    return scores


def _combine(
    due: Sequence[Due], scores: dict[int, Tensor], ranks: Ranks, agreement: Agreement | None
) -> None:
    """Replace the scores of this rank by those of all ranks."""
    over = [one.state.settings.policy.over_ranks for one in due]
    means, maxima = ([i for i in range(len(due)) if over[i] == how] for how in ("mean", "max"))
    parts = [scores[i] for i in (*means, *maxima)]
    if agreement is not None:
        parts.append(agreement.stamp())
    if not parts:
        return
    gathered = ranks.gathered(torch.cat(parts))
    lengths = [sum(due[i].row_tokens for i in chosen) for chosen in (means, maxima)]
    lengths.append(gathered.shape[1] - sum(lengths))
    of_means, of_maxima, stamps = torch.split(gathered, lengths, dim=1)
    for chosen, combined in ((means, mean_of(of_means)), (maxima, of_maxima.amax(dim=0))):
        pieces = torch.split(combined, [due[i].row_tokens for i in chosen])
        scores.update(zip(chosen, pieces, strict=True))
    if agreement is not None:
        agreement.compare(stamps)
