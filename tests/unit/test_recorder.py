"""The recording buffers: rings, sentence tables, tracks that come and go, replayed prompts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import DELIMITER, HIDDEN, LAYERS, WORD, Call, SyntheticServer, words
from torch import Tensor

from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.recording.recorder import QueryRings, Recording
from sgl_skipkv.recording.sentence_table import SentenceTable, TableMoves
from sgl_skipkv.recording.sentences import PRESETS, Delimiters, SentenceTracker

CPU = torch.device("cpu")


def unit(rows: Tensor) -> Tensor:
    """The normalised mean, in fp64."""
    mean = rows.double().mean(dim=0)
    return mean / mean.norm().clamp_min(1e-8)


# -- tracks and rings


def test_track_zero_is_never_free() -> None:
    recorder = SyntheticServer().recorder
    recorder.use_rows(3)
    assert sorted(recorder.free_tracks) == [*range(1, recorder.track_count + 1)]
    assert recorder.track_of_row.tolist() == [0, 0, 0]
    assert recorder.track_of_row.dtype == torch.int64


def query_rings(
    layers: int, tracks: int, window: int, *heads: int, dtype: torch.dtype = torch.float32
) -> QueryRings:
    return QueryRings(torch.zeros(layers, tracks + 1, window, *heads, dtype=dtype))


@given(st.integers(1, 9), st.integers(1, 30), st.data())
def test_ring_gives_back_the_last_queries(window: int, count: int, data: st.DataObject) -> None:
    """As a set, for every layer; older ones are overwritten."""
    ring = query_rings(2, 3, window, 2, 3)
    draw = torch.Generator().manual_seed(count)
    queries = torch.randn(2, count, 2, 3, generator=draw)
    for position in range(count):
        for layer in range(2):
            at = torch.tensor([2]), torch.tensor([position])
            ring.write(layer, *at, queries[layer, position][None])
    asked = data.draw(st.integers(1, min(window, count)))
    found = ring.read(2, count - 1, asked)
    newest_first = queries[:, count - asked :].flip(1)
    assert torch.equal(found, newest_first)
    assert not ring.data[:, [0, 1, 3]].any(), "other tracks are untouched"


def test_ring_keeps_the_cache_precision() -> None:
    ring = query_rings(1, 1, 2, 1, 2, dtype=torch.bfloat16)
    ring.write(0, torch.tensor([1]), torch.tensor([0]), torch.tensor([[[1.0, 1 / 3]]]))
    assert ring.data.dtype == torch.bfloat16
    assert torch.equal(ring.read(1, 0, 1)[0, 0, 0], torch.tensor([1.0, 1 / 3]).bfloat16())


# -- sentence tables


def sentence_table(capacity: int = 8, tracks: int = 2) -> SentenceTable:
    delimiters = Delimiters([(DELIMITER, ".\n"), (2, ":\n")], 3)
    return SentenceTable(tracks, capacity, 4, delimiters, torch.float32, CPU)


def feed(table: SentenceTable, track: int, tokens: list[int], hidden: Tensor) -> None:
    for token, row in zip(tokens, hidden, strict=True):
        table.step(torch.tensor([track]), torch.tensor([token]), row[None])


def rows(count: int, seed: int = 0, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def assert_vector(table: SentenceTable, entry: int, hidden: Tensor, track: int = 1) -> None:
    """The mean of these hidden states."""
    assert torch.allclose(table.vectors[track, entry].double(), unit(hidden), atol=1e-6)


def test_each_track_has_its_own_preset() -> None:
    table, hidden = sentence_table(), rows(4)
    table.reset(1, PRESETS["paper"])
    table.reset(2, PRESETS["any-newline"])
    for track in (1, 2):
        feed(table, track, [WORD, 2, WORD, DELIMITER], hidden)
    assert table.index[1:].tolist() == [0, 1]
    assert_vector(table, 0, hidden)
    assert_vector(table, 0, hidden[:2], track=2)


def test_a_track_without_a_request_closes_nothing() -> None:
    table = sentence_table()
    feed(table, 0, [WORD, DELIMITER, DELIMITER], rows(3))
    assert int(table.index[0]) == 0 and not table.vectors[0].any()


def test_reset_forgets_the_last_request() -> None:
    table = sentence_table()
    table.reset(1, PRESETS["paper"])
    feed(table, 1, words(2, 2, 3)[:-1], rows(6))
    table.reset(1, PRESETS["code"])
    assert not table.total[1].any() and not table.length[1].any() and not table.index[1].any()
    assert not table.after_delimiter[1]
    hidden = rows(2, seed=5)
    feed(table, 1, [WORD, DELIMITER], hidden)
    assert_vector(table, 0, hidden)


def compared(table: SentenceTable, spans: list[tuple[int, int]]) -> Sentences:
    own = len(spans)
    return table.compare([1], [own], [spans], [[*range(own)]], [[-1] * own], [])[0]


def test_entries_of_many_tables_move_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a part holds: the end of one table, the beginning of the next."""
    kept = [[0, 2, 3, 6], [], [1, 5, 6, 7], [4]]
    found = []
    for at_once in (100, 3, 1):
        monkeypatch.setattr("sgl_skipkv.recording.sentence_table._MOVED_AT_ONCE", at_once)
        table = sentence_table(tracks=5)
        table.vectors.copy_(torch.rand(table.vectors.shape, generator=torch.Generator()))
        before = table.vectors.clone()
        TableMoves(table, [4, 1, 2, 5], kept, [False] * 4).apply()
        for track, entries in zip([4, 1, 2, 5], kept, strict=True):
            assert torch.equal(table.vectors[track, : len(entries)], before[track, entries])
        assert torch.equal(table.vectors[3], before[3])
        found.append(table.vectors)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_keeping_nothing() -> None:
    table = sentence_table()
    table.reset(1, PRESETS["paper"])
    feed(table, 1, words(2, 2), rows(4))
    TableMoves(table, [1], [[]], [False]).apply()
    found = compared(table, [])
    assert found.starts.shape == found.stops.shape == found.redundancy.shape == (0,)
    assert found.starts.dtype == torch.int64


