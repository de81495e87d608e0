"""What each setting costs and saves against the full cache, and which one to recommend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from sgl_skipkv.cli.prompts import Prompt
from sgl_skipkv.cli.tune.grading import is_right
from sgl_skipkv.cli.tune.intervals import paired_interval, quantile, wilson
from sgl_skipkv.cli.tune.runs import Run

#: the chance of a recommendation that loses more than it says
ERROR: Final = 0.05


@dataclass(frozen=True)
class Row:
    """One setting against the full cache, on the same prompts.

    Attributes:
        score: mean score in [0, 1], with its 95% Wilson interval. With a key a score is 1 for a
            right answer; without one it is the share of the full cache's tokens before the first
            that differs.
        lost, gained: mean of what scores are below the full cache's, and above them.
        difference: gained - lost, with its interval.
        equal_outputs: outputs that are the full cache's, token for token.
        logprob_difference: mean absolute difference of the log-probabilities of the tokens before
            the first that differs; None where they were not asked for.
        length_limited: outputs that ran into ``max_new_tokens``.
        output_tokens, mean_kv_tokens, peak_kv_tokens: means over the requests; KV is what a request
            holds beside its prompt.
        tokens_per_s: of the whole run; None on a server that others may use.
        throughput_ratio: of that to the mean of the two runs of the full cache.
    """

    policy: str
    kv_budget: int | None
    score: float
    score_low: float
    score_high: float
    lost: float
    gained: float
    difference: float
    difference_low: float
    difference_high: float
    equal_outputs: int
    logprob_difference: float | None
    length_limited: int
    output_tokens: float
    mean_kv_tokens: float
    peak_kv_tokens: float
    compactions: int
    tokens_per_s: float | None
    throughput_ratio: float | None


def equal_tokens(output: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    for i, (token, other) in enumerate(zip(output, reference, strict=False)):
        if token != other:
            return i
    return min(len(output), len(reference))


class Comparison:
    """Rows of settings against the first of two runs of the full cache.

    The second run says how far two runs of the same setting are apart. Without a key it takes the
    place of the reference's scores: a token that two full caches do not share is no loss.

    Args:
        policies: number of policies, for the confidence of an interval: each side of a difference
            has ``1 - ERROR / policies``.
        timed: whether the runs had the server for themselves.
    """

    def __init__(
        self, prompts: Sequence[Prompt], first: Run, second: Run, policies: int, *, timed: bool
    ) -> None:
        self.prompts, self.first, self.second = prompts, first, second
        self.keyed = prompts[0].answer is not None
        self.timed = timed
        self.z = quantile(1 - ERROR / policies)
        self._reference = self._scores(first if self.keyed else second)

    def row(self, run: Run) -> Row:
        """One run, in numbers; for the main thread, as ``is_right``."""
        scores, n = self._scores(run), len(self.prompts)
        score_low, score_high = wilson(sum(scores), n)
        pairs = [*zip(scores, self._reference, strict=True)]
        losses = sum(max(reference - score, 0.0) for score, reference in pairs)
        gains = sum(max(score - reference, 0.0) for score, reference in pairs)
        low, high = paired_interval(losses, gains, n, self.z)
        references = self.first.outputs
        outputs = [*zip(run.outputs, references, strict=True)]
        equal = [equal_tokens(output.ids, reference.ids) for output, reference in outputs]
        gaps = [
            abs(logprob - other)
            for (output, reference), count in zip(outputs, equal, strict=True)
            for logprob, other in zip(
                output.logprobs[:count], reference.logprobs[:count], strict=True
            )
        ]
        full_rate = fmean((self.first.tokens_per_s, self.second.tokens_per_s))
        return Row(
            policy=run.setting.policy,
            kv_budget=run.setting.kv_budget,
            score=sum(scores) / n,
            score_low=score_low,
            score_high=score_high,
            lost=losses / n,
            gained=gains / n,
            difference=(gains - losses) / n,
            difference_low=low,
            difference_high=high,
            equal_outputs=sum(
                list(output.ids) == list(reference.ids) for output, reference in outputs
            ),
            logprob_difference=fmean(gaps) if gaps else None,
            length_limited=sum(output.cut_off for output in run.outputs),
            output_tokens=fmean(len(output.ids) for output in run.outputs),
            mean_kv_tokens=fmean(output.mean_kv_tokens for output in run.outputs),
            peak_kv_tokens=fmean(output.peak_kv_tokens for output in run.outputs),
            compactions=sum(output.compactions for output in run.outputs),
            tokens_per_s=run.tokens_per_s if self.timed else None,
            throughput_ratio=run.tokens_per_s / full_rate if self.timed else None,
        )

    def _scores(self, run: Run) -> list[float]:
        if not self.keyed:
            return [
                equal_tokens(output.ids, reference.ids) / len(reference.ids)
                for output, reference in zip(run.outputs, self.first.outputs, strict=True)
            ]
        return [
            float(not output.cut_off and is_right(output.text, prompt.answer))
            for output, prompt in zip(run.outputs, self.prompts, strict=True)
            if prompt.answer is not None
        ]


def acceptable(rows: Iterable[Row], tolerance: float) -> list[Row]:
    """The budgets that lose at most ``tolerance``, by the lower end of their interval.

    A budget counts only if every larger one of its policy does. Taken in this order a policy is
    wrong with the chance of one interval, however many budgets it has; the intervals allow for the
    number of policies.
    """
    within_tolerance, failed = [], set()
    for row in sorted(rows, key=lambda row: -(row.kv_budget or 0)):
        if row.difference_low < -tolerance:
            failed.add(row.policy)
        elif row.policy not in failed:
            within_tolerance.append(row)
    return within_tolerance


def recommended(rows: Sequence[Row], tolerance: float) -> Row | None:
    """Of those that evicted anything, the one with the least KV."""
    evicting = (row for row in acceptable(rows, tolerance) if row.compactions)
    return min(evicting, key=lambda row: row.mean_kv_tokens, default=None)
