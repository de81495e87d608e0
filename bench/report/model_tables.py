"""The table of model families: what the masking oracle said of each."""

from __future__ import annotations

from bench.lib.record import recorded
from bench.lib.table_text import Row, table

#: of tests/load/public_model.py, without a vector
PUBLIC = "SmolLM2-135M-Instruct"
#: ends the policy of rows whose requests were steered; and the row of a vector that was refused
STEERED, REFUSED = ", steered", "steering refused"


def models() -> str:
    """A line per family, all policies together; of repeated runs the last."""
    every, last = recorded("models"), dict[tuple[str, str], Row]()
    for row in every:
        last[row["family"], row["policy"]] = row
    header = ["family", "policies", "compactions", "tokens", "of them wrong"]
    header += ["wrong by an oracle without masks", "largest difference", "steering"]
    lines = []
    for family in dict.fromkeys(row["family"] for row in every):
        rows = [row for (name, _), row in last.items() if name == family]
        plain = [row for row in rows if not row["policy"].endswith((STEERED, REFUSED))]
        names = ("compactions", "tokens", "wrong_tokens", "wrong_without_masks")
        sums = [f"{sum(int(row[name]) for row in plain):,}" for name in names]
        lines.append([family, str(len(plain)), *sums, _largest(plain), _steering(rows)])
    return table(header, lines, [*last.values()], "models")


def _largest(rows: list[Row]) -> str:
    return f"{max(float(row['logprob_gap']) for row in rows):.2g}"


def _steering(rows: list[Row]) -> str:
    steered = [row for row in rows if row["policy"].endswith(STEERED)]
    if rows[0]["family"] == PUBLIC:
        return "not run"
    if not steered:
        refusals = [row["ok"] == "yes" for row in rows if row["policy"] == REFUSED]
        assert refusals == [True], "a family is steered, or steering is refused"
        return "refused"
    tokens, wrong = (sum(int(row[name]) for row in steered) for name in ("tokens", "wrong_tokens"))
    return f"{wrong} of {tokens:,} wrong, {_largest(steered)}"
