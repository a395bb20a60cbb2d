"""Charts of the prompts that a run drew: accuracy by difficulty, and groups without a signal."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lightrft.config.files import FileError, lines_of, parse_json, typed
from lightrft.tools.report.charts import Chart, Point

# By the accuracy of a prompt's first group, up to the bounds between them.
DIFFICULTIES, BOUNDS = ("hard at first", "between", "easy at first"), (1 / 3, 2 / 3)
MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Groups of one step, in the order of the step.

    Args:
        step: Number of the step.
        num_prompts: Prompts of the run.
        rows: Row in the data of each group's prompt.
        accuracies: Mean accuracy of each group's samples; None where none was scored.
        without_signal: Whether all samples of a group were equally accurate.
    """

    step: int
    num_prompts: int
    rows: tuple[int, ...]
    accuracies: tuple[float | None, ...]
    without_signal: tuple[bool, ...]


def read_draws(path: Path) -> list[StepDraws]:
    """Return the steps of a file that may be cut off; lines that are none are left out."""
    steps = []
    for line in lines_of(path) if path.is_file() else ():
        try:
            each = typed(StepDraws, parse_json(line, path), path)
        except FileError:
            continue
        if len(each.rows) == len(each.accuracies) == len(each.without_signal):
            steps.append(each)
    return steps


def charts_of_draws(steps: Sequence[StepDraws]) -> list[Chart]:
    """Return the charts of accuracy by difficulty and of groups without a signal."""
    first: dict[int, float] = {}
    accuracy: dict[str, list[Point]] = {name: [] for name in DIFFICULTIES}
    without: dict[str, list[Point]] = {"solved": [], "not solved": []}
    for each in steps:
        groups = zip(each.rows, each.accuracies, each.without_signal, strict=True)
        scored = [(row, value, is_flat) for row, value, is_flat in groups if value is not None]
        for number, name in enumerate(DIFFICULTIES):
            values = [
                value
                for row, value, _ in scored
                if row in first and bisect_left(BOUNDS, first[row]) == number
            ]
            accuracy[name] += [(each.step, fmean(values))] if values else []
        first = {row: value for row, value, _ in scored} | first
        solved = [value > 0.5 for _, value, is_flat in scored if is_flat]
        for name, count in zip(without, (sum(solved), solved.count(False)), strict=True):
            without[name].append((each.step, count / max(len(each.rows), 1)))
    charts = {
        "Accuracy of prompts drawn again, by their first group": accuracy,
        "Groups without a signal": without,
    }
    return [
        Chart(title, "lines", {name: points for name, points in series.items() if points})
        for title, series in charts.items()
        if any(series.values())
    ]


def draw_facts(steps: Sequence[StepDraws]) -> list[tuple[str, str]]:
    """Return a line that says how many prompts were drawn, how often, and which ones most often."""
    counts = Counter(row for each in steps for row in each.rows)
    if not counts:
        return []
    num_prompts = max(each.num_prompts for each in steps)
    shown = ", ".join(f"row {row} {count}x" for row, count in counts.most_common(MAX_SHOWN))
    text = (
        f"{len(counts)} of {num_prompts} in {counts.total()} groups; most often {shown}; "
        f"fewest {min(counts.values())}x"
    )
    return [("prompts drawn", text)]