def test_compare_raises_each_entry_to_its_most_similar_later_one() -> None:
    table = sentence_table()
    angle = torch.tensor([0.0, 1.0, 0.1, 2.0])
    table.vectors[1, :4, 0], table.vectors[1, :4, 1] = angle.cos(), angle.sin()
    found = compared(table, [(10, 12), (12, 15), (15, 18), (18, 19)])
    between = [[float(torch.cos(a - b)) for b in angle] for a in angle]
    expected = [max(between[0][1:]), max(between[1][2:]), between[2][3], -1.0]
    assert found.redundancy.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.starts.tolist() == [10, 12, 15, 18] and found.stops.tolist() == [12, 15, 18, 19]


# -- whole requests


def test_nothing_is_allocated_before_a_request_needs_it() -> None:
    """A server that nobody asked, or only for policies that score nothing, holds no memory."""
    server = SyntheticServer()
    for policy in ("streaming", "random", "full"):
        server.open(words(4), kv_budget=64, kv_policy=policy)
    assert not {"queries", "sentences"} & vars(server.recorder).keys()
    server.open(words(4), kv_budget=64)
    assert {"queries", "sentences"} <= vars(server.recorder).keys()


def table_state(server: SyntheticServer, call: Call) -> dict[str, Tensor]:
    table, track = server.recorder.sentences, call.state.held.track_id
    parts = {
        name: getattr(table, name)[track]
        for name in ("preset", "total", "length", "index", "after_delimiter")
    }
    tracker = SentenceTracker(Delimiters([(DELIMITER, ".\n")], 4), "paper")
    tracker.feed(call.tokens[: call.generated])
    return {**parts, "vectors": table.vectors[track, : len(tracker.closed)]}


@pytest.mark.parametrize("chunk", [10**9, 7, 1])
@pytest.mark.parametrize("cached", [0, 4, 10])
@pytest.mark.parametrize("generated", [1, 25, 41])
def test_a_recomputed_request_is_recorded_as_if_it_had_never_stopped(
    chunk: int, cached: int, generated: int
) -> None:
    """Sentence sums to the bit, and the queries that its next compaction asks for."""
    tokens = words(3, 1, 6, 2, 9, 4) * 3
    # Where more than a token was generated, the first compaction comes with the next step.
    parameters = {"delimiters": "paper", "interval": 8, "window": 8}
    keys = {"kv_budget": max(generated + 2 - 8, 19), "kv_params": parameters}
    straight, stopped = SyntheticServer(), SyntheticServer()
    call = straight.open(tokens, **keys)
    straight.prefill(call)
    straight.run(call, generated + 1)

    again = stopped.open(tokens, **keys)
    stopped.prefill(again)
    stopped.run(again, generated)
    stopped.retract(again)
    filler = stopped.open(words(2) * 9, seed=3, **keys)  # dirties the track in between
    stopped.prefill(filler)
    stopped.run(filler, 10)
    stopped.finish(filler)
    stopped.prefill(again, cached=cached, chunk=chunk)
    assert again.generated == call.generated == generated + 1

    expected, found = table_state(straight, call), table_state(stopped, again)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    last = call.positions[-1]
    count = len(range(again.state.records_from, last + 1))
    assert count == (7 if generated > 1 else 0)
    for layer in range(LAYERS):
        for server, owner in ((straight, call), (stopped, again)):
            ring = server.recorder.queries.read(owner.state.held.track_id, last, count)[layer]
            assert torch.equal(ring, call.queries[layer, last + 1 - count : last + 1].flip(0))


