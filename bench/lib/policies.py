"""The policies of a comparison, in the order of the registry, and how each is drawn."""

from __future__ import annotations

from sgl_skipkv.policy import built_in, policy_class

#: colours and markers, taken in turn
PALETTE = (
    *(("#0072b2", "s"), ("#d55e00", "o"), ("#009e73", "^"), ("#cc79a7", "v"), ("#56b4e9", "P")),
    *(("#e69f00", "D"), ("#8c6d31", "X"), ("#7b4fa0", "<"), ("#b3b300", ">"), ("#666666", "d")),
    *(("#000000", "x"), ("#882255", "p"), ("#117733", "h"), ("#332288", "*"), ("#00cccc", "8")),
    *(("#9999cc", "H"), ("#cc0033", "1"), ("#661100", "2")),
)


def compared() -> tuple[str, ...]:
    """All that evict."""
    return tuple(name for name in built_in() if policy_class(name).evicts)


def styles() -> dict[str, tuple[str, str]]:
    """Policy -> colour and marker."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(compared())}
