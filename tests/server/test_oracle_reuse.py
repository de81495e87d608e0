"""Invariant 7: with ``kv_reuse`` a later turn starts from the KV that the earlier ones kept.

Every token of every turn is that of a forward over the whole conversation in which every turn's
evictions are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from fleet import Fleet
from score_oracle import SPELLED_OUT, score_tolerance
from servers import Server
from talks import (
    BUDGET,
    INTERVAL,
    LOGPROB_TOLERANCE,
    MODES,
    TEXT,
    Asked,
    Case,
    Turn,
    assert_judged,
    choices_of,
    converse,
    distance,
    draw,
    keys,
    say,
    say_until_aborted,
    verdict,
)

from sgl_skipkv.policy import names

pytestmark = [pytest.mark.server, pytest.mark.slow]

#: server -> its model; the overlap scheduler on and off
SERVERS = {
    **{"main": "qwen2", "qwen2, no overlap": "qwen2"},
    **{"llama": "llama", "qwen3, no overlap": "qwen3"},
}
PAGES = {"qwen2, no overlap": 16, "qwen3, no overlap": 32}
POLICIES = [name for name in names() if name != "full"]
TURNS = 4


def first_of_two(server: Server, tag: str, mode: str) -> Turn:
    (first,) = say(server, Asked(f"{tag}-{mode}-first", draw((tag, mode), 100), keys(mode)))
    text = draw((tag, mode, "second"), TEXT)
    say(server, Asked(f"{tag}-{mode}-second", text, keys(mode), first))
    return first


@pytest.fixture(scope="module")
def servers(fleet: Fleet) -> Iterator[dict[str, Server]]:
    yield from fleet.all_lent(*SERVERS, stop=False)


def asked(case: Case, number: object, after: Turn | None) -> Asked:
    text = draw((*case, number), TEXT if after else 90 + TEXT)
    return Asked(f"talk-{'-'.join(case)}-{number}", text, keys(*case), after)


@pytest.fixture(scope="module")
def talks(servers):
    """server -> (mode, policy) -> turns, and branches of the last turn. At once as many as the pool
    has room for."""
    return {
        name: {
            case: talk
            for mode in MODES
            for half in (POLICIES[::2], POLICIES[1::2])
            for case, talk in converse(server, [(mode, p) for p in half], asked, TURNS).items()
        }
        for name, server in servers.items()
    }


@pytest.mark.parametrize("name", SERVERS)
def test_every_turn_is_the_whole_conversation_under_its_masks(talks, oracle, name):
    for talk, branches in talks[name].values():
        assert_judged(oracle(SERVERS[name]), *talk, *branches)


@pytest.mark.parametrize("server_name", ["main", "qwen3, no overlap"])
def test_every_kept_set_is_the_one_with_the_best_scores(talks, score_oracle, server_name):
    """Sentences, statistics and queries of earlier turns count on as they were recorded."""
    compactions = earlier_sentences = 0
    oracle = score_oracle(SERVERS[server_name])
    for (mode, name), (talk, _) in talks[server_name].items():
        if name not in SPELLED_OUT:
            continue
        for _, choice in choices_of(oracle, talk, kv_budget=BUDGET):
            assert choice.inversion < score_tolerance(name), (mode, name)
            compactions += 1
        earlier_sentences += talk[-1].info["evicted_sentences"] > 0 and mode == "budget"
    assert compactions >= 60 and earlier_sentences >= 1


@pytest.mark.parametrize("server_name", SERVERS)
def test_a_turn_computes_its_own_text_only(talks, server_name):
    for (mode, name), (talk, branches) in talks[server_name].items():
        first = len(talk[0].prompt)
        later = [*pairwise(talk), *((talk[-1], branch) for branch in branches)]
        for earlier, turn in later:
            info = turn.info
            case = (server_name, mode, name, info)
            assert info["kv_reuse_miss"] == "none", case
            assert len(turn.prompt) - info["reused_tokens"] <= TEXT + 1, case
            assert info["reused_tokens"] <= len(earlier.tokens), case
            shared = info["reused_kv_tokens"] if mode == "keep" else first
            shared -= shared % PAGES.get(server_name, 1)  # of the last page the tree has its own
            assert info["copied_kv_tokens"] == info["reused_kv_tokens"] - shared, case
            if mode == "keep":
                assert info["peak_kv_tokens"] <= BUDGET + INTERVAL + 1, case
            else:
                assert info["peak_kv_tokens"] <= BUDGET + INTERVAL + 1 + TEXT + 1, case
                assert info["reused_kv_tokens"] <= first + BUDGET + INTERVAL + 1, case


def test_earlier_evictions_matter(talks, oracle):
    """Without the masks of earlier turns the same oracle must object, or it proves nothing."""
    turns = [talk[-1] for talk, _ in talks["main"].values()]
    unmasked = [verdict(oracle("qwen2"), turn, turn.own) for turn in turns]
    objections = [distance(*pair) > LOGPROB_TOLERANCE for pair in zip(turns, unmasked, strict=True)]
    assert sum(objections) >= 0.9 * len(turns)


@pytest.mark.parametrize("mode", MODES)
def test_a_history_is_as_it_was_after_its_branches(server, mode):
    """A branch that comes late is what it would have been as the first."""
    (root,) = say(server, Asked(f"root-{mode}", draw(("root", mode), 100), keys(mode)))
    texts = [draw(("branch", i), 20) for i in range(8)]
    together = say(
        server,
        *(Asked(f"branch-{mode}-{i}", text, keys(mode), root) for i, text in enumerate(texts)),
    )
    for turn in reversed(together):
        (late,) = say(server, replace(turn.asked, rid=f"{turn.asked.rid}-late"))
        assert late.answer["output_ids"] == turn.answer["output_ids"]
        assert [e["kept"] for e in late.compactions] == [e["kept"] for e in turn.compactions]
        assert late.info["reused_kv_tokens"] == turn.info["reused_kv_tokens"] > 100


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
def test_a_fork_commits_its_text_once(server, oracle, mode):
    """As SGLang's frontend does: a request for 0 tokens, then the branches."""
    (root,) = say(server, Asked(f"fork-{mode}", draw(("fork", mode), 100), keys(mode)))
    committed = draw("committed", TEXT)
    (commit,) = say(
        server, Asked(f"commit-{mode}", committed, {**keys(mode), "max_new_tokens": 0}, root)
    )
    assert commit.info["copied_kv_tokens"] == 0
    branches = say(
        server,
        *(Asked(f"{mode}-{i}", committed + draw(("of", i), 9), keys(mode), root) for i in range(3)),
    )
    assert_judged(oracle("qwen2"), *branches)
    assert all(len(turn.prompt) - turn.info["reused_tokens"] == 9 for turn in branches)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_out", (1, 2, 5))