def test_a_prompt_leaves_its_last_queries_and_no_sentence() -> None:
    server = SyntheticServer(query_window=6)
    # Counted, it is compacted right after the first decode step, which brings the sixth query.
    parameters = {"window": 6, "interval": 8, "count_prompt": True, "protect_prompt": False}
    call = server.open(words(4), prompt=[3, DELIMITER] * 10, kv_budget=13, kv_params=parameters)
    server.prefill(call, chunk=7)
    ring = server.recorder.queries.read(call.state.held.track_id, 19, 5)
    assert torch.equal(ring, call.queries[:, 15:20].flip(1))
    table = server.recorder.sentences
    track_id = call.state.held.track_id
    assert not table.length[track_id] and not table.after_delimiter[track_id]


def test_a_row_of_a_closed_request_writes_to_scratch() -> None:
    """The step that was in flight when the request ended, and whoever gets the row next."""
    server = SyntheticServer(tracks=1)
    call = server.open(words(5, 5), kv_budget=64)
    server.prefill(call)
    server.run(call, 6)
    track, row = call.state.held.track_id, call.row
    server.finish(call)
    before = server.recorder.queries.data[:, track].clone()
    sums = server.recorder.sentences.total[track].clone()
    late = server.recorder.decode_recording(torch.tensor([row]), torch.tensor([16]))
    assert late.tokens is None and late.tracks.tolist() == [0]
    server.recorder.record_queries(late, 0, torch.ones(1, 4, 16))
    server.recorder.record_hidden(late, torch.tensor([WORD]), torch.ones(1, HIDDEN))
    assert torch.equal(server.recorder.queries.data[:, track], before)
    assert torch.equal(server.recorder.sentences.total[track], sums)


def test_queries_may_come_flat_and_only_named_tokens_are_recorded() -> None:
    server = SyntheticServer()
    flat = torch.arange(3 * 4 * 16, dtype=torch.float32).view(3, 64)
    recording = Recording(torch.tensor([2]), torch.tensor([5]), tokens=torch.tensor([1]))
    server.recorder.record_queries(recording, 1, flat)
    stored = server.recorder.queries.read(2, 5, 1)
    assert torch.equal(stored[1, 0], flat[1].view(4, 16)) and not stored[0].any()
    server.recorder.record_hidden(recording, torch.tensor([WORD] * 3), torch.ones(3, HIDDEN))
    assert not server.recorder.sentences.length.any(), "a prefill without replay adds no sentence"


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([WORD, WORD, WORD, DELIMITER]), min_size=150, max_size=150),
    st.sampled_from([8, 9, 40]),
    st.integers(0, 1000),
)
def test_vectors_and_spans_belong_together_through_compactions(
    tokens: list[int], capacity: int, seed: int
) -> None:
    """Also when more sentences close than the table holds: old ones go, none is mixed up."""
    server = SyntheticServer(max_sentences=capacity)
    parameters = {"interval": 30, "tau": 0.0, "delimiters": "paper"}
    call = server.open(tokens, seed=seed, kv_budget=40, kv_params=parameters)
    server.prefill(call)
    table = server.recorder.sentences
    state, closed = call.state, 0
    for _ in server.compacting(call, 149):
        assert len(state.sentences.table) <= capacity - capacity // 4
        assert state.sentences.table == sorted(set(state.sentences.table))
        if len(state.sentences.tracker.closed) > closed:
            closed = len(state.sentences.tracker.closed)
            assert state.sentences.table[-1] == closed - 1, "the newest is always there"
        for entry, sentence in enumerate(state.sentences.table):
            start, stop = state.sentences.tracker.closed[sentence]
            exact = unit(call.hidden[10 + start : 10 + stop])
            # the step that followed may have merged a delimiter into the newest
            if sentence == len(state.sentences.tracker.closed) - 1 and tokens[stop] == DELIMITER:
                exact = unit(call.hidden[10 + start : 10 + stop + 1])
            stored = table.vectors[state.held.track_id, entry].double()
            assert torch.allclose(stored, exact, atol=1e-5), (entry, sentence)
    assert len(call.compactions) == 3
    server.finish(call)
    server.assert_idle()
