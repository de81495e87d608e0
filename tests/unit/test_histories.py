"""Which history a prompt continues, against a search through all of them."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import replace
from itertools import count, takewhile
from operator import eq
from sys import getsizeof
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import SyntheticServer, served

from sgl_skipkv.offload.host_memory import HostCopies
from sgl_skipkv.recording.sentences import Delimiters, SentenceTracker
from sgl_skipkv.request.last_compaction import LastCompaction
from sgl_skipkv.request.parts import Redundancy
from sgl_skipkv.reuse import history as module
from sgl_skipkv.reuse.continuation import continue_history, first_prompt_of
from sgl_skipkv.reuse.histories import MOST_ALIKE, Histories, HistoryMatch
from sgl_skipkv.reuse.history import History, Recordings, private_keys


class Drawn(NamedTuple):
    """What a history is made of; the last compaction is before the last token.

    The next prompt has neither the last ``opener`` tokens of the prompt nor the first ``thought``
    tokens behind it. It may have the last ``edge`` tokens of the prompt otherwise.
    """

    namespace: str
    tokens: list[int]
    prompt_tokens: int
    compacted_at: int
    thought: int = 0
    opener: int = 0
    edge: int = 0

    @property
    def sent(self) -> list[int]:
        prompt = self.prompt_tokens
        return self.tokens[: prompt - self.opener] + self.tokens[prompt + self.thought :]


def with_thought(drawn: Drawn, thought: int, opener: int) -> Drawn:
    """At least one token behind the thought was there at the last compaction."""
    room = drawn.compacted_at - 1 - drawn.prompt_tokens
    if room < 1 or not thought:
        return drawn
    opener = opener % (drawn.prompt_tokens + 1)
    edge = min(drawn.prompt_tokens, opener + thought % 2)
    return drawn._replace(thought=1 + thought % room, opener=opener, edge=edge)


# Two tokens, so that beginnings are often alike.
_TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=12)
_DRAWN = st.builds(
    lambda namespace, tokens, one, other, thought, opener: with_thought(
        Drawn(namespace, tokens, *sorted((one % len(tokens) or 1, other % len(tokens) or 1))),
        *(thought, opener),
    ),
    *(st.sampled_from("ab"), _TOKENS, *[st.integers(0, 99)] * 2),
    *(st.just(0) | st.integers(0, 99), st.integers(0, 2)),
)


def history(drawn: Drawn) -> History:
    kept = torch.arange(drawn.compacted_at)
    last = LastCompaction(kept, drawn.compacted_at, drawn.compacted_at, kept, kept, None)
    key = private_keys(len(drawn.tokens))
    tokens, sent = array("q", drawn.tokens), array("q", drawn.sent)
    return History(
        *("request", drawn.namespace, tokens, sent if drawn.thought else tokens, key),
        *(drawn.prompt_tokens, drawn.edge, drawn.prompt_tokens, last, None),
    )


def common_tokens(one: list[int], other: list[int]) -> int:
    return len([*takewhile(bool, map(eq, one, other))])


@given(st.lists(_DRAWN, max_size=8), st.lists(st.integers(0, 7), max_size=4), _TOKENS)
def test_the_farthest_history_is_found(
    drawn: list[Drawn], dropped: list[int], prompt: list[int]
) -> None:
    histories, known = Histories(1 << 20, pinned=False), {}
    for one in drawn:
        known[history(one)] = one
    for one in known:
        histories.add(one)
    for i in dropped:
        if i < len(drawn):
            gone = [*known][min(i, len(known) - 1)] if known else None
            if gone is not None:
                histories.drop(gone)
                del known[gone]
    cuts = {
        one: min(common_tokens(made_of.sent, prompt), len(prompt) - 1)
        for one, made_of in known.items()
        if made_of.namespace == "a"
    }
    usable = {
        one: cut
        for one, cut in cuts.items()
        if cut + len(known[one].tokens) - len(known[one].sent) >= known[one].compacted_at
    }
    matches, left = histories.find("a", prompt)
    reused = [match.cut - match.history.unsent_tokens for match in matches]
    assert reused == sorted(usable.values(), reverse=True), "the farthest first"
    assert {match.history: cut for match, cut in zip(matches, reused, strict=True)} == usable
    begun = [
        known[one].prompt_tokens
        for one in cuts.keys() - usable.keys()
        if prompt[: (shared := known[one].prompt_tokens - known[one].edge)]
        == known[one].tokens[:shared]
    ]
    assert left == max((length for length in begun if length < len(prompt)), default=0)


def test_of_equally_far_histories_the_one_with_most_kv_is_first() -> None:
    """Two requests of other budgets had the same prompt and the same output."""
    drawn, histories = Drawn("a", [0, 1, 1, 0, 1], 1, 4), Histories(1 << 20, pinned=False)
    more, less = (replace(history(drawn), key=private_keys(slots)) for slots in (4, 3))
    without_kv = replace(more, key=private_keys(0))
    for one in (more, less, without_kv):
        histories.add(one)
    matches, _ = histories.find("a", [*drawn.tokens, 7])
    assert [match.history for match in matches] == [more, less, without_kv]


def test_the_same_prompt_again_leaves_no_history() -> None:
    """Not even where the next turn has none of the opener that ends it."""
    histories, opener = Histories(1 << 20, pinned=False), [8, 9]
    drawn = Drawn("a", [0, 1, *opener, 5, 6, 7], 4, 6, thought=1, opener=2, edge=2)
    histories.add(history(drawn))
    assert histories.find("a", [0, 1, *opener]) == ([], 0)
    assert histories.find("a", [0, 1, *opener, 3]) == ([], 4)


@given(st.lists(_DRAWN, min_size=1, max_size=20), st.integers(0, 20_000))
def test_the_least_recently_used_goes_first(drawn: list[Drawn], limit: int) -> None:
    histories, added = Histories(limit, pinned=False), [history(one) for one in drawn]
    kept: list[History] = []
    for one in added:
        histories.add(one)
        kept += [one] if one.nbytes <= limit else []
        while sum(known.nbytes for known in kept) > limit:
            kept.pop(0)
    assert [*histories._by_use] == kept
    histories.lose_all()
    assert len(histories) == 0 and histories.find("a", [0, 1, 1]) == ([], 0)


def test_a_continued_history_is_dropped_later() -> None:
    one, other = history(Drawn("a", [0, 1], 1, 1)), history(Drawn("a", [1, 1], 1, 1))
    histories = Histories(one.nbytes + other.nbytes, pinned=False)
    histories.add(one)
    histories.add(other)
    histories.use(one)
    histories.add(history(Drawn("a", [2, 2], 1, 1)))
    assert [match.history for match in histories.find("a", [0, 1, 1])[0]] == [one]
    assert histories.find("a", [1, 1, 1])[0] == []


def test_a_search_does_not_grow_with_what_was_sent() -> None:
    """Histories of one prompt, whether they begin alike or not; and they are no longer found after
    a flush."""
    histories = Histories(1 << 30, pinned=False)
    alike = [history(Drawn("a", [0, 1, 1, 0, one], 3, 4)) for one in range(2 * MOST_ALIKE)]
    apart = [history(Drawn("a", [0, 1, 1, 2 + one, 0], 3, 5)) for one in range(2 * MOST_ALIKE)]
    for one in [*alike, *apart]:
        histories.add(one)
    assert len(histories) == MOST_ALIKE + len(apart), "of those that begin alike, the newest"
    matches, left = histories.find("a", [0, 1, 1, 0, 9_999, 9_999])
    assert [match.history for match in matches] == alike[: MOST_ALIKE - 1 : -1] and left == 3
    (match,), left = histories.find("a", [0, 1, 1, 7, 0, 0])
    assert match.history is apart[5] and left == 3, "others went on from the same prompt"
    histories.lose_all()
    assert histories.find("a", [0, 1, 1, 0, 9_999, 9_999]) == ([], 0)


def test_what_cannot_be_continued_takes_no_place() -> None:
    """Others answered the same prompt: their histories go on behind its end."""
    histories = Histories(1 << 30, pinned=False)
    first = history(Drawn("a", [0, 1, 0, 1, 0], 3, 4))
    histories.add(first)
    for one in range(MOST_ALIKE + 1):
        histories.add(history(Drawn("a", [0, 1, 0, 1, 0, 7, one], 6, 6)))
    matches, left = histories.find("a", [0, 1, 0, 1, 0, 7])
    assert [match.history for match in matches] == [first] and left == 0


def test_the_last_used_of_those_that_begin_alike_stay() -> None:
    histories = Histories(1 << 30, pinned=False)
    root = history(Drawn("a", [0, 1, 5], 1, 2))
    histories.add(root)
    for one in range(2 * MOST_ALIKE):
        histories.use(root)
        histories.add(history(Drawn("a", [0, 1, 6 + one], 1, 2)))
    matches, _ = histories.find("a", [0, 1, 5, 5])
    assert matches[0].history is root and len(histories) == MOST_ALIKE


def test_one_that_is_too_large_drives_out_none() -> None:
    small = history(Drawn("a", [0, 1, 1], 1, 2))
    histories = Histories(2 * small.nbytes, pinned=False)
    histories.add(small)
    histories.add(replace(history(Drawn("a", [0, 1, 0], 1, 2)), rid="r" * 10**5))
    assert [*histories._by_use] == [small]


def test_a_prompt_that_leaves_one_history_and_ends_within_anothers_prompt() -> None:
    """The second was compacted before its prompt, as one that continues a history."""
    histories = Histories(1 << 30, pinned=False)
    for drawn in (
        Drawn("a", [0, 1, 2, 3, 4], 3, 5),
        Drawn("a", [0, 1, 9, 9], 3, 2),
        Drawn("a", [0, 1, 2, 5, 6], 1, 2),
    ):
        histories.add(history(drawn))
    matches, left = histories.find("a", [0, 1, 2, 5, 6, 6])
    assert [match.cut for match in matches] == [5, 2] and left == 3


def test_longer_prompts_of_one_text_bound_the_search_too() -> None:
    histories, text = Histories(1 << 30, pinned=False), [7] * (3 * MOST_ALIKE)
    for length in range(2, 2 * MOST_ALIKE):
        histories.add(history(Drawn("a", text[:length], 1, length - 1)))
    matches, _ = histories.find("a", text)
    assert [match.cut for match in matches] == [*range(2 * MOST_ALIKE - 1, MOST_ALIKE - 1, -1)]


def test_what_a_client_chose_the_length_of_is_counted() -> None:
    plain = history(Drawn("a", [0, 1, 1], 1, 2))
    assert plain.nbytes > 1024
    assert replace(plain, rid="r" * 10**6).nbytes > plain.nbytes + 999_000
    salted = replace(plain, namespace=("keep", None, "s" * 10**6))
    assert salted.nbytes > plain.nbytes + 999_000


def test_a_size_stays_as_it_was_counted() -> None:
    """Python keeps the UTF-8 form of a string once somebody has asked for it."""
    one = replace(history(Drawn("a", [0, 1, 1], 1, 2)), rid="".join(["日"] * 10**5))
    histories = Histories(2 * one.nbytes, pinned=False)
    histories.add(one)
    added, before = one.nbytes, getsizeof(one.rid)
    pickle.dumps(one.rid)
    assert before < getsizeof(one.rid) < one.nbytes == added
    histories.drop(one)
    assert histories._used_bytes == 0


def test_continued_recordings_are_dropped_later() -> None:
    mib = 1 << 20
    histories = Histories(4 * mib, pinned=False)
    histories.memory.reserve()
    for first in (2, 3):
        copy = HostCopies(histories.memory).add(torch.zeros(mib, dtype=torch.uint8))
        known = Recordings((), (), (), (), None, {"queries": copy}, 3, {}, 0, 0)
        histories.add(replace(history(Drawn("a", [first, 0, 1], 1, 2)), recordings=known))
        del copy, known
    used, other = histories._by_use
    histories.use(used)
    del other
    assert histories.make_room(3 * mib) and [*histories._by_use] == [used]


def test_which_histories_need_a_missing_page() -> None:
    """Their rows begin with the pages up to it, and reach into it."""
    one = history(Drawn("a", [0, 1, 1, 0, 1, 0], 1, 2))
    page = 2
    for cut in range(1, 7):
        for known in range(0, 6, page):
            match = HistoryMatch(one, cut)
            assert match.needs(one.pages[: known + page], page) == (cut > known)
    assert not HistoryMatch(one, 6).needs(private_keys(4), page), "a row of other keys"


def test_recordings_make_room_for_recordings() -> None:
    """Histories without any stay: dropping them would free nothing."""
    mib = 1 << 20
    histories = Histories(4 * mib, pinned=False)
    histories.memory.reserve()
    plain = history(Drawn("a", [0, 1, 1], 1, 2))
    histories.add(plain)
    for first in (2, 3, 4):
        copy = HostCopies(histories.memory).add(torch.zeros(mib, dtype=torch.uint8))
        known = Recordings((), (), (), (), None, {"queries": copy}, 3, {}, 0, 0)
        histories.add(replace(history(Drawn("a", [first, 0, 1], 1, 2)), recordings=known))
        del copy, known
    assert len(histories) == 4 and not histories.memory.fits(2 * mib)
    assert histories.make_room(2 * mib) and len(histories) == 3, "the oldest with recordings"
    assert not histories.make_room(5 * mib), "more than there is"
    assert [match.history for match in histories.find("a", [0, 1, 1, 1])[0]] == [plain]


def test_what_a_waiting_request_will_continue_makes_no_room() -> None:
    """Its recordings stay in host memory, and so do those of others that were used later."""
    mib = 1 << 20
    histories = Histories(4 * mib, pinned=False)
    histories.memory.reserve()
    held = []
    for first in (2, 3, 4):
        held.append(HostCopies(histories.memory).add(torch.zeros(mib, dtype=torch.uint8)))
        known = Recordings((), (), (), (), None, {"queries": held[-1]}, 3, {}, 0, 0)
        histories.add(replace(history(Drawn("a", [first, 0, 1], 1, 2)), recordings=known))
    assert not histories.make_room(2 * mib) and len(histories) == 2
    held.clear()
    del known
    assert histories.make_room(2 * mib) and len(histories) == 2, "the first one's has come back"


def test_where_the_first_prompt_of_a_conversation_ends() -> None:
    """And who wrote what behind it; with "keep" the whole prompt stays as it is."""
    plain = history(Drawn("a", [0, 1, 2, 3, 4, 5, 6, 7], 3, 6))
    known = Recordings((), [(4, 5), (6, 8)], (), (), None, None, 8, {}, 0, 2)
    counted, prompt = replace(plain, recordings=known), array("q", [0, 1, 2, 3, 4, 5, 6, 9, 9])
    assert first_prompt_of(HistoryMatch(plain, 7), prompt) is None
    first = first_prompt_of(HistoryMatch(counted, 7), prompt)
    assert first == (3, 2, [(4, 5), (6, 7), (7, 9)])


def test_what_lost_its_kv_says_where_its_conversation_begins() -> None:
    """The same prompts find it. With "keep" nothing stays, and of no history its recordings."""
    histories, prompt = Histories(1 << 30, pinned=False), array("q", [0, 1, 2, 3, 4, 5, 6, 9, 9])
    histories.memory.reserve()
    copy = HostCopies(histories.memory).add(torch.zeros(64))
    known = Recordings(((0, 1),), [(4, 5)], (0,), (0,), None, {"x": copy}, 8, {"x": copy}, 6, 2)
    kept = history(Drawn("keep", [0, 1, 2, 3, 4, 5, 6, 7], 3, 6))
    counted = replace(kept, namespace="budget", recordings=known)
    for one in (kept, counted):
        histories.add(one)
    assert [match.cut for match in histories.find("keep", prompt)[0]] == [7]
    (before,), _ = histories.find("budget", prompt)
    expected = first_prompt_of(before, prompt)
    histories.lose_all()
    assert histories.find("keep", prompt) == ([], 0)
    (after,), left = histories.find("budget", prompt)
    assert (after.cut, left) == (7, 0) and not after.history.has_kv
    assert first_prompt_of(after, prompt) == expected == (3, 2, [(4, 5), (7, 9)])
    assert after.history.nbytes < counted.nbytes
    del before, counted, known, copy, one
    assert not histories.memory.used_bytes
    edited = array("q", [0, 1, 2, 3, 9, 9, 9])
    assert histories.find("budget", edited) == ([], 3), "it differs before the last compaction"


def test_where_the_first_prompt_ends_behind_dropped_thoughts() -> None:
    """The next prompt has neither the thoughts nor what opened them."""
    drawn = Drawn("a", [0, 1, 8, 5, 6, 7], 3, 5, thought=1, opener=1, edge=1)
    known = Recordings((), (), (), (), None, None, 6, {}, 0, 1)
    counted, prompt = replace(history(drawn), recordings=known), array("q", [0, 1, 6, 7, 9])
    assert first_prompt_of(HistoryMatch(counted, 6), prompt) == (2, 1, [(2, 5)])


def test_no_private_key_is_a_token_id_or_used_twice() -> None:
    keys = [*private_keys(1000), *private_keys(0), *private_keys(1), *private_keys(70_000)]
    assert len(set(keys)) == len(keys) and min(keys) > 1 << 40


def test_private_keys_never_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_lineages", count(2**40 - 1))
    last, first = private_keys(1 << 16), private_keys(2)
    assert last[-1] < 2**63 and first[0] == 1 << 62


def test_a_history_shares_no_memory_with_a_batch() -> None:
    """Of a compaction of many requests it would hold all that was of the others."""
    batch, host = torch.arange(10**4), torch.arange(10**4)
    last = LastCompaction(batch[5:8], 9, 9, host[5:8], torch.ones(64).bool()[3], None)
    own = last.with_own_memory()
    assert torch.equal(own.positions, last.positions) and own.read() == last.read()
    for one in (own.positions, own.kept, own.finite):
        assert one.untyped_storage().nbytes() == one.nbytes


def test_everything_that_a_history_holds_is_counted() -> None:
    """On the CPU it takes the server's memory, beside what is in the slab."""
    none = Recordings((), (), (), (), None, None, 3, {}, 0, 0)
    plain = replace(history(Drawn("a", [0, 1, 1], 1, 2)), recordings=none)
    numbers = torch.zeros(1000)
    for held, least in (
        ({"statistics": {"a": numbers, "b": numbers}}, 8000),
        ({"closed": [(0, 1)] * 1000}, 1000 * 16),
        ({"input_spans": [(0, 1)] * 1000}, 1000 * 16),
        ({"live": range(1000)}, 1000 * 8),
        ({"table": range(1000)}, 1000 * 8),
        ({"redundancy": Redundancy(range(1000), numbers)}, 1000 * 8 + 4000),
    ):
        larger = replace(plain, recordings=replace(none, **held))
        assert larger.nbytes >= plain.nbytes + least


