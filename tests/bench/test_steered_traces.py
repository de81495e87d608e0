"""Steering: what a trace is made of, and what a cell asks for."""

from __future__ import annotations

from bench.lib.serving import ROOT
from bench.lib.sweep import Problem
from bench.steering import __main__ as steering


def test_what_a_trace_is_made_of() -> None:
    """Two of five sentences hold a keyword; two repeat an earlier one, in another context."""
    model = str(ROOT / "examples" / "wanderer")
    problem = Problem("p", "hard", "How many pens does Ann have?\n", 7)
    step, other = "1. Ann: it is given, so Ann = 7.\n\n", "2. This is not about pens.\n\n"
    text = f"{step}Wait, let me check Ann again.\n{step}{other}Wait, let me check Ann again.\n"
    measured = steering.Measures(model, ["p"])(problem, text)
    assert measured["nonexecution_share"] == 2 / 5
    assert 1 / 5 <= measured["similar_share"] <= 2 / 5
    assert steering.Measures(model, [])(problem, text) == {"nonexecution_share": 2 / 5}


def test_a_steered_cell_says_how_strongly() -> None:
    cells = [steering.SteeredCell("hard", "full", steering=strength) for strength in (None, 0)]
    asked = [cell.sampling_params(9, 0)["steering"] for cell in cells]
    assert asked == [False, 0] and asked[1] is not False