def test_the_end_of_an_output_may_be_left_out(server, oracle, mode, left_out):
    """As by a client that sends text: its tokens end otherwise."""
    (first,) = say(server, Asked(f"end-{mode}-{left_out}", draw("end", 100), keys(mode)))
    end = len(first.tokens) - left_out
    sent = first.tokens[:end] + draw("new", TEXT)
    (second,) = say(server, Asked(f"cut-{mode}-{left_out}", [], keys(mode), first, sent))
    assert second.info["reused_tokens"] == end
    assert_judged(oracle("qwen2"), second)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["distinct", "skipkv", "h2o"])
def test_an_answer_that_was_stopped_is_continued(server, oracle, mode, policy):
    """The next prompt has what the client received of it."""
    own = keys(mode, policy)
    one = Asked(f"stopped-{mode}-{policy}", draw(("stopped", policy), 100), own)
    stopped = say_until_aborted(server, one, 3)
    text = draw((policy, "behind"), TEXT)
    (second,) = say(server, Asked(f"behind-{mode}-{policy}", text, own, stopped))
    assert second.info["kv_reuse_miss"] == "none"
    assert len(second.prompt) - second.info["reused_tokens"] <= TEXT + 1
    assert_judged(oracle("qwen2"), stopped, second)


@pytest.mark.parametrize("mode", MODES)
def test_what_differs_before_the_last_compaction_is_computed_anew(server, oracle, mode):
    (first,) = say(server, Asked(f"edited-{mode}", draw("edited", 100), keys(mode)))
    edited = first.tokens[:120] + draw("other words", 40)
    (second,) = say(server, Asked(f"edit-{mode}", edited, keys(mode)))
    assert (second.info["kv_reuse_miss"], second.info["reused_tokens"]) == ("diverged", 0)
    assert_judged(oracle("qwen2"), second)


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_of_the_prompt_are_computed(server, mode):
    first = first_of_two(server, "logprobs", mode)
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