def test_a_row_is_continued_behind_what_its_statistics_have_seen() -> None:
    """In front of that there would be more statistics than tokens."""
    plain = history(Drawn("a", [0, 1, 1, 0, 1, 0], 1, 2))
    known = Recordings((), (), (), (), None, None, 6, {}, 0, 0)
    assert replace(plain, recordings=known).first_cut == 2
    followed = replace(known, statistics={"received": torch.zeros(5)}, followed_tokens=5)
    assert replace(plain, recordings=followed).first_cut == 5


def test_a_history_that_is_not_continued_to_its_end_has_no_sentence_behind_that() -> None:
    """One that ends there is the last; the next one begins behind it."""
    state = served(SyntheticServer(), prefill=False, kv_reuse="budget").state
    found, numbers = [(0, 5), (5, 10), (10, 20)], torch.tensor([0.1, 0.2, 0.3])
    sentences = (0, 1, 2)
    known = Recordings(
        *(found, (), sentences, sentences, Redundancy(sentences, numbers), None, 40, {}, 40, 1)
    )
    left = replace(history(Drawn("a", [3] * 10 + [0] * 30, 10, 15)), recordings=known)
    tracker = SentenceTracker(Delimiters([], 4), "math")
    continue_history(state, HistoryMatch(left, 20), tracker, 10)
    assert state.sentences.tracker.closed == found[:2]
    assert state.sentences.live == state.sentences.table == [0, 1]
    redundancy = state.sentences.redundancy
    assert redundancy is not None and (*redundancy.sentences,) == (0, 1)
    assert torch.equal(redundancy.values, numbers[:2])
