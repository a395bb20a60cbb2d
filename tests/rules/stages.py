"""Stages of the table of rules, and the kinds of its cells."""

from __future__ import annotations

from collections.abc import Callable

STAGES = (
    "sft",
    "prefer",
    "reward",
    "distill on rows",
    "distill on samples",
    "train",
    "environments",
    "tools",
    "agents",
    "judge and reward models",
    "eval",
    "serve",
    "rows",
    "data check",
)
# A test, which takes fixtures and its stage by their names, or the reason why none applies.
Cell = Callable[..., None] | str
PENDING = "pending"


def cells(tests: dict[str, Cell], reasons: dict[str, str] | None = None) -> dict[str, Cell]:
    """The row of a rule; stages that neither of them names are pending.

    Args:
        tests: Test of each stage, or several stages separated by commas.
        reasons: Sentence of each stage, or several, to which the rule does not apply.
    """
    row: dict[str, Cell] = dict.fromkeys(STAGES, PENDING)
    for names, cell in [*tests.items(), *(reasons or {}).items()]:
        for name in names.split(", "):
            assert row[name] == PENDING, f"{name} has two cells"
            row[name] = cell
    return row
