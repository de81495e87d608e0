"""Which tokens of a trace the model still needs: forwards with hand-made masks, no policy at all.

    python -m bench.accuracy.needed_tokens
    python -m bench.accuracy.needed_tokens --families     # into needed_by_family.csv
    python -m bench.accuracy.needed_tokens --in-total 50 66 82   # into needed_in_total.csv

A query sees the prompt, the last ``recent`` tokens and, of every earlier sentence, only the tokens
named; the trace is FullKV's own. One row per mask in bench/rows/needed_tokens.csv: how many old
tokens that leaves and how many next tokens come out wrong, both per trace. What skipkv+ does rests
on this (docs/distinct.md).

With ``--families`` the long traces of every family are read with its own rule, with each other rule
of ``bench/reasoner/families/needed.py`` and with nothing. A rule may drop tokens later, so
a row has the most that it kept at any time. Tokens that are wrong with a full cache do not count.
With ``--in-total`` a query of a family's short trace sees so many tokens of it: those of the
family's own rule (of chains with the names), and for the rest the newest. ``right`` counts traces
without a wrong token. Rows on record are not made again.
"""

from __future__ import annotations

import argparse
import re
from functools import cache
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.accuracy.layers import greedy_traces
from bench.lib.record import append_row, recorded
from bench.lib.serving import BUNDLED, prompts_of
from bench.reasoner.check_families import FOLDER as FAMILIES_FOLDER
from bench.reasoner.check_families import choices, encode
from bench.reasoner.export import load_model
from bench.reasoner.families import needed
from bench.reasoner.families.base import Size
from bench.reasoner.families.needed import Rule, visible_in_total, visible_tokens
from bench.reasoner.families.registry import FAMILIES, heldout_task
from bench.reasoner.model import Reasoner
from sgl_skipkv.cli.progress import track

#: sentences, tokens before the delimiter, whether with the delimiter, recent tokens
MASKS = (
    *(("first statements", tokens, True, 64) for tokens in (0, 1, 2, 3)),
    *(("all statements", tokens, False, 64) for tokens in (1, 2)),
    *(("first statements", 3, True, recent) for recent in (8, 16, 32, 48)),
)
#: of the families; None keeps no old token
RULES: tuple[Rule | None, ...] = (
    needed.first_ends,
    needed.first_ends_and_names,
    needed.first_beginnings,
    needed.newest_ends_of_late,
    needed.newest_ends,
    needed.open_path,
    None,
)
FAMILY_RECENT_TOKENS = 64
STATEMENT = re.compile(r"so (\w+) = \d+\.\s*$")


def kept_tokens(
    texts: list[str], prompt: int, which: str, tokens: int, delimiter: bool
) -> list[int]:
    """Positions of old tokens that stay, of sentences that state a result."""
    kept: list[int] = []
    stated: set[str] = set()
    start = prompt
    for stop in range(prompt + 1, len(texts) + 1):
        if not texts[stop - 1].endswith("\n"):
            continue
        statement = STATEMENT.search("".join(texts[start:stop]))
        if statement and (which == "all statements" or statement[1] not in stated):
            last = stop if delimiter else stop - 1
            kept += range(max(start, stop - 1 - tokens), last)
        if statement:
            stated.add(statement[1])
        start = stop
    return kept


def _name(rule: Rule | None) -> str:
    return rule.__name__ if rule else "nothing"


class Trace(NamedTuple):
    """A family's right trace. ``written``: bool [T - 1], next tokens that a full cache writes."""

    ids: list[int]
    prompt: int
    texts: list[str]
    written: torch.Tensor

    def wrong_tokens(self, visible: torch.Tensor) -> int:
        """How many of them come out wrong when a query sees only ``visible``, bool [T, T]."""
        chosen = choices(_families()[0], self.ids, visible)[:-1]
        lost = (chosen != torch.tensor(self.ids[1:])) & self.written
        return int(lost[self.prompt - 1 :].sum())


@cache
def _families() -> tuple[Reasoner, Tokenizer]:
    """Their model and its tokenizer."""
    tokenizer = Tokenizer.from_file(str(FAMILIES_FOLDER / "tokenizer.json"))
    return load_model(FAMILIES_FOLDER), tokenizer


