"""Speculative decoding: what a step records of the tokens that it verifies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_ops import NoHostRead, NoNumberCopy
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import DELIMITER, TEXTS, VOCAB, WORD

from sgl_skipkv.recording.recorder import ModelShape, Recorder
from sgl_skipkv.recording.sentences import PRESETS, Delimiters

WINDOW, SIZE, TRACKS = 4, 6, 2
SHAPE = ModelShape(layers=1, query_heads=1, head_dim=SIZE, hidden_size=SIZE)
CPU = torch.device("cpu")


def recorder(chain_tokens: int = 0, tracks: int = TRACKS) -> Recorder:
    made = Recorder(
        SHAPE,
        **{"track_count": tracks, "query_window": WINDOW, "max_sentences": 5},
        delimiters=Delimiters(TEXTS, VOCAB),
        dtype=torch.float32,
        device=CPU,
        chain_tokens=chain_tokens,
    )
    made.use_rows(tracks + 1)
    for track in range(1, tracks + 1):
        made.start(track, track, PRESETS["any-newline"])
    return made


class Text:
    """A request, token by token."""

    def __init__(self, seed: int) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self.ids: list[int] = []
        self.vectors: list[torch.Tensor] = []

    def another(self) -> tuple[int, torch.Tensor]:
        is_delimiter = torch.rand(1, generator=self._draw) < 0.3
        return DELIMITER if is_delimiter else WORD, torch.randn(SIZE, generator=self._draw)


def record(made: Recorder, rows: list[int], first: list[int], chains: list[list[tuple]]) -> None:
    count = len(chains[0])
    at = torch.tensor([start + i for start in first for i in range(count)])
    rows_now = torch.tensor(rows)
    vectors = torch.stack([vector for chain in chains for _, vector in chain])
    ids = torch.tensor([token for chain in chains for token, _ in chain])
    with NoHostRead(), NoNumberCopy():
        recording = made.decode_recording(rows_now, at)
        made.record_queries(recording, 0, vectors)
        made.record_hidden(recording, ids, 2 * vectors)


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 6), st.integers(0, 99), st.data())
def test_only_what_is_right_is_recorded(chain: int, seed: int, data: st.DataObject) -> None:
    """As without drafts, at every step: the sentences of all but its own tokens, and the queries
    before its own."""
    drafted, plain = recorder(chain), recorder()
    texts, rows = [Text(seed + i) for i in range(TRACKS)], [*range(1, TRACKS + 1)]
    known = [0] * TRACKS
    for _ in range(data.draw(st.integers(1, 12))):
        running = [i for i in range(TRACKS) if data.draw(st.booleans())]
        if not running:
            continue
        for i in running:  # the step before this one, token by token
            for at in range(known[i], len(texts[i].ids)):
                record(plain, [rows[i]], [at], [[(texts[i].ids[at], texts[i].vectors[at])]])
            known[i] = len(texts[i].ids)
        chains = [[texts[i].another() for _ in range(chain)] for i in running]
        record(drafted, [rows[i] for i in running], [known[i] for i in running], chains)
        for i, tried in zip(running, chains, strict=True):
            for token, vector in tried[: data.draw(st.integers(1, chain))]:
                texts[i].ids.append(token)
                texts[i].vectors.append(vector)
        assert recorded(drafted, known) == recorded(plain, known)
    for _ in range(2):  # without overlap the last step has ended when its tokens are compared
        ends = torch.tensor([len(text.ids) for text in texts])
        drafted.add_accepted(torch.tensor(rows), ends)
    for i, text in enumerate(texts):
        for at in range(known[i], len(text.ids)):
            record(plain, [rows[i]], [at], [[(text.ids[at], text.vectors[at])]])
    known = [len(text.ids) for text in texts]
    assert recorded(drafted, known) == recorded(plain, known)


def recorded(made: Recorder, known: list[int]) -> tuple[dict[str, Any], list[Any]]:
    """The sentences of all tracks, and the last queries before a position of each."""
    tables = {name: table[1:].tolist() for name, table in made.sentences.tables().items()}
    counts = [(i + 1, tokens - 1, min(tokens, WINDOW)) for i, tokens in enumerate(known)]
    return tables, [made.queries.read(*count).tolist() for count in counts]


@pytest.mark.parametrize("chain", [2, 4])
def test_queries_stay_until_statistics_have_seen_them(chain: int) -> None:
    """These are brought up to date once ``query_window`` tokens are new: a step before that may
    have brought one less, and the one that runs now writes behind what it may have added."""
    made, text = recorder(chain), Text(5)
    tokens = [text.another() for _ in range(WINDOW - 1 + 2 * chain)]
    first = WINDOW - 1
    for at in range(first):
        record(made, [1], [at], [tokens[at : at + chain]])
    record(made, [1], [first], [tokens[first : first + chain]])
    record(made, [1], [first + chain], [tokens[first + chain :]])
    unseen = first + chain
    found = made.queries.read(1, unseen - 1, unseen)[0, :, 0]
    assert torch.equal(found.flip(0), torch.stack([vector for _, vector in tokens[:unseen]]))


def test_another_request_on_the_track_begins_anew() -> None:
    made, text = recorder(3), Text(1)
    record(made, [1], [7], [[text.another() for _ in range(3)]])
    made.start(2, 1, PRESETS["any-newline"])
    record(made, [2], [9], [[text.another() for _ in range(3)]])
    assert not made.sentences.length[1] and not made.sentences.index[1]
    record(made, [2], [11], [[text.another() for _ in range(3)]])
    assert made.sentences.length[1] + made.sentences.index[1] >= 1


@pytest.mark.parametrize("requests", [1, 2, 3, 5])
def test_tokens_that_pad_a_step_are_recorded_nowhere(requests: int) -> None:
    """DP attention pads it to a multiple of the ranks of a group, and with enough for a chain adds
    row 0."""
    chain, rows = 3, [*range(1, requests + 1)]
    tokens = -(-chain * requests // 4) * 4
    rows += [0] * (tokens // chain - requests)
    made = [recorder(chain, tracks=5) for _ in range(2)]
    for one, padding in zip(made, (0, tokens - chain * requests), strict=True):
        first, text = [7 + row for row in range(requests)], Text(3)
        for _ in range(3):
            steps = [text.another() for _ in range(chain * requests)]
            at = torch.tensor([start + i for start in first for i in range(chain)] + [0] * padding)
            ids = torch.tensor([token for token, _ in steps] + [0] * padding)
            vectors = torch.stack([vector for _, vector in steps] + [torch.ones(SIZE)] * padding)
            recording = one.decode_recording(torch.tensor(rows if padding else rows[:requests]), at)
            one.record_queries(recording, 0, vectors)
            one.record_hidden(recording, ids, vectors)
            first = [start + 2 for start in first]
    padded, plain = made[1], made[0]
    assert torch.equal(padded.queries.data[:, 1:], plain.queries.data[:, 1:])
    for name, table in plain.sentences.tables().items():
        assert torch.equal(padded.sentences.tables()[name][1:], table[1:]), name
    assert torch.equal(padded.chains.hidden[:, 1:], plain.chains.hidden[:, 1:])