@pytest.mark.parametrize("policy", ["distinct", "skipkv", "rkv", "h2o", "streaming"])
def test_a_conversation_that_is_computed_again_keeps_its_budget(server, oracle, policy):
    """It counts from where its first prompt ends, so the second turn evicts from the first as if it
    had continued it; the third continues what the second kept."""
    own = keys("budget", policy)
    (first,) = say(server, Asked(f"again-{policy}-first", draw(("again", policy), 100), own))
    text = draw((policy, "second"), TEXT)
    # SGLang computes a prompt whose log-probabilities are asked for.
    asks = {**own, "logprob_start_len": len(first.tokens)}
    (second,) = say(server, Asked(f"again-{policy}-second", text, asks, first))
    assert second.info["kv_reuse_miss"] == "logprobs" and not second.info["reused_tokens"]
    assert second.own[0]["generated"] == 1 and len(second.own) > 2
    assert all(event["after"] <= 100 + BUDGET for event in second.own)
    assert all([*range(100)] == event["kept"][:100] for event in second.own)
    assert second.info["full_kv_tokens"] == len(second.tokens) - 100 - 1
    assert second.info["kv_tokens"] <= BUDGET + INTERVAL
    text = draw((policy, "third"), TEXT)
    (third,) = say(server, Asked(f"again-{policy}-third", text, own, second))
    assert third.info["kv_reuse_miss"] == "none"
    assert len(third.prompt) - third.info["reused_tokens"] <= TEXT + 1
    assert_judged(oracle("qwen2"), first, second, third)


@pytest.mark.parametrize("mode", MODES)
def test_nobody_else_finds_a_compacted_row(server, mode):
    first = first_of_two(server, "found", mode)
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
def test_samples_continue_one_history(server, mode):
    first = first_of_two(server, "samples", mode)
    sampling = {"max_new_tokens": 40, "temperature": 1.0, "n": 3, "ignore_eos": True, **keys(mode)}
    prompt = first.tokens + draw("sampled", TEXT)
    answers = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    infos = [answer["meta_info"]["skipkv"] for answer in answers]
    assert [info["reused_tokens"] for info in infos] == [len(prompt) - 1] * 3


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["a flush", "new weights"])
def test_a_flush_loses_every_history(server, oracle, model_folder, mode, what):
    """What counts is known to count: a rollout that a trainer stopped, gave new weights and sends
    again is back in its budget."""
    tag = f"{what}-{mode}"
    one = Asked(tag, draw((what, mode), 100), keys(mode))
    stopped = say_until_aborted(server, one, 3)
    server.wait_idle()
    if what == "a flush":
        server.post("/flush_cache")
    else:
        path = str(model_folder("qwen2"))
        assert server.post("/update_weights_from_disk", {"model_path": path})["success"]
    (second,) = say(server, Asked(f"{tag}-again", draw(tag, 1), keys(mode), stopped))
    assert second.info["reused_tokens"] == 0
    assert second.info["kv_reuse_miss"] == {"keep": "none", "budget": "evicted"}[mode]
    prompt_tokens = 100 if mode == "budget" else len(second.prompt)
    assert second.own[-1]["after"] == prompt_tokens + BUDGET
    assert_judged(oracle("qwen2"), second)


@pytest.mark.smoke
def test_a_long_conversation_stays_in_its_budget(server, oracle):
    """20 turns: the row holds the first prompt, the budget and the turn's own text."""
    turn, text = None, 12
    for number in range(20):
        one = Asked(
            f"long-{number}",
            draw(("long", number), 60 if turn is None else text),
            {**keys("budget", "skipkv"), "max_new_tokens": 40},
            turn,
        )
        before, (turn,) = turn, say(server, one)
        if before is not None:
            computed = len(turn.prompt) - turn.info["reused_tokens"]
            assert computed <= text + 1
            assert turn.info["peak_kv_tokens"] <= BUDGET + INTERVAL + 1 + text
    assert turn is not None and len(turn.tokens) == 60 + 19 * text + 20 * 40
    assert turn.info["kv_tokens"] <= BUDGET + INTERVAL
    assert_judged(oracle("qwen2"), turn)