@cache
def _trace(family: str, size: Size, index: int) -> Trace:
    model, tokenizer = _families()
    ids, prompt = encode(tokenizer, heldout_task(family, size, index))
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return Trace(ids, prompt, texts, choices(model, ids)[:-1] == torch.tensor(ids[1:]))


def run_families(problems: int) -> None:
    """One row per family and rule."""
    done = {(row["family"], row["rule"]) for row in recorded("needed_by_family")}
    pairs = [
        (family, rule)
        for family in FAMILIES.values()
        for rule in RULES
        if (family.name, _name(rule)) not in done
    ]
    for family, rule in track(pairs, "families"):
        most = trace_tokens = wrong = 0
        for index in range(problems):
            trace = _trace(family.name, "long", index)
            length = len(trace.ids)
            kept = list(rule(trace.texts, trace.prompt)) if rule else []
            visible = visible_tokens(kept, length, trace.prompt, FAMILY_RECENT_TOKENS)
            wrong += trace.wrong_tokens(visible)
            old = visible.sum(1) - torch.arange(1, length + 1).clamp(max=FAMILY_RECENT_TOKENS)
            most += int(old.max()) - trace.prompt
            trace_tokens += length - trace.prompt
        append_row(
            "needed_by_family",
            {
                "family": family.name,
                "rule": _name(rule),
                "own_rule": rule is family.needed,
                "recent_tokens": FAMILY_RECENT_TOKENS,
                "traces": problems,
                "most_old_tokens": round(most / problems, 1),
                "trace_tokens": round(trace_tokens / problems, 1),
                "wrong_tokens": round(wrong / problems, 2),
            },
        )


def run_in_total(problems: int, totals: list[int]) -> None:
    """One row per family and number of tokens."""
    done = {(row["family"], row["total_tokens"]) for row in recorded("needed_in_total")}
    for family in track(FAMILIES.values(), "tokens in total"):
        # Without the names even 64 recent tokens are too few for chains (needed_by_family.csv).
        rule = needed.first_ends_and_names if family.name == "chains" else family.needed
        for total in totals:
            if (family.name, str(total)) in done:
                continue
            right = 0
            for index in range(problems):
                trace = _trace(family.name, "short", index)
                kept = rule(trace.texts, trace.prompt)
                visible = visible_in_total(kept, len(trace.ids), trace.prompt, total)
                right += not trace.wrong_tokens(visible)
            append_row(
                "needed_in_total",
                {
                    "family": family.name,
                    "rule": rule.__name__,
                    "total_tokens": total,
                    "traces": problems,
                    "right": right,
                },
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=8, help="hard ones of the bundled model")
    parser.add_argument("--families", action="store_true", help="the families' rules instead")
    parser.add_argument("--in-total", type=int, nargs="+", help="tokens that a query sees")
    arguments = parser.parse_args()
    if arguments.in_total:
        run_in_total(arguments.problems, arguments.in_total)
        return
    if arguments.families:
        run_families(arguments.problems)
        return
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    prompts = prompts_of(BUNDLED / "heldout.jsonl", "hard", arguments.problems)
    traces = list(greedy_traces(model, tokenizer, prompts))
    for which, tokens, delimiter, recent in track(MASKS, "masks"):
        old = wrong = 0
        for prompt, ids in traces:
            texts = [tokenizer.decode([token]) for token in ids]
            kept = kept_tokens(texts, prompt, which, tokens, delimiter) if tokens else []
            at = torch.arange(len(ids))
            stays = at < prompt
            stays[kept] = True
            visible = (at <= at[:, None]) & (stays | (at > at[:, None] - recent))
            mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo().min)
            with torch.no_grad():
                logits = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0]
            chosen = logits[prompt - 1 : -1].argmax(-1)
            wrong += int((chosen != torch.tensor(ids[prompt:])).sum())
            old += len(kept)
        append_row(
            "needed_tokens",
            {
                "sentences": which if tokens else "none",
                "tokens_before_delimiter": tokens,
                "with_delimiter": delimiter and tokens > 0,
                "recent_tokens": recent,
                "traces": len(traces),
                "old_tokens": round(old / len(traces), 1),
                "trace_tokens": round(sum(len(i) - p for p, i in traces) / len(traces), 1),
                "wrong_tokens": round(wrong / len(traces), 2),
            },
        )


if __name__ == "__main__":
    main()
