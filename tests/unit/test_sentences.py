"""Which tokens close a sentence, where sentences lie, and that CPU and device agree on both."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_skipkv.kernels.reference import sentence_step
from sgl_skipkv.recording.sentences import (
    PRESETS,
    Delimiters,
    SentenceTracker,
    closes_sentence,
    newline_tokens,
)
from sgl_skipkv.request.parts import Compared, SentenceState

# Whether a text closes a sentence under paper, math, code, any-newline -> tokens of the Qwen2/R1
# vocabulary. The paper names the first six. Of what else ends a thought in a real trace it misses
# all: `\]` and a blank line (the tokens are `\` and 2533), a closing formula, a bold heading.
CLOSING: dict[tuple[int, int, int, int], dict[int, str]] = {
    (1, 1, 1, 1): {
        **{198: "\n", 624: ".\n", 340: ")\n", 271: "\n\n", 382: ".\n\n", 692: ")\n\n"},
    },
    # ends of a thought that the paper does not list; in code an operator may end with `>`
    (0, 1, 1, 1): {
        **{2533: "]\n\n", 66426: "$\n\n", 56177: "**\n\n", 3593: ").\n\n", 1939: "?\n\n"},
        **{4894: "!\n", 9338: "...\n", 921: "]\n", 532: "}\n", 280: ";\n", 1406: "\n\n\n"},
        **{715: " \n", 319: "\r\n", 8997: "\u3002\n", 397: ">\n"},
    },
    # introductions, lists, unclosed brackets, line breaks inside a formula: the thought goes on
    (0, 0, 0, 1): {
        **{510: ":\n", 1447: ":\n\n", 2834: ":\r\n", 345: ",\n", 515: "{\n", 1006: "(\n"},
        **{9640: "[\n", 14750: "=\n", 79076: "&\n", 5661: "\\\n"},
    },
    # in code an operator continues on the next line as well
    (0, 1, 0, 1): {16930: "+\n", 6913: "-\n", 5894: "/\n", 7360: "|\n", 30558: "<\n"},
    # no newline at the end
    (0, 0, 0, 0): {13: ".", 13824: " Wait"},
}
QWEN = [(text, closes) for closes, tokens in CLOSING.items() for text in tokens.values()]
PRESET_NAMES = ("paper", "math", "code", "any-newline")


@pytest.fixture(scope="module")
def qwen(shared_data: Path) -> dict[int, bytes]:
    """The published vocabulary: one line per token, base64 and rank."""
    lines = (shared_data / "qwen.tiktoken").read_bytes().splitlines()
    pairs = [line.split() for line in lines]
    return {int(rank): base64.b64decode(token) for token, rank in pairs}


def test_presets_are_those_of_the_contract() -> None:
    assert tuple(PRESETS) == PRESET_NAMES
    assert sorted(PRESETS.values()) == [1, 2, 4, 8]


@pytest.mark.parametrize(("text", "closes"), QWEN, ids=lambda item: repr(item)[:20])
def test_which_qwen_tokens_close_a_sentence(text: str, closes: tuple[int, ...]) -> None:
    assert tuple(int(closes_sentence(text, preset)) for preset in PRESET_NAMES) == closes


def test_the_table_quotes_the_vocabulary(qwen: dict[int, bytes]) -> None:
    for token_id, text in (pair for tokens in CLOSING.values() for pair in tokens.items()):
        assert qwen[token_id] == text.encode(), token_id


def test_presets_on_the_whole_vocabulary(qwen: dict[int, bytes]) -> None:
    texts = {rank: token.decode(errors="replace") for rank, token in qwen.items()}
    delimiters = Delimiters(texts.items(), vocab_size=152_064)
    closing = {
        preset: {rank for rank in texts if delimiters.closes(rank, PRESETS[preset])}
        for preset in PRESET_NAMES
    }
    counts = {"paper": 6, "math": 1771, "code": 1612, "any-newline": 2178}
    assert {preset: len(ranks) for preset, ranks in closing.items()} == counts
    assert closing["paper"] < closing["code"] < closing["math"] < closing["any-newline"]
    assert closing["any-newline"] == {rank for rank, token in qwen.items() if token[-1:] == b"\n"}
    # the padded tail of the embedding, past the tokenizer's last token
    assert not any(delimiters.bits[len(qwen) :])


def test_delimiters_ignore_ids_outside_the_vocabulary() -> None:
    delimiters = Delimiters([(3, "\n"), (7, "\n")], vocab_size=5)
    assert len(delimiters.bits) == 5
    assert [delimiters.closes(i, PRESETS["paper"]) for i in (2, 3, 4, 5, 7, 10**9)] == [
        *(False, True, False, False, False, False)
    ]


# -- from a tokenizer


@pytest.mark.parametrize(
    ("vocab", "texts"),
    [
        ({"a": 0, ".Ċ": 2, "ĊĊ": 1}, {0: "a", 1: "\n\n", 2: ".\n"}),  # byte-level BPE
        ({"a": 0, "<0x0A>": 1, ".\n": 2}, {0: "a", 1: "\n", 2: ".\n"}),  # byte fallback
        ({b"\xe4": 0, b".\n": 2, b"\n\n": 1}, {0: "?", 1: "\n\n", 2: ".\n"}),  # bytes, cut anywhere
    ],
)
def test_newline_tokens_of_each_kind_of_vocabulary(
    vocab: dict[str | bytes, int], texts: dict[int, str]
) -> None:
    decoded: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.extend(token_ids)
        return "".join(texts[i] for i in token_ids)

    tokenizer = SimpleNamespace(get_vocab=lambda: vocab, decode=decode)
    assert newline_tokens(tokenizer) == [(1, texts[1]), (2, texts[2])]
    assert decoded == [1, 2], "only entries that can hold a newline are decoded"


def test_newline_tokens_of_a_hugging_face_tokenizer() -> None:
    from tiny_models import LINE_ENDS, VOCAB_SIZE, build_tokenizer

    found = newline_tokens(build_tokenizer())
    assert {text for _, text in found} == set(LINE_ENDS)
    delimiters = Delimiters(found, VOCAB_SIZE)
    counts = {name: sum(bool(b & bit) for b in delimiters.bits) for name, bit in PRESETS.items()}
    assert counts == {"paper": 6, "math": 10, "code": 10, "any-newline": 12}


def test_newline_tokens_of_byte_level_bpe_decode_to_text() -> None:
    """A tokenizer trained here, so the raw entries really are spelled with the byte alphabet."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(["x.\n\n" * 20, "y:\n" * 20], trainer)
    found = dict(newline_tokens(PreTrainedTokenizerFast(tokenizer_object=raw)))
    assert "\n" in found.values() and all("\n" in text for text in found.values())
    assert any(text.endswith("\n\n") for text in found.values())


