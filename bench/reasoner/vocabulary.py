"""The tokenizer of the bundled model: byte-level BPE, built word by word, not fitted.

Any UTF-8 text can be encoded. Every name, item, number 0-99 (after a space), template word and
sentence delimiter (`.\\n`, `.\\n\\n`, `?`, ...) is one token. Merges are appended per word in a
fixed order, so a word's own merges always outrank those added after it and it stays one token;
the file is the same on every machine.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from bench.reasoner.problems import ITEMS, NAMES

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_START = "<think>"
THINK_END = "</think>"
OPEN_REPLY = f"{TURN_START}assistant\n{THINK_START}\n"
"""What a prompt ends with."""

# Qwen's pattern, but a number takes its leading space and two digits, so that ` 42` is one piece.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_WORDS = (
    "How many does have has as plus minus more fewer than and it is given so This not about As for "
    "Wait let me check again Alternatively redo Answer system user assistant You are a the helpful"
)
_DELIMITERS = (".\n", ".\n\n", "\n\n", "\n", "?\n", "?\n\n", ")\n", ")\n\n", ":\n", ",\n")

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- set content = message['content'] %}"
    # A reply comes back without the `<think>` that its prompt ended with: put it back, so that
    # the next turn's prompt repeats this turn's tokens and finds them in the prefix cache.
    "{%- if message['role'] == 'assistant' and '</think>' in content"
    " and not content.startswith('<think>') %}"
    "{%- set content = '<think>\\n' + content %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)


def wanted_pieces() -> list[str]:
    """Every piece of text that must be one token, in the order in which merges are made."""
    pieces = list(_DELIMITERS)
    for word in (*_WORDS.split(), *NAMES, *ITEMS):
        pieces += [word, f" {word}"]
    # A number without its space is the number of a fact: another token than the same count.
    pieces += [str(number) for number in range(10, 100)]
    pieces += [f" {number}" for number in range(100)]
    pieces += [f" {sign}" for sign in "+-=*/"]
    return list(dict.fromkeys(pieces))


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes, sorted (the order fixes the token ids)."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _symbols_of(piece: str) -> list[str]:
    """A piece as a list of byte symbols."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return list(byte_level.pre_tokenize_str(piece)[0][0])


def _apply_merges(symbols: list[str], rank: dict[tuple[str, str], int]) -> list[str]:
    """Plain BPE: merge the pair of lowest rank until none is left."""
    while len(symbols) > 1:
        pairs = list(pairwise(symbols))
        best = min(pairs, key=lambda pair: rank.get(pair, len(rank)))
        if best not in rank:
            break
        place = pairs.index(best)
        symbols = [*symbols[:place], best[0] + best[1], *symbols[place + 2 :]]
    return symbols


def build_tokenizer(more_pieces: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer, the same on every request. ``more_pieces`` become one token each, too."""
    vocab = {symbol: index for index, symbol in enumerate(_byte_symbols())}
    rank: dict[tuple[str, str], int] = {}
    for piece in (*wanted_pieces(), *more_pieces):
        symbols = _apply_merges(_symbols_of(piece), rank)
        while len(symbols) > 1:
            pair = (symbols[0], symbols[1])
            rank[pair] = len(rank)
            vocab.setdefault(pair[0] + pair[1], len(vocab))
            symbols = _apply_merges(_symbols_of(piece), rank)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(rank)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (END_OF_TEXT, TURN_START, TURN_END)]
    )
    # Not special: they have to survive `skip_special_tokens` in the text that users get back.
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (THINK_START, THINK_END)])
    return tokenizer


def token_id(tokenizer: Tokenizer, piece: str) -> int:
    """The id of a piece that is one token."""
    ids = tokenizer.encode(piece).ids
    assert len(ids) == 1, f"{piece!r} is {len(ids)} tokens"
    return int(ids[0])


def message_text(role: str, content: str) -> str:
    """One message as the chat template renders it."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def prompt_text(message: str) -> str:
    """One user message as the chat template renders it, up to where the model goes on."""
    return message_text("user", message) + OPEN_REPLY


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    _write(folder / "chat_template.jinja", CHAT_TEMPLATE)


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
