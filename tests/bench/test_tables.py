"""The documents quote rows and nothing else; test_commands.py has the check itself."""

from __future__ import annotations

import re
from pathlib import Path

from bench.lib.pairs import paired_ratio
from bench.lib.table_text import (
    FEWEST_ROUNDS,
    LONGEST_COMMAND,
    spread,
    table,
    without_flags,
)
from bench.report import __main__ as tables

ROOT = Path(__file__).resolve().parents[2]


def test_rows_name_no_place_of_the_machine() -> None:
    sources = [*(ROOT / "bench" / "rows").glob("*.csv"), *(ROOT / "docs").glob("*.md")]
    places = re.compile(r"[ =\"](/(tmp|home|root|work|mnt|data)/\S*)")
    found = {
        f"{path.name}: {match[1]}"
        for path in sources
        for match in places.finditer(path.read_text())
    }
    assert len(sources) > 20 and not found


def test_the_check_sees_a_changed_number() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    changed = text.replace("| hard | `skipkv+` | ", "| hard | `skipkv+` | 9")
    assert changed != text == tables.rendered(changed)


def test_captions_print_no_long_command() -> None:
    captions = re.compile(r"^.*SGLang .*`bench/rows/\w+\.csv`.*$", re.MULTILINE)
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    found = [caption for text in texts for caption in captions.findall(text)]
    spans = [span for caption in found for span in re.findall(r"`([^`]+)`", caption)]
    assert len(found) > 40 and max(map(len, spans)) <= LONGEST_COMMAND


def test_a_long_command_is_left_to_its_row() -> None:
    row = {"device": "a CPU", "sglang": "1", "torch": "2", "date": "today"}
    short, long = "python tests/launches.py", f"python -m bench.decode {'--flag ' * 20}"
    assert without_flags(long) == "python -m bench.decode"
    assert without_flags(f"{short} --record") == short
    captions = [
        table(["one"], [["1"]], [{**row, "command": command}], "decode").splitlines()[-1]
        for command in (short, long)
    ]
    start = "a CPU, SGLang 1, torch 2, today:"
    assert captions == [
        f"{start} `{short}` (`bench/rows/decode.csv`).",
        f"{start} `python -m bench.decode` (`bench/rows/decode.csv`). "
        "The rows' `command` column has all flags.",
    ]


def test_a_caption_has_the_first_and_the_last_date() -> None:
    row = {"device": "a CPU", "sglang": "1", "torch": "2", "command": "python one.py"}
    rows = [{**row, "date": f"2026-11-{day}"} for day in ("22", "21", "23", "22")]
    caption = table(["one"], [["1"]], rows, "decode").splitlines()[-1]
    assert caption.startswith("a CPU, SGLang 1, torch 2, 2026-11-21 to 2026-11-23: ")


def test_few_rounds_have_a_range_and_no_interval() -> None:
    """The bootstrap interval of the median of few rounds is the smallest and the largest."""
    for rounds, called in ((2, "range of 2 rounds"), (5, "range of 5 rounds"), (6, "95% interval")):
        ratios = [1 + i / 10 for i in range(rounds)]
        row = paired_ratio(ratios, [1.0] * rounds)
        ends = [round(ratios[0], 4), round(ratios[-1], 4)]
        assert spread([{"rounds": str(rounds)}]) == called
        assert ([row["ratio_low"], row["ratio_high"]] == ends) is (rounds < FEWEST_ROUNDS)
