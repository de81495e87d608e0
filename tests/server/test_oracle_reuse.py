"""Invariant 7: with ``kv_reuse`` a later turn starts from the KV that the earlier ones kept.

Every token of every turn is that of a forward over the whole conversation in which every turn's
evictions are masked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from fleet import Fleet
from oracle import behind
from score_oracle import SPELLED_OUT
from servers import Server, output_logprobs
from tiny_models import LINE_ENDS, PIECES, VOCAB_SIZE

from sgl_skipkv.policy import make_policy, names

pytestmark = pytest.mark.server

LOGPROB_TOLERANCE = 2e-3
SCORE_TOLERANCE = 2e-6  # of scores around 1e-3, float32 against float64
SUMS = ("h2o", "lazy", "gkv", "crystal")  # of many steps, or of larger scores
INTERVAL, BUDGET, TOKENS, TEXT = 16, 40, 70, 30
MODES = ("keep", "budget")
SERVERS = {"qwen2": "main", "llama": "llama", "qwen3": "qwen3, no overlap"}
POLICIES = [name for name in names() if name != "full"]
TURNS, BRANCHES = 4, 3
Events = Sequence[Mapping[str, Any]]


def draw(seed: object, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


@dataclass(frozen=True)
class Turn:
    """One request of a conversation, and the compactions that its row has been through."""

    rid: str
    prompt: list[int]
    answer: dict[str, Any]
    compactions: list[dict[str, Any]]

    @property
    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.answer["meta_info"]["skipkv"]
        return info

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer["output_ids"]


def keys(mode: str, policy: str = "rkv") -> dict[str, Any]:
    parameters = {"interval": INTERVAL, "delimiters": "any-newline"}
    own = {"kv_budget": BUDGET, "kv_policy": policy, "kv_params": parameters}
    return {**own, "kv_reuse": mode}


@dataclass(frozen=True)
class Asked:
    """A turn that is asked for: what it says, and the turn that it goes on from."""

    rid: str
    text: list[int]
    sampling: Mapping[str, Any]
    after: Turn | None = None

    @property
    def prompt(self) -> list[int]:
        return (self.after.tokens if self.after else []) + self.text


def say(server: Server, *asked: Asked) -> list[Turn]:
    """All at once."""
    calls = [
        {"rid": one.rid, "input_ids": one.prompt, "tokens": TOKENS, **one.sampling} for one in asked
    ]
    turns = []
    for one, answer in zip(asked, server.generate_all(calls), strict=True):
        reused = answer["meta_info"]["skipkv"].get("reused_tokens", 0)
        before = one.after.compactions if one.after and reused else []
        own = [event for event in server.events(one.rid) if event["event"] == "compact"]
        turns.append(Turn(one.rid, one.prompt, answer, before + own))
    return turns


def first_and_second(server: Server, tag: str, mode: str, **more: Any) -> tuple[Turn, Turn]:
    """Two turns; ``more`` are sampling parameters of the second."""
    (first,) = say(server, Asked(f"{tag}-{mode}-first", draw((tag, mode), 100), keys(mode)))
    text = draw((tag, mode, "second"), TEXT)
    sampling = {**keys(mode), **more}
    return first, say(server, Asked(f"{tag}-{mode}-second", text, sampling, first))[0]


def verdict(oracle: Any, turn: Turn, compactions: Events) -> Any:
    """The oracle's, under these compactions of the whole conversation."""
    events = [behind(event, len(turn.prompt)) for event in compactions]
    return oracle.judge(turn.prompt, turn.answer["output_ids"], events)