# -- spans

WORD, DELIMITER = 0, 1
STREAM = st.lists(st.sampled_from([WORD, DELIMITER]), max_size=60)


def tracker(preset: str = "paper") -> SentenceTracker:
    return SentenceTracker(Delimiters([(DELIMITER, "\n")], vocab_size=2), preset)


def naive_spans(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Cut behind every run of delimiters; a run at the very start is a sentence of its own."""
    cuts = [
        i + 1
        for i, token in enumerate(tokens)
        if token == DELIMITER and (i + 1 == len(tokens) or tokens[i + 1] == WORD)
    ]
    return list(zip([0, *cuts], cuts, strict=False))


@given(STREAM)
def test_spans_equal_a_cut_behind_every_run_of_delimiters(tokens: list[int]) -> None:
    found = tracker()
    found.feed(tokens)
    assert found.closed == naive_spans(tokens)
    assert found.seen_tokens == len(tokens)
    assert found.after_delimiter == (tokens[-1:] == [DELIMITER])
    # They tile what was generated.
    tiled = [i for start, stop in found.closed for i in range(start, stop)]
    assert tiled == list(range(found.open_start)) and all(a < b for a, b in found.closed)
    assert found.open_start + found.open_tokens == len(tokens)
    assert DELIMITER not in tokens[found.open_start :]


@given(STREAM, st.lists(st.integers(0, 60), max_size=8))
def test_feeding_in_pieces_is_feeding_at_once(tokens: list[int], cuts: list[int]) -> None:
    whole, pieces = tracker(), tracker()
    whole.feed(tokens)
    edges = [0, *sorted(cuts), len(tokens)]
    for start, stop in itertools.pairwise(edges):
        pieces.feed(tokens[start:stop])
    assert vars(pieces) | {"_delimiters": 0} == vars(whole) | {"_delimiters": 0}


# -- the device's half


@settings(max_examples=60)
@given(
    st.lists(STREAM, min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_device_and_cpu_agree_on_sentences_and_their_means(
    streams: list[list[int]], seed: int, dtype: torch.dtype
) -> None:
    """One track per stream, a token per step; streams that ended write to scratch, track 0."""
    width, capacity, rows = 5, 64, len(streams) + 1
    generator = torch.Generator().manual_seed(seed)
    steps = max((len(stream) for stream in streams), default=0)
    hidden = torch.randn(steps, len(streams), width, generator=generator).to(dtype)
    device = {
        **{"total": torch.zeros(rows, width), "length": torch.zeros(rows)},
        "index": torch.zeros(rows, dtype=torch.int64),
        "after_delimiter": torch.zeros(rows, dtype=torch.bool),
        "vectors": torch.zeros(rows, capacity, width),
    }
    for step in range(steps):
        live = [step < len(stream) for stream in streams]
        tracks = torch.tensor([i + 1 if alive else 0 for i, alive in enumerate(live)])
        closes = [alive and s[step] == DELIMITER for s, alive in zip(streams, live, strict=True)]
        sentence_step(hidden[step], tracks, torch.tensor(closes), **device)
    for i, stream in enumerate(streams):
        found = tracker()
        found.feed(stream)
        closed = int(device["index"][i + 1]) + bool(device["after_delimiter"][i + 1])
        assert closed == len(found.closed)
        for sentence, (start, stop) in enumerate(found.closed):
            mean = hidden[start:stop, i].double().mean(dim=0)
            exact = mean / mean.norm().clamp_min(1e-8)
            stored = device["vectors"][i + 1, sentence].double()
            assert (stored - exact).abs().max() < 1e-6 * max(1.0, float(1 / mean.norm()))
        assert not device["vectors"][i + 1, len(found.closed) :].any()


def test_the_most_similar_sentence_of_any_compaction_is_named() -> None:
    sentences = SentenceState(SentenceTracker(Delimiters([], 4), "math"))
    for entries, best in (
        ([3, 5, 8], [[0.9, 0.2, -1.0], [1, 2, 0]]),
        ([3, 8, 9], [[0.4, 0.3, -1.0], [2, 2, 0]]),  # the fifth has left
    ):
        sentences.compared = Compared(entries, torch.tensor(best, dtype=torch.float64), None)
        sentences.read_similar()
    assert sentences.similar == {3: (5, 0.9), 5: (8, 0.2), 8: (9, 0.3)}