def distance(turn: Turn, found: Any) -> float:
    """Of log-probabilities."""
    pairs = zip(output_logprobs(turn.answer), found.logprobs.tolist(), strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def assert_judged(oracle: Any, *turns: Turn) -> None:
    for turn in turns:
        found = verdict(oracle, turn, turn.compactions)
        assert found.wrong == [], (turn.rid, found.wrong[:5])
        assert distance(turn, found) <= LOGPROB_TOLERANCE, turn.rid


@pytest.fixture(scope="module")
def families(fleet: Fleet, server: Server) -> Iterator[dict[str, Server]]:
    others = fleet.all_ready(*(name for name in SERVERS.values() if name != "main"))
    yield {family: others.get(name, server) for family, name in SERVERS.items()}
    for other in others.values():
        other.assert_clean()


@pytest.fixture(scope="module")
def talks(families):  # type: ignore[no-untyped-def]
    """family -> (mode, policy) -> turns, and branches of the last turn."""
    talks = {}
    for family, server in families.items():
        talks[family] = {
            key: talk
            for mode in MODES
            for half in (POLICIES[::2], POLICIES[1::2])
            for key, talk in _converse(server, mode, half)
        }
    return talks


def _converse(
    server: Server, mode: str, policies: Sequence[str]
) -> Iterator[tuple[Any, tuple[list[Turn], list[Turn]]]]:
    """One conversation with each policy, all at once, in a pool without other histories and with
    room for all of these."""
    server.wait_idle()
    server.post("/flush_cache")
    talks: dict[str, list[Turn]] = {name: [] for name in policies}

    def asked(name: str, number: object) -> Asked:
        after = talks[name][-1] if talks[name] else None
        text = draw((mode, name, number), TEXT if after else 90 + TEXT)
        return Asked(f"talk-{mode}-{name}-{number}", text, keys(mode, name), after)

    for number in range(TURNS):
        turns = say(server, *(asked(name, number) for name in talks))
        for talk, turn in zip(talks.values(), turns, strict=True):
            talk.append(turn)
    everything = [asked(name, f"branch {i}") for name in talks for i in range(BRANCHES)]
    branches = iter(say(server, *everything))
    for name, talk in talks.items():
        yield (mode, name), (talk, [next(branches) for _ in range(BRANCHES)])


@pytest.mark.parametrize("family", SERVERS)
def test_every_turn_is_the_whole_conversation_under_its_masks(talks, oracle, family):  # type: ignore[no-untyped-def]
    for talk, branches in talks[family].values():
        assert_judged(oracle(family), *talk, *branches)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_kept_set_is_the_one_with_the_best_scores(talks, score_oracle, family):  # type: ignore[no-untyped-def]
    """Sentences, statistics and queries of earlier turns count on as they were recorded."""
    compactions = earlier_sentences = 0
    for (mode, name), (talk, _) in talks[family].items():
        if name not in SPELLED_OUT:
            continue
        last, counted = talk[-1], mode == "budget"
        prompt = len(talk[0].prompt) if counted else len(last.prompt)
        tokens = last.tokens
        own = [e for e in last.compactions if counted or e["rid"] == last.rid]
        earlier = [e for e in last.compactions if not counted and e["rid"] != last.rid]
        choices = score_oracle(family).choices(
            *(tokens[:prompt], tokens[prompt:], [behind(e, prompt) for e in own]),
            [PIECES[token] in LINE_ENDS for token in tokens[prompt:]],
            make_policy(name, **keys(mode, name)["kv_params"]),
            kv_budget=BUDGET,
            earlier=[behind(e, prompt) for e in earlier],
            turns=[turn.info["reused_tokens"] for turn in talk[1:]] if counted else (),
            uncounted=[
                (len(one.tokens) - 1, len(next_one.prompt)) for one, next_one in pairwise(talk)
            ],
        )
        for choice in choices:
            tolerance = SCORE_TOLERANCE * (10 if name in SUMS else 1)
            assert choice.inversion < tolerance, (mode, name)
            compactions += 1
        earlier_sentences += last.info["evicted_sentences"] > 0 and counted
    assert compactions >= 60 and earlier_sentences >= 1


@pytest.mark.parametrize("family", SERVERS)
def test_a_turn_computes_its_own_text_only(talks, family):  # type: ignore[no-untyped-def]
    for (mode, name), (talk, branches) in talks[family].items():
        first = len(talk[0].prompt)
        later = [*pairwise(talk), *((talk[-1], branch) for branch in branches)]
        for earlier, turn in later:
            info = turn.info
            case = (family, mode, name, info)
            assert info["kv_reuse_miss"] == "none", case
            assert len(turn.prompt) - info["reused_tokens"] <= TEXT + 1, case
            assert info["reused_tokens"] <= len(earlier.tokens), case
            if mode == "keep":
                assert info["copied_kv_tokens"] == 0, case
                assert info["peak_kv_tokens"] <= BUDGET + INTERVAL + 1, case
            else:
                assert info["copied_kv_tokens"] == info["reused_kv_tokens"] - first, case
                assert info["peak_kv_tokens"] <= BUDGET + INTERVAL + 1 + TEXT + 1, case
                assert info["reused_kv_tokens"] <= first + BUDGET + INTERVAL + 1, case


def test_earlier_evictions_matter(talks, oracle):  # type: ignore[no-untyped-def]
    """Without the masks of earlier turns the same oracle must object, or it proves nothing."""
    turns = [talk[-1] for talk, _ in talks["qwen2"].values()]
    unmasked = [
        verdict(oracle("qwen2"), turn, [e for e in turn.compactions if e["rid"] == turn.rid])
        for turn in turns
    ]
    objections = [distance(*pair) > LOGPROB_TOLERANCE for pair in zip(turns, unmasked, strict=True)]
    assert sum(objections) >= 0.9 * len(turns)


@pytest.mark.parametrize("mode", MODES)
def test_a_history_is_as_it_was_after_its_branches(server, mode):  # type: ignore[no-untyped-def]
    """A branch that comes late is what it would have been as the first."""
    (root,) = say(server, Asked(f"root-{mode}", draw(("root", mode), 100), keys(mode)))
    asked = [
        Asked(f"branch-{mode}-{i}", draw(("branch", i), 20), keys(mode), root) for i in range(8)
    ]
    together = say(server, *asked)
    for one, turn in zip(reversed(asked), reversed(together), strict=True):
        (late,) = say(server, replace(one, rid=f"{one.rid}-late"))
        assert late.answer["output_ids"] == turn.answer["output_ids"]
        assert [e["kept"] for e in late.compactions] == [e["kept"] for e in turn.compactions]
        assert late.info["reused_kv_tokens"] == turn.info["reused_kv_tokens"] > 100


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_commits_its_text_once(server, oracle, mode):  # type: ignore[no-untyped-def]
    """As SGLang's frontend does: a request for 0 tokens, then the branches."""
    (root,) = say(server, Asked(f"fork-{mode}", draw(("fork", mode), 100), keys(mode)))
    committed = draw("committed", TEXT)
    (commit,) = say(server, Asked(f"commit-{mode}", committed, {**keys(mode), "tokens": 0}, root))
    assert commit.info["copied_kv_tokens"] == 0
    branches = say(
        server,
        *(Asked(f"{mode}-{i}", committed + draw(("of", i), 9), keys(mode), root) for i in range(3)),
    )
    assert_judged(oracle("qwen2"), *branches)
    assert all(len(turn.prompt) - turn.info["reused_tokens"] == 9 for turn in branches)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_out", (1, 2, 5))
def test_the_end_of_an_output_may_be_left_out(server, oracle, mode, left_out):  # type: ignore[no-untyped-def]
    """As by a client that sends text: its tokens end otherwise."""
    (first,) = say(server, Asked(f"end-{mode}-{left_out}", draw("end", 100), keys(mode)))
    end = len(first.tokens) - left_out
    cut = replace(first, prompt=first.tokens[:end], answer={"output_ids": []})
    (second,) = say(server, Asked(f"cut-{mode}-{left_out}", draw("new", TEXT), keys(mode), cut))
    assert second.info["reused_tokens"] == end
    assert_judged(oracle("qwen2"), second)


@pytest.mark.parametrize("mode", MODES)
def test_what_differs_before_the_last_compaction_is_computed_anew(server, oracle, mode):  # type: ignore[no-untyped-def]
    (first,) = say(server, Asked(f"edited-{mode}", draw("edited", 100), keys(mode)))
    edited = first.tokens[:120] + draw("other words", 40)
    (second,) = say(server, Asked(f"edit-{mode}", edited, keys(mode)))
    assert (second.info["kv_reuse_miss"], second.info["reused_tokens"]) == ("diverged", 0)
    assert_judged(oracle("qwen2"), second)


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_of_the_prompt_are_computed(server, mode):  # type: ignore[no-untyped-def]
    first, _ = first_and_second(server, "logprobs", mode)
    prompt, start = first.tokens + draw("more", TEXT), len(first.tokens) - 20
    sampling = {"max_new_tokens": 4, "temperature": 0}
    asked = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": start}
    with_reuse, without = (
        server.post("/generate", {**asked, "sampling_params": {**sampling, **own}})["meta_info"]
        for own in (keys(mode), {})
    )
    assert with_reuse["skipkv"]["kv_reuse_miss"] == "logprobs"
    ours, theirs = (
        [value for value, *_ in info["input_token_logprobs"][1:]] for info in (with_reuse, without)
    )
    assert len(ours) == len(theirs) == len(prompt) - start - 1
    assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_nobody_else_finds_a_compacted_row(server, mode):  # type: ignore[no-untyped-def]
    first, _ = first_and_second(server, "found", mode)
    prompt, text = first.tokens, draw("and on", 9)
    kept = first.compactions[-1]["kept"]
    other = next(name for name in MODES if name != mode)
    hit = lambda ids, **sampling: server.generate(ids, 4, **sampling)["meta_info"]  # noqa: E731
    # The text of what the row holds is not what it holds.
    assert hit([prompt[i] for i in kept] + text)["cached_tokens"] <= 100 + kept.index(
        max(i for i in kept if i < 100)
    )
    for own in ({**keys(other)}, {**keys(mode), "steering": 1.0}):
        info = hit(prompt + text, **own)["skipkv"]
        assert info["reused_tokens"] == 0, own
    for namespace in ({"extra_key": "another"}, {"cache_salt": "another"}):
        sampling = {"max_new_tokens": 4, **keys(mode)}
        body = {"input_ids": prompt + text, "sampling_params": sampling, **namespace}
        info = server.post("/generate", body)["meta_info"]
        assert info["skipkv"]["reused_tokens"] == info["cached_tokens"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_samples_continue_one_history(server, mode):  # type: ignore[no-untyped-def]
    first, _ = first_and_second(server, "samples", mode)
    sampling = {"max_new_tokens": 40, "temperature": 1.0, "n": 3, "ignore_eos": True, **keys(mode)}
    prompt = first.tokens + draw("sampled", TEXT)
    answers = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    infos = [answer["meta_info"]["skipkv"] for answer in answers]
    assert [info["reused_tokens"] for info in infos] == [len(prompt) - 1] * 3


def test_a_flush_forgets_every_history(server):  # type: ignore[no-untyped-def]
    first, _ = first_and_second(server, "flushed", "budget")
    server.wait_idle()
    server.post("/flush_cache")
    (second,) = say(server, Asked("after", draw("after", TEXT), keys("budget"), first))
    assert second.info["reused_tokens"] == 0


def test_a_long_conversation_stays_in_its_budget(server, oracle):  # type: ignore[no-untyped-def]
    """20 turns: the row holds the first prompt, the budget and the turn's own text."""
    turn, text = None, 12
    for number in range(20):
        asked = Asked(
            f"long-{number}",
            draw(("long", number), 60 if turn is None else text),
            {**keys("budget", "skipkv"), "tokens": 40},
            turn,
        )
        before, (turn,) = turn, say(server, asked)
        if before is not None:
            computed = len(turn.prompt) - turn.info["reused_tokens"]
            assert computed <= text + 1
            assert turn.info["peak_kv_tokens"] <= BUDGET + INTERVAL + 1 + text
    assert turn is not None and len(turn.tokens) == 60 + 19 * text + 20 * 40
    assert turn.info["kv_tokens"] <= BUDGET + INTERVAL
    assert_judged(oracle("qwen2"), turn)
